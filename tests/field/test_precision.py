"""Low precision as users met it: a loss on the grid of bf16, weights too large for their updates, libraries that can do less (M10, M11, M13).

M01 and M05 are in test_run, M03, M04, M09 and M12 in tests/precision, M06, M07 and M08 in tests/parity.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mtmegatron import mesh as collectives
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.ops.cross_entropy import linear_cross_entropy
from mtmegatron.precision.gemm import Gemm
from mtmegatron.precision.types import TYPES
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import batches, laid_out
from tests.field.training import (
    engine_of,
    joined,
    largest_difference,
    name,
    parts_of,
    spread,
)
from tests.tiny import tiny

EPS32, EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


# ---- M10: the loss ----


@pytest.mark.parametrize("native", [True, False])
def test_m10_the_fused_loss_of_a_bf16_head_has_no_grid(native):
    """Modalities#464: a bf16 loss near 36 is a multiple of 0.25. Tokens are unit vectors, so that all logits are the weights themselves."""
    draw, tokens = torch.Generator().manual_seed(0), 64
    weight = (torch.randn(259, tokens, generator=draw) + 38 * torch.eye(259, tokens)).bfloat16()
    labels = torch.arange(tokens) + 100
    right = F.cross_entropy(weight.double().t(), labels, reduction="none")
    assert (right.bfloat16().double() - right).abs().max() > 0.05 and 30 < right.mean() < 45
    hidden = torch.eye(tokens, dtype=torch.bfloat16)
    _, total, _ = linear_cross_entropy(hidden, weight, labels, 1.0, chunk=16, matmul=Gemm(native).product)
    assert total.dtype == torch.float32
    # a sum of 64 terms, each of which is a difference of numbers below 45
    assert abs(float(total) - float(right.sum())) < 2 * tokens * EPS32 * float(right.sum())


def weights_of(engine: Engine) -> dict:
    """This rank's parts of the weights; those that ZeRO 3 has released come back."""
    for bucket in engine.buckets.buckets:
        bucket.finish_gather()
    return parts_of(engine)


# ---- M11: updates below half a step of the format ----

STILL = tiny(
    {
        "model": {"layers": 2}, "optimizer": {"lr": 1e-3, "decay": "constant"},
        "train": {"steps": 100, "global_batch": 4, "micro_batch": 2},
    }
)  # fmt: skip
UPDATES = 30


def norms_rank(rank: int, world: int, layout: dict) -> tuple[float, dict]:
    """The largest move of a weight of a norm in the first update, and all of them after UPDATES."""
    engine, largest = engine_of(STILL, layout, rank, world, "bf16"), 0.0
    for number in range(UPDATES):
        engine.step(batches(engine, number), number)
        if number == 0:
            moves = [(state.master.double() - 1).abs() for state in engine.optimizer.states]
            largest = max(float(move[move < 0.1].max()) for move in moves if bool((move < 0.1).any()))
    held = [state.values.double() - state.master.bfloat16().double() for state in engine.optimizer.states]
    assert all(not difference.any() for difference in held), "weights are the rounded masters"
    return largest, {key: part for key, part in weights_of(engine).items() if "norm" in key}


@pytest.mark.parametrize("layout", [{}, {"data": 2, "zero": 1}, {"data": 2, "zero": 3}], ids=name)
def test_m11_weights_of_norms_move_though_one_update_is_less_than_a_step_of_bf16(layout, pool):
    """Model-Optimizer#2322: 1 - 0.001 is 1 in bf16, so that without fp32 masters norms never learn."""
    assert torch.ones((), dtype=torch.bfloat16) - 1e-3 == 1
    ranks = spread(pool, norms_rank, layout, layout)
    assert all(0 < largest < 2**-9 for largest, _ in ranks)
    weights = torch.cat([part.flatten() for part in joined([parts for _, parts in ranks]).values()])
    assert (weights != 1).double().mean() > 0.5 and (weights < 1).any() and (weights > 1).any()


def test_m11_no_precision_is_without_masters():
    assert all(types.master == torch.promote_types(types.compute, torch.float32) for types in TYPES.values())


# ---- M13: what the library of an accelerator cannot do ----

MOE = {"experts": 8, "top_k": 2, "ffn": 24, "capacity": 1.0}
EXPERTS = tiny({"model": {"layers": 2, "moe": MOE}, "train": {"global_batch": 4, "micro_batch": 1}, "optimizer": {"kind": "sgd"}})
# a gradient is a sum over 128 tokens of products over at most 259 channels, through 2 blocks; weights of sgd follow it in proportion
ROUNDING = 128 * 259 * 2 * EPS64


