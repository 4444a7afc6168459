"""Collectives through shared memory: the bits of Gloo's way, whatever the sizes, the order and the room; and peers that go."""

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from mtmegatron import shared_memory
from mtmegatron.layout import Layout
from mtmegatron.mesh import SMALL, Mesh
from mtmegatron.shared_memory import SLOT

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system has no shared memory of this kind")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


def numbers(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of very different sizes, so that another order of a sum has other bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.exp(3 * torch.randn(count, generator=generator))
    return x.to(dtype)


def every_operation(axis, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each operation makes of x; of its first elements where the axis has to divide them."""
    n = len(x) // axis.size * axis.size
    found = {op: axis.all_reduce(x.clone(), op) for op in ("sum", "max", "min")}
    found |= {"later": axis.start_all_reduce(x.clone()).wait(), "gather": axis.all_gather(x.view(-1, 1))}
    out = torch.zeros(axis.size, len(x), dtype=x.dtype)
    out[axis.rank] = x
    found |= {"out": axis.all_gather(out[axis.rank], out=out.view(-1)), "exchange": axis.all_to_all(x[:n])}
    found |= {"shift": axis.start_shift(x).wait()}
    if x.is_floating_point():
        found |= {"scatter": axis.reduce_scatter(x[:n].clone())}
        found |= {"narrow": axis.start_reduce_scatter(x[:n].clone(), torch.bfloat16).wait()}
    return found


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def equality_rank(rank, world, sizes):
    axes = [Mesh(Layout(data=world), rank, connect=True, shared=shared)["data"] for shared in (False, True)]
    different = []
    for dtype in DTYPES:
        for size in sizes:
            gloo, shared = (every_operation(axis, numbers(size, dtype, 100 * rank + size)) for axis in axes)
            different += [(name, dtype, size) for name in gloo if gloo[name].shape != shared[name].shape or bits(gloo[name]) != bits(shared[name])]
    return axes[1]._channel is not None, different


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_operation_has_the_bits_of_the_other_way(world, pool):
    sizes = [0, 1, 9, SMALL - 1, SMALL + 24] + ([SLOT // 4 * 3 + 48] if world < 8 else [])
    assert pool.run(equality_rank, world, sizes) == [(True, [])] * world


def other_types_rank(rank, world):
    axis = Mesh(Layout(data=world), rank, connect=True)["data"]
    kinds = torch.tensor([rank == 0, True]), torch.tensor([complex(rank, 1)]), torch.tensor(float(rank), requires_grad=True).reshape(1)
    gathered = [axis.all_gather(x) for x in kinds]
    return [x.tolist() for x in gathered], [x.requires_grad for x in gathered], axis.all_reduce(torch.tensor([rank == 0]), "max").tolist()


def test_any_type_is_gathered_and_no_graph_leads_into_the_memory(pool):
    expected = [[True, True, False, True], [1j, 1 + 1j], [0.0, 1.0]], [False] * 3, [True]
    assert pool.run(other_types_rank, 2) == [expected] * 2


def tight(function):
    """Runs with three slots, as if memory were short."""
    before, shared_memory.SLOTS = shared_memory.SLOTS, 3
    try:
        return function()
    finally:
        shared_memory.SLOTS = before


def outstanding_rank(rank, world, slots):
    """Several collectives on three groups at once, completed in another order; then again on the same buffers."""

    def work() -> list[bool]:
        mesh = Mesh(Layout(tensor=2, data=2), rank, connect=True)
        data, tensor, world_axis = mesh["data"], mesh["tensor"], mesh.world
        large, small = torch.full((SLOT * 2,), float(rank)), torch.full((6,), float(rank))
        right = []
        for _ in range(3):
            buckets = [data.start_reduce_scatter(large), data.start_reduce_scatter(large * 2)]
            values = data.start_all_gather(small)
            tokens, sums = tensor.start_all_gather(large), tensor.start_all_reduce(large.clone())
            right.append(values.wait().tolist() == [float(r) for r in data.ranks for _ in range(6)])
            right.append(world_axis.all_reduce(small.clone()).tolist() == [6.0] * 6)
            right.append(bool((sums.wait() == sum(tensor.ranks)).all()))
            right.append(torch.equal(tokens.wait().view(2, -1)[:, 0], torch.tensor(tensor.ranks, dtype=torch.float)))
            right += [bool((bucket.wait() == factor * sum(data.ranks)).all()) for factor, bucket in zip((2, 1), reversed(buckets))]
        return right

    return tight(work) if slots == 3 else work()


@pytest.mark.parametrize("slots", [3, 128])
def test_collectives_may_overlap_and_end_in_another_order_however_little_room_there_is(slots, pool):
    assert pool.run(outstanding_rank, 4, slots) == [[True] * 18] * 4


def many_rank(rank, world, count):
    mesh = Mesh(Layout(tensor=2, data=2), rank, connect=True)
    wrong = 0
    for step in range(count):
        axis = mesh["data"] if step % 3 else mesh["tensor"]
        wrong += axis.all_reduce(torch.tensor([rank + step])).item() != sum(axis.ranks) + 2 * step
        if step % 50 == rank:
            time.sleep(0.0003)  # ranks come at different times
    return wrong, mesh["data"]._channel._own.slots


def test_thousands_of_small_ones_use_the_same_memory_again(pool):
    for wrong, slots in pool.run(many_rank, 4, 3000):
        assert wrong == 0
        assert slots <= 3  # a rank is at most one collective ahead


def pieces_rank(rank, world):
    def work():
        axis = Mesh(Layout(data=world), rank, connect=True)["data"]
        x = torch.arange(20 * SLOT // 4)
        sums = [bool((axis.all_reduce(x.clone()) == world * x).all()), bool((axis.start_all_reduce(x.clone()).wait() == world * x).all())]
        return sums, axis._channel._own.slots

    return tight(work)


def test_what_is_larger_than_the_memory_goes_in_pieces(pool):
    assert pool.run(pieces_rank, 2) == [([True, True], 3)] * 2


def lost_rank(rank, world, folder, how):
    """Rank 1 goes; the others write what they are told, and when."""
    mesh = Mesh(Layout(data=world), rank, connect=True)
    mesh.world.all_reduce(torch.ones(3))
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return
    begin = time.monotonic()
    try:
        mesh.world.all_reduce(torch.ones(3))
    except RuntimeError as error:
        Path(folder, f"{rank}").write_text(f"{time.monotonic() - begin}\n{error}")


@pytest.mark.parametrize("how", ["kill", "return"])
def test_a_peer_that_is_gone_is_named_within_seconds(how, pool, tmp_path):
    if how == "kill":
        with pytest.raises(RuntimeError, match="rank 1 of 3:\nthe process died"):
            pool.run(lost_rank, 3, str(tmp_path), how)
    else:
        pool.run(lost_rank, 3, str(tmp_path), how)
    for rank in (0, 2):
        seconds, text = (tmp_path / f"{rank}").read_text().split("\n")
        assert float(seconds) < 5
        assert "all-reduce over data" in text and "closed by peer: rank 1 (process" in text


def late_rank(rank, world):
    axis = Mesh(Layout(data=world), rank, connect=True)["data"]
    axis._channel.timeout = 0.3
    if rank == 2:
        time.sleep(1.5)
        return ""
    try:
        axis.all_gather(torch.ones(3))
    except RuntimeError as error:
        return str(error)


def test_a_rank_that_does_not_come_in_time_is_named(pool):
    texts = pool.run(late_rank, 3)
    assert texts[0] == texts[1] == "shared memory: all-gather over data of ranks [0, 1, 2]: ranks 2 did not come within 0 s"


def disagreeing_rank(rank, world):
    axis = Mesh(Layout(data=world), rank, connect=True)["data"]
    try:
        axis.all_gather(torch.ones(3 + rank))
    except AssertionError as error:
        return str(error)


def test_ranks_that_call_different_collectives_are_stopped(pool):
    assert pool.run(disagreeing_rank, 2) == ["ranks (0, 1) disagree about all-gather over data"] * 2


def unable_rank(rank, world):
    """Rank 2 of two groups cannot make memory."""
    make = os.memfd_create
    if rank == 2:
        os.memfd_create = refuse
    try:
        mesh = Mesh(Layout(tensor=2, data=2), rank, connect=True)
    finally:
        os.memfd_create = make
    total = mesh.world.all_reduce(torch.tensor([float(rank)])).item() + mesh["tensor"].all_reduce(torch.ones(1)).item()
    return mesh.not_shared, mesh["tensor"]._channel is not None, mesh["data"]._channel is not None, total


def refuse(name: str) -> int:
    raise OSError("no memory to share")


def test_where_a_rank_cannot_share_its_groups_use_the_other_way_and_say_why(pool):
    why = "no memory to share"
    expected = [(why, True, False, 8.0), (why, True, True, 8.0), (why, False, False, 8.0), (why, False, True, 8.0)]
    assert pool.run(unable_rank, 4) == expected


def open_now() -> list[str]:
    """Descriptors and maps of shared memory and of watched processes."""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:mtmegatron" in line]
    return [link for link in links if "memfd:mtmegatron" in link or "pidfd" in link] + maps


def traces_rank(rank, world):
    """Whether a mesh adds to the file system, what it opens, and what of that is left when it is gone."""
    files = set(os.listdir("/dev/shm"))
    mesh = Mesh(Layout(data=world), rank, connect=True)
    mesh.world.all_reduce(torch.ones(SLOT))
    named, opened = any("mtmegatron" in name for name in set(os.listdir("/dev/shm")) - files), len(open_now())
    del mesh
    gc.collect()
    return named, opened > 0, open_now()


def test_nothing_is_left_behind(pool):
    assert pool.run(traces_rank, 2) == [(False, True, [])] * 2


def switched_off_rank(rank, world):
    mesh = Mesh(Layout(data=world), rank, connect=True, shared=False)
    return mesh["data"]._channel is None, mesh.not_shared, mesh["data"].all_reduce(torch.ones(2)).tolist()


def test_it_can_be_switched_off(pool):
    assert pool.run(switched_off_rank, 2) == [(True, "", [2.0, 2.0])] * 2
