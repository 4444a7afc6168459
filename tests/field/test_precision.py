"""Low precision as users met it: sums, loss and weights on the grid of bf16, sizes that are no blocks, libraries that can do less.

M01, M08 and M12 in part; M05 is in test_run, more of M12, M03, M04 and M09 in tests/precision, M06 and M07 in tests/parity.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mtmegatron import mesh as collectives
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.layers.build import Build
from mtmegatron.layers.embedding import PositionEmbedding
from mtmegatron.layers.linear import Linear
from mtmegatron.layers.norm import Norm
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.ops.cross_entropy import linear_cross_entropy
from mtmegatron.parallel.data import Buckets
from mtmegatron.precision.gemm import SIXTEEN_BITS, Gemm
from mtmegatron.precision.types import TYPES
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import (
    batches,
    checks_of,
    laid_out,
    serial_reference,
    world_of,
)
from tests.field.training import (
    engine_of,
    joined,
    largest_difference,
    name,
    parts_of,
    spread,
)
from tests.parity.test_precision import rank_run, serial_run
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


# ---- M01: sums of gradients in every ZeRO stage ----


class Uses(nn.Module):
    """A parameter of each kind: of a linear function, of a norm, of a table."""

    def __init__(self, build: Build):
        super().__init__()
        self.linear = Linear(1, 1, build, split=None, bias=True, std=1.0)
        self.norm = Norm("rmsnorm", 1, 0.0, build)
        self.table = PositionEmbedding(1, 1, build, std=1.0, decay=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.norm(x) + self.table(torch.zeros(1, dtype=torch.int64))


def sums_rank(rank: int, world: int, zero: int) -> list[float]:
    """The reduced gradients of `Uses` whose micro-gradients are 128 of 1 and 128 of 2^-9 on each rank, and the padding's."""
    mesh = Mesh(Layout(data=world), rank, connect=True)
    model = Uses(Build(mesh, torch.bfloat16))
    names = {param: key for key, param in model.named_parameters()}
    buckets = Buckets({"all": [model]}, names, mesh, TYPES["bf16"], zero=zero, bucket_bytes=2**20, overlap=True)
    buckets.start()
    buckets.complete = zero >= 2
    for gradient in [1.0] * 128 + [2.0**-9] * 128:
        buckets.before_forward("all")
        y = model(torch.ones(1, 1, dtype=torch.bfloat16))
        buckets.after_forward("all")
        buckets.before_backward("all")
        y.backward(torch.full((1, 1), gradient, dtype=torch.bfloat16))
        buckets.after_backward("all")
    buckets.finish()
    return [g for bucket in buckets.buckets for g in bucket.own_gradients.tolist()]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_m01_256_ones_and_256_small_gradients_are_256_and_a_half(zero, pool):
    """DeepSpeed#1800: a sum in bf16 stays at 256. #5154: the copy in fp32 was not what got reduced."""
    found = [g for gradients in pool.run(sums_rank, 2, zero) for g in gradients if g]
    assert found == [256.5] * 4


def gathered_rank(rank: int, world: int, layout: dict, micro_batch: int) -> float:
    config = tiny(model={"layers": 1}, data={"sequence": 8}, train={"global_batch": 256, "micro_batch": micro_batch})
    engine = engine_of(config, layout, rank, world, "bf16")
    mine = batches(engine, 0)
    return engine.gradients(mine, engine.count_tokens(mine))[2]


def test_m01_256_micro_batches_have_the_norm_of_one(pool):
    """In every ZeRO stage, to a thousandth."""
    right = gathered_rank(0, 1, {}, 256)
    for layout in ({}, *({"data": 2, "zero": zero} for zero in range(4))):
        assert spread(pool, gathered_rank, layout, layout, 1) == [pytest.approx(right, rel=1e-3)] * world_of(layout)


# ---- M08: sizes that no block of fp8 divides ----


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "blockwise"])
@pytest.mark.parametrize("ffn", [176, 712])
def test_m08_31_tokens_and_odd_widths_under_tensor_and_sequence_parallel(ffn, recipe, pool):
    """ms-swift#9722 and others: padding that ignores the ranks. 62 tokens and 88 or 356 columns on a rank; the bound is that of tests/parity."""
    changes = {"model": {"layers": 2, "ffn": ffn}, "data": {"sequence": 31}, "train": {"global_batch": 4}}
    config = tiny(changes, train=changes["train"] | {"precision": f"fp8-{recipe}", "fp8": {"high_precision": []}})
    trace, tensors = serial_run(config)
    traces = [mine for mine, _ in pool.run(rank_run, 2, config, {"tensor": 2}, tensors)]
    reference = replace(serial_reference(tiny(changes), ("fp32",)), exact=trace, tensors=tensors)
    failed = [c for c in checks_of("tensor=2", "fp64", traces, reference) if not c.passed]
    assert not failed, failed


# ---- M12: clipping under a loss scale ----


