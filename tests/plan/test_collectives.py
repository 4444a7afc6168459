"""What a rank sends is listed from the real code, agrees with every other rank of its groups, and is what real processes send."""

from collections import Counter, defaultdict
from inspect import signature
from pathlib import Path

import pytest

from mtmegatron.config import Config, check, load
from mtmegatron.config.derived import layout_of
from mtmegatron.mesh import Axis, Mesh
from mtmegatron.plan.account import state_of
from mtmegatron.plan.collectives import (
    COLLECTIVES,
    MESSAGES,
    Log,
    Recorded,
    Silent,
    Transfer,
    counts,
    micro_batches_of,
    record_step,
    step_counts,
    with_micro_batches,
)  # fmt: skip
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import batches, world_of
from tests.plan.layouts import random_configs
from tests.tiny import tiny

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def configured(layout: dict, micro_batches: int = 2, **sections: dict) -> Config:
    config = check(tiny(sections, parallel=layout, train={"global_batch": 2 * layout.get("data", 1)}), world_of(layout))
    return with_micro_batches(config, micro_batches)


def issued(transfers: list[Transfer], *fields: str) -> list[tuple]:
    return [tuple(getattr(t, name) for name in fields) for t in transfers]


def by_group(transfers: list[Transfer]) -> dict[tuple[int, ...], list[tuple]]:
    """The collectives of each set of ranks, in order."""
    lists = defaultdict(list)
    for t in transfers:
        if t.peer is None:
            lists[t.ranks].append((t.operation, t.bytes, t.dtype))
    return lists


def check_agreement(logs: dict[int, list[Transfer]]) -> None:
    """Ranks of a group list the same collectives in the same order; messages of a pair arrive as they are sent."""
    found: dict[tuple[int, ...], list[tuple]] = {}
    for rank, transfers in logs.items():
        for ranks, calls in by_group(transfers).items():
            assert rank in ranks
            assert found.setdefault(ranks, calls) == calls, (rank, ranks)
    for ranks, calls in found.items():
        assert all(by_group(logs[rank])[ranks] == calls for rank in ranks if rank in logs)
    for rank, transfers in logs.items():
        for peer in {t.peer for t in transfers if t.peer in logs}:
            sent = [(t.bytes, t.dtype) for t in transfers if (t.operation, t.peer) == ("send", peer)]
            assert sent == [(t.bytes, t.dtype) for t in logs[peer] if (t.operation, t.peer) == ("receive", rank)]


def check_no_wait_in_a_circle(logs: dict[int, list[Transfer]]) -> None:
    """Even if every collective blocked until all its ranks had come, all would come to the end."""
    calls = {rank: [t.ranks for t in transfers if t.peer is None] for rank, transfers in logs.items()}
    position = dict.fromkeys(calls, 0)

    def head(rank: int) -> tuple[int, ...] | None:
        return calls[rank][position[rank]] if position[rank] < len(calls[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in calls:
            while (group := head(rank)) and all(head(other) == group for other in group):
                moved = True
                for other in group:
                    position[other] += 1
    assert not any(head(rank) for rank in calls), position


# ---- the recorder


def test_nothing_that_an_axis_sends_escapes_the_log():
    assert {name for name in vars(Axis) if not name.startswith("_")} == COLLECTIVES | MESSAGES


def test_an_axis_without_others_takes_what_a_real_one_takes():
    for name in COLLECTIVES | MESSAGES:
        assert signature(getattr(Silent, name)).parameters.keys() == signature(getattr(Axis, name)).parameters.keys(), name


def send_for_real(rank: int, world: int, config: Config, steps: int) -> list[list[Transfer]]:
    """What each of the first steps of a real run sends."""
    log = Log()
    mesh = Mesh(layout_of(config), rank, connect=True, axis=lambda *place, **more: Recorded(Axis(*place, **more), log))
    engine, seen = Engine(config, mesh), []
    for step in range(steps):
        log.transfers = []
        engine.step(batches(engine, step), step, log)
        seen.append(log.transfers)
    return seen


REAL = [
    {"tensor": 2}, {"tensor": 2, "sequence": False}, {"data": 2}, {"data": 2, "zero": 1}, {"data": 2, "zero": 3}, {"context": 2},
    {"context": 2, "context_kind": "ring"}, {"context": 2, "context_kind": "ulysses"}, {"pipeline": 2, "schedule": "zb-v", "data": 2, "zero": 2},
    {"tensor": 2, "pipeline": 2, "schedule": "interleaved"},
]  # fmt: skip


@pytest.mark.parametrize("layout", REAL, ids=str)
def test_the_list_is_what_real_processes_send_in_every_step(layout, pool):
    steps = 5 if layout.get("tensor") and len(layout) < 3 else 2
    config, fields = configured(layout, model={"tied": True}), ("axis", "ranks", "operation", "bytes", "dtype", "peer")
    for rank, seen in enumerate(pool.run(send_for_real, world_of(layout), config, steps)):
        listed = issued(record_step(config, rank).transfers, *fields)
        assert all(issued(transfers, *fields) == listed for transfers in seen)


def per_block(layout: dict, rank: int = 0) -> dict[str, Counter]:
    """Collectives over the tensor axis that one more block adds to a micro-batch, by part of the step."""
    more, fewer = (
        Counter((t.when, t.operation) for t in record_step(configured(layout, 1, model={"layers": n}), rank).transfers if t.axis == "tensor")
        for n in (4, 3)
    )
    found = defaultdict(Counter)
    for (when, operation), count in (more - fewer).items():
        found[when][operation] = count
    return dict(found)


def test_a_tensor_parallel_block_has_two_and_two_collectives():
    """Two gathers and two scatters each way, and the two inputs that are gathered anew in place of being kept; Korthikanti et al., 4.2."""
    assert per_block({"tensor": 2}) == {
        "forward": {"all_gather": 2, "reduce_scatter": 2},
        "backward": {"all_gather": 2 + 2, "reduce_scatter": 2},
    }
    assert per_block({"tensor": 2, "sequence": False}) == {"forward": {"all_reduce": 2}, "backward": {"all_reduce": 2}}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_moves_what_its_paper_says(zero):
    """Rajbhandari et al. 2020, section 7, with m micro-batches: 0 and 1 reduce once; 2 and 3 at each micro-batch; 3 gathers twice in each, but
    once the embedding and the head, whose backward reads no weights."""
    data, m = 4, 3
    config = configured({"data": data, "zero": zero}, m)
    state = state_of(config, 0)
    gradients, weights = state.gradients * (data if zero >= 2 else 1), state.weights * (data if zero == 3 else 1)
    tables = 2 * config.model.vocab * config.model.width * 4  # bytes
    volume = Counter()
    for t in record_step(config, 0).transfers:
        if t.operation != "all_reduce":  # which carries the count of tokens and the norm
            volume[t.operation] += t.bytes
    assert volume == {
        "reduce_scatter": gradients * (m if zero >= 2 else 1),
        "all_gather": {0: gradients, 3: m * (2 * weights - tables)}.get(zero, weights),
    }


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "data": 2, "zero": 1}, {"data": 2, "zero": 3}, {"data": 2, "zero": 2, "pipeline": 2, "schedule": "zb-h1"},
        {"pipeline": 2, "schedule": "interleaved", "context": 2}, {"pipeline": 2, "schedule": "zb-v", "data": 2, "zero": 3},
    ],
    ids=str,
)  # fmt: skip
def test_one_and_two_micro_batches_tell_those_of_a_whole_step(layout):
    config = configured(layout, 7)
    for rank in (0, world_of(layout) - 1):
        assert step_counts(config, rank) == counts(record_step(config, rank).transfers)


