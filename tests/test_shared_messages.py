"""Messages through shared memory: what is sent arrives, in order, however little room there is and however late the receiver."""

import os
import time

import pytest
import torch

from mtmegatron.errors import UserError
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.parallel.pipeline.schedule import KINDS, schedule
from mtmegatron.shared_memory import SLOT, SLOTS
from mtmegatron.shared_messages import ENTRIES, NETWORK
from tests.test_shared_memory import numbers, tight

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system has no shared memory of this kind")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LENGTHS = (1, 7, SLOT // 4, SLOT // 4 * 3 + 5)


def pipeline(rank, world):
    return Mesh(Layout(pipeline=world), rank, connect=True)["pipeline"]


def messages(sender: int) -> list[torch.Tensor]:
    return [numbers(length, dtype, 10 * sender + length).view(1, -1) for dtype in DTYPES for length in LENGTHS]


def ring_rank(rank, world):
    """Every rank sends to its neighbours, both ways at once, and gets what they send."""
    axis = pipeline(rank, world)
    neighbours = sorted({(rank - 1) % world, (rank + 1) % world})
    sent = [axis.send(x, to) for to in neighbours for x in messages(rank)]
    right = []
    for source in neighbours:
        expected = messages(source)
        arriving = [axis.receive(torch.empty_like(x), source) for x in expected]
        arriving[-1].wait()
        right += [torch.equal(message.wait(), x) for message, x in zip(arriving, expected)]
    for message in sent:
        message.wait()
    return sorted(axis._lines) == neighbours and all(right)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_messages_of_any_type_and_size_arrive_in_order_both_ways(world, pool):
    assert pool.run(ring_rank, world) == [True] * world


def crowded_rank(rank, world, count, length):
    """Rank 0 sends all that it has before rank 1 looks, with three slots. The other way the same, later."""

    def work():
        axis, ways = pipeline(rank, world), []
        line = axis._lines[1 - rank]
        post = line._post
        line._post = lambda slot, mark: (ways.append(slot == NETWORK), post(slot, mark))
        for sender in (0, 1):
            if rank == sender:
                sent = [axis.send(torch.full((length,), float(i)), 1 - rank) for i in range(count)]
                for message in sent:
                    message.wait()
            else:
                time.sleep(0.2)
                arriving = [axis.receive(torch.empty(length), 1 - rank) for i in range(count)]
                right = [bool((message.wait() == i).all()) for i, message in enumerate(arriving)]
        return all(right), True in ways, False in ways

    return tight(work)


@pytest.mark.parametrize(("count", "length", "by_memory"), [(6, 9, True), (3, SLOT, False), (ENTRIES + 20, 2, True)])
def test_what_finds_no_room_goes_over_the_network_in_its_place(count, length, by_memory, pool):
    assert pool.run(crowded_rank, 2, count, length) == [(True, True, by_memory)] * 2


def faulty_rank(rank, world, fault):
    axis = pipeline(rank, world)
    axis._lines[1 - rank].timeout = 0.3
    if rank == 1:
        if fault == "another size":
            axis.send(torch.ones(4), 0)
        if fault != "gone":
            time.sleep(1.5)
        return ""
    try:
        axis.receive(torch.ones(3), 1).wait()
    except (RuntimeError, AssertionError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("another size", "ranks 0 and 1 disagree about a message"),
        ("late", "shared memory: receive from rank 1: ranks 1 did not come within 0 s"),
        ("gone", "shared memory: receive from rank 1: connection closed by peer: rank 1 (process"),
    ],
)
def test_a_message_that_does_not_come_is_told(fault, text, pool):
    assert pool.run(faulty_rank, 2, fault)[0].startswith(text)


def waiting(actions) -> int:
    """The most messages from one rank that have been asked for and not yet used."""
    most, asked = 0, {}
    for action in actions:
        if action.kind.startswith("RECV"):
            asked[action.kind[-1], action.micro_batch, action.chunk] = action.peer
            most = max(most, list(asked.values()).count(action.peer))
        elif action.peer is None:
            asked.pop(("F" if action.kind == "F" else "B", action.micro_batch, action.chunk), None)
    return most


@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_asks_for_so_many_messages_ahead_that_its_peers_could_wait_for_each_other(kind):
    found = []
    for ranks, chunks, micro_batches in [(2, 1, 8), (2, 2, 8), (4, 1, 8), (4, 2, 16), (8, 4, 16), (16, 2, 32), (32, 2, 64)]:
        try:
            plan = schedule(kind, ranks, chunks, micro_batches)
        except UserError:
            continue
        found += [waiting(actions) for actions in plan.actions]
    assert 0 < max(found) < ENTRIES - SLOTS