def test_m12_what_is_clipped_in_fp16_is_the_gradient_without_the_scale():
    """transformers#40799: a clip of 0.1 of what is 65536 times as large leaves nothing."""
    sgd = {"kind": "sgd", "momentum": 0.0, "clip": 0.1, "lr": 1.0, "decay": "constant", "weight_decay": 0.0}
    engine = engine_of(tiny(model={"layers": 2}, optimizer=sgd), {}, precision="fp16")
    before = [state.master.clone() for state in engine.optimizer.states]
    result = engine.step(batches(engine, 0), 0)
    moved = sum(float((state.master - b).double().square().sum()) for state, b in zip(engine.optimizer.states, before)) ** 0.5
    # a master of at most 2 moves by a number that is rounded to its grid: n elements by half of 2^-23 each, in the square mean
    rounding = 2**-24 * sum(b.numel() for b in before) ** 0.5
    assert engine.loss_scale.scale == 65536 and result.grad_norm > 0.2 and moved == pytest.approx(0.1, rel=64 * EPS32, abs=rounding)


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


def bare_rank(rank: int, world: int, layout: dict) -> tuple[bool, dict]:
    """Whether any weight has a master, and the weights of norms after UPDATES."""
    optimizer = STILL.optimizer.model_copy(update={"masters": False})
    engine = engine_of(STILL.model_copy(update={"optimizer": optimizer}), layout, rank, world, "bf16")
    for number in range(UPDATES):
        engine.step(batches(engine, number), number)
    kept = any(state.master is not state.values for state in engine.optimizer.states)
    return kept, {key: part for key, part in weights_of(engine).items() if "norm" in key}


@pytest.mark.parametrize("layout", [{}, {"data": 2, "zero": 1}], ids=name)
def test_m11_without_masters_they_move_too_as_updates_are_rounded_at_random(layout, pool):
    """In place of a warning: of UPDATES updates that a rounding to the nearest would all lose, some arrive."""
    ranks = spread(pool, bare_rank, layout, layout)
    weights = torch.cat([part.flatten() for part in joined([parts for _, parts in ranks]).values()])
    assert not any(kept for kept, _ in ranks)
    # downwards a step of bf16 is 2^-8, about 4 updates; Adam's updates of one sign add up to some steps
    assert (weights != 1).double().mean() > 0.5 and (weights < 1).any() and (weights > 1).any()


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


def narrow_sum(original):
    """A sum of the library that refuses 16 bits, as one in 16 bits would not be seen in a test of small sums."""

    def call(*args, **kwargs):
        assert not any(x.dtype in SIXTEEN_BITS for x in args if isinstance(x, torch.Tensor)), "16 bits were left to the library to add"
        return original(*args, **kwargs)

    return call


def narrow_rank(rank: int, world: int, narrow: bool) -> list[list[float]]:
    """Sums of bf16 and of fp32 over the ranks, small and large, begun and whole, where the library adds in 16 bits or not."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for module, function in ((dist, "all_reduce"), (collectives, "_reduce_scatter")) if narrow else ():
            patch.setattr(module, function, narrow_sum(getattr(module, function)))
        axis = Mesh(Layout(tensor=world), rank, connect=True, ordered_sum=False, shared=False, narrow_sum=narrow)["tensor"]
        for dtype in (torch.bfloat16, torch.float32) if narrow else (torch.float32,):
            for size in (8, 2 * collectives.SMALL):
                x = torch.full((size,), (256.0, 0.5, 0.5, 1.0)[rank] + (rank * 2.0**-20 if dtype == torch.float32 else 0), dtype=dtype)
                y = x.float()
                sums = [axis.all_reduce(x.clone()), axis.start_all_reduce(x.clone()).wait(), axis.reduce_scatter(x.clone())]
                sums += [axis.start_reduce_scatter(y, torch.bfloat16).wait()] if dtype == torch.bfloat16 else []
                found.append([float(s.unique().item()) for s in sums])
    return found


def test_m13_16_bits_are_added_in_fp32_where_the_library_would_not(pool):
    """Megatron-LM-FL#179: in bf16, 256 + 0.5 + 0.5 + 1 is 256 after each addition. Sums in fp32 stay the library's, bit for bit."""
    for found in pool.run(narrow_rank, 4, True):
        assert found[:2] == [[258.0] * 4] * 2
        assert found[2:] == pool.run(narrow_rank, 4, False)[0]


def narrow_run_rank(rank: int, world: int, layout: dict, narrow: bool) -> tuple[list, dict]:
    own = check(laid_out(tiny(model={"layers": 2}), layout, "bf16"), world)
    with pytest.MonkeyPatch.context() as patch:
        for module, function in ((dist, "all_reduce"), (collectives, "_reduce_scatter")) if narrow else ():
            patch.setattr(module, function, narrow_sum(getattr(module, function)))
        engine = Engine(own, Mesh(layout_of(own), rank, connect=True, ordered_sum=not narrow, shared=False, narrow_sum=narrow))
        results = [engine.step(batches(engine, number), number) for number in range(2)]
        return [(r.loss, r.grad_norm) for r in results], weights_of(engine)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 2, "sequence": False}, {"data": 2, "zero": 2, "reduce": "bf16"}], ids=name)
def test_m13_a_run_on_such_a_library_is_the_run_on_gloo(layout, pool):
    """Bit for bit: of two ranks, a sum in fp32 has one order."""
    runs = [pool.run(narrow_run_rank, 2, layout, narrow) for narrow in (True, False)]
    assert runs[0][0][0] == runs[1][0][0]
    narrow, right = (joined([parts for _, parts in ranks]) for ranks in runs)
    assert all(torch.equal(narrow[key], right[key]) for key in right)


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