# ---- many ranks


def test_the_checks_of_many_ranks_see_what_they_should():
    config = configured({"tensor": 2, "data": 2, "zero": 1})
    logs = {rank: record_step(config, rank).transfers for rank in range(4)}
    check_agreement(logs)
    mine = logs[1]
    tensor = [i for i, t in enumerate(mine) if t.axis == "tensor"]
    with pytest.raises(AssertionError):
        check_agreement(logs | {1: mine[: tensor[3]] + mine[tensor[3] + 1 :]})
    last = max(i for i, t in enumerate(mine[:-1]) if t.ranks != mine[i + 1].ranks)
    swapped = [*mine[:last], mine[last + 1], mine[last], *mine[last + 2 :]]
    check_agreement(logs | {1: swapped})  # in each group alone the order is the same
    with pytest.raises(AssertionError):
        check_no_wait_in_a_circle(logs | {1: swapped})


@pytest.mark.parametrize("config", random_configs(10, seed=1, largest=8), ids=lambda config: layout_of(config).describe())
def test_all_ranks_of_a_group_list_the_same_collectives_in_the_same_order(config):
    logs = {rank: record_step(config, rank).transfers for rank in range(layout_of(config).world)}
    check_agreement(logs)
    check_no_wait_in_a_circle(logs)


def test_405_billion_parameters_on_4096_ranks():
    """Ranks of first, inner and last stages, first and last coordinates: 24 of them, and what they share is the same."""
    layout = {"tensor": 8, "pipeline": 16, "data": 32, "zero": 1}
    changes = [f"parallel.{key}={value}" for key, value in layout.items()]
    config = with_micro_batches(check(load(CONFIGS / "llama3-405b.yaml", changes).config, 4096), 1)
    where = layout_of(config)
    ranks = [s * where.stage + d * 8 + t for s in (0, 1, 8, 15) for d in (0, 31) for t in (0, 1, 7)]
    logs = {rank: record_step(config, rank).transfers for rank in ranks}
    check_agreement(logs)
    hidden = config.data.sequence // 8 * config.model.width * 2
    for rank, transfers in logs.items():
        stage = where.coordinate(rank, "pipeline")
        messages = Counter((t.operation, t.bytes) for t in transfers if t.peer is not None)
        assert messages == {(way, hidden): 2 if 0 < stage < 15 else 1 for way in ("send", "receive")}
        reduced = sum(t.bytes for t in transfers if t.operation == "reduce_scatter" and "data_shards" in t.axis)
        assert reduced == state_of(config, rank).gradients
    assert micro_batches_of(config) == 1
