"""Recomputation as users met it: masks drawn anew, pipelines and ZeRO that do not go together."""

from functools import cache
from itertools import combinations

import pytest
import torch

from mtmegatron.parallel.pipeline.schedule import KINDS
from mtmegatron.verify.protocol import batches, compare, describe, serial_reference
from tests.field.training import engine_of, name, spread
from tests.tiny import tiny

DROPPING = {"dropout_embedding": 0.2, "dropout_attention": 0.2, "dropout_residual": 0.2}
PARTS = ("attention", "norm", "activation", "up")
SUBSETS = [list(parts) for n in range(1, 5) for parts in combinations(PARTS, n)]
MODES = [{"recompute": "selective", "parts": parts} for parts in SUBSETS]
MODES += [{"recompute": "full"}, {"recompute": "full", "every": 2}, {"recompute": "full", "first": 1}]
FEW = [{"recompute": "selective", "parts": list(PARTS)}, {"recompute": "full"}]


# ---- P23 ----


def gradients_of(config, layout: dict, rank: int, world: int) -> tuple[tuple, list[torch.Tensor]]:
    """(loss, z term, norm) and this rank's shards of the gradients of a global batch."""
    engine = engine_of(config, layout, rank, world, "fp32")
    mine = batches(engine, 0)
    numbers = engine.gradients(mine, engine.count_tokens(mine), 1)
    return numbers, [bucket.own_gradients.clone() for bucket in engine.buckets.buckets]


def different(rank: int, world: int, changes: dict, layout: dict, modes: list[dict]) -> list[str]:
    """The modes under which a bit of loss, norm or a gradient differs on this rank."""
    config = tiny(model=changes, train={"global_batch": 4})
    numbers, right = gradients_of(config, layout, rank, world)
    found = []
    for mode in modes:
        mine, gradients = gradients_of(config, layout | mode, rank, world)
        if mine != numbers or not all(torch.equal(a, b) for a, b in zip(gradients, right, strict=True)):
            found.append(describe(mode))
    return found


LAYOUTS = [{}, {"tensor": 2}, {"pipeline": 2, "schedule": "zb-h1"}, {"data": 2, "zero": 3}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_p23_gradients_have_the_same_bits_under_every_mode(layout, pool):
    assert not any(spread(pool, different, layout, DROPPING, layout, MODES))


def test_p23_also_where_all_of_it_meets(pool):
    layout = {"tensor": 2, "pipeline": 2, "schedule": "zb-h1", "data": 2, "zero": 3}
    assert not any(spread(pool, different, layout, DROPPING, layout, FEW))


@pytest.mark.parametrize("kind", ["allgather", "ring", "ulysses"])
def test_p23_also_with_context_parallel(kind, pool):
    layout = {"context": 2, "context_kind": kind}
    changes = {rate: 0.2 for rate in ("dropout_embedding", "dropout_residual")}  # attention's is refused there
    assert not any(spread(pool, different, layout, changes, layout, FEW))


def kept_bytes(mode: dict) -> int:
    """Bytes that autograd keeps of one forward."""
    engine = engine_of(tiny(), mode, precision="fp32")
    storages: dict[int, tuple[torch.Tensor, int]] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        storages[t.untyped_storage().data_ptr()] = t, t.untyped_storage().nbytes()  # held: no address is used twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        engine.model(None, batches(engine, 0)[0], step=0)
    return sum(size for _, size in storages.values())


def test_each_part_keeps_less():
    """So that equal bits above are not those of doing nothing."""
    nothing = kept_bytes({})
    each = [kept_bytes({"recompute": "selective", "parts": [part]}) for part in PARTS]
    assert all(size < nothing for size in each)
    assert kept_bytes(FEW[0]) < min(each)
    assert kept_bytes(FEW[1]) < min(each)


# ---- P32 ----


@cache
def reference():
    return serial_reference(tiny(), ("fp32",))


@pytest.mark.parametrize("zero, recompute", [(2, "selective"), (3, "full")])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "forward_only"])
def test_p32_zero_2_and_3_under_every_schedule(kind, zero, recompute, pool):
    layout = {"pipeline": 2, "schedule": kind, "data": 2, "zero": zero, "recompute": recompute, "micro_batch": 1}
    failed = [check for check in compare(tiny(), layout, "fp64", reference(), pool) if not check.passed]
    assert not failed, failed