class Asked(TorchDispatchMode):
    """Notes what a step asks of the device that a backend was found to do wrongly: isin, and the sorting of booleans."""

    def __init__(self):
        super().__init__()
        self.sorts, self.faults = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        called = function.overloadpacket.__name__
        if "sort" in called or called == "topk":
            self.sorts += 1
            self.faults += [called] if args[0].dtype == torch.bool else []
        if called == "isin":
            self.faults.append(called)
        return function(*args, **(kwargs or {}))


class Library:
    """Collectives of torch.distributed, held to what all libraries have: sums, maxima and minima, no empty legs."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.calls: set[str] = set()
        for module, function in ((dist, "all_reduce"), (dist, "all_to_all_single"), (collectives, "_all_gather"), (collectives, "_reduce_scatter")):
            patch.setattr(module, function, self._held(function, getattr(module, function)))

    def _held(self, function: str, original):
        def call(*args, **kwargs):
            self.calls.add(function)
            assert all(x.numel() for x in args if isinstance(x, torch.Tensor)), f"{function} of nothing"
            assert all(all(legs) for legs in args if isinstance(legs, list)), f"{function} with an empty leg"
            used = [x for x in (*args, *kwargs.values()) if isinstance(x, (dist.ReduceOp, dist.ReduceOp.RedOpType))]
            assert all(op in collectives.OPERATIONS.values() for op in used), f"{function} by {used}"
            return original(*args, **kwargs)

        return call


def library_rank(rank: int, world: int, layout: dict) -> tuple[set[str], list, dict]:
    """Two steps in fp64 where sums are the library's own; what was called, the losses and norms, this rank's weights."""
    own = check(laid_out(EXPERTS, layout, "fp64"), world)
    with pytest.MonkeyPatch.context() as patch, Asked() as asked:
        library = Library(patch)
        engine = Engine(own, Mesh(layout_of(own), rank, connect=True, ordered_sum=False))
        results = [engine.step(batches(engine, number), number) for number in range(2)]
        weights = weights_of(engine)
    assert asked.sorts and not asked.faults, asked.faults
    return library.calls, [(r.loss, r.grad_norm, r.fault) for r in results], weights


LAYOUTS = [{"data": 2, "expert": 2, "zero": 2}, {"tensor": 2, "expert_tensor": 2}, {"context": 2, "expert": 2, "zero": 3, "dispatcher": "allgather"}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_m13_a_library_with_few_collectives_of_its_own_gives_the_run_of_one_process(layout, pool):
    """Megatron-LM-FL#174: only SUM, MAX and MIN, and nothing empty. sglang-plugin-FL#79: `isin` was wrong, a stable sort of booleans failed."""
    engine = engine_of(EXPERTS, {})
    right = [engine.step(batches(engine, number), number) for number in range(2)]
    ranks = spread(pool, library_rank, layout, layout)
    assert set.union(*(calls for calls, _, _ in ranks)) >= {"all_reduce", "_all_gather", "_reduce_scatter"}
    for _, found, _ in ranks:
        for (loss, norm, fault), one in zip(found, right):
            assert not fault and (loss, norm) == pytest.approx((one.loss, one.grad_norm), rel=ROUNDING)
    assert largest_difference(joined([parts for *_, parts in ranks]), joined([parts_of(engine)])) < ROUNDING


SIZES = (3, 0, 5, 1)


def shards_rank(rank: int, world: int, shared: bool) -> list:
    """All shards on every rank, each rank with its own number of rows."""
    with pytest.MonkeyPatch.context() as patch:
        library = Library(patch)
        axis = Mesh(Layout(data=world, expert=world), rank, connect=True, ordered_sum=shared, shared=shared)["expert"]
        mine = torch.full((SIZES[rank], 2), float(rank))
        rows = axis.start_all_to_all_rows(mine.repeat(world, 1), [SIZES[rank]] * world, list(SIZES)).wait()
    assert library.calls
    return rows.tolist()


@pytest.mark.parametrize("shared", [True, False])
def test_m13_shards_of_any_size_are_gathered_without_an_empty_leg(shared, pool):
    """InfiniCore#1028: shards of 3, 0, 5 and 1 rows."""
    expected = [[float(rank)] * 2 for rank, size in enumerate(SIZES) for _ in range(size)]
    assert pool.run(shards_rank, 4, shared) == [expected] * 4
