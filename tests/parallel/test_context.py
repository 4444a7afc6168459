"""Context parallel attention equals attention of one process, for every kind, mask, grouping of heads and packing; and the parts it is made of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.batch import IGNORE, Batch, Bounds
from mtmegatron.errors import UserError
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.ops.attention import attention
from mtmegatron.parallel.context import ContextSplit, _rank_order, _sequence_order, context_attention, valid_lengths
from mtmegatron.parallel.ring import pieces, plan
from tests.ops.helpers import assert_near, double, gradients, leaf

LENGTH = 32
DOCUMENTS = {
    "one sequence": Bounds.equal(1, LENGTH),
    "two sequences": Bounds.equal(2, LENGTH),
    "across chunk borders": Bounds((0, 1, 2, 13, 14, 31, 32)),
    "two sequences, packed": Bounds((0, 7, 8, 21, LENGTH, 43, 44, 45, 2 * LENGTH)),
    "over the end of a sequence": Bounds((0, 27, 40, 2 * LENGTH)),
    "single tokens": Bounds.equal(LENGTH, 1),
    "equal, not with chunks": Bounds.equal(2 * LENGTH // 16, 16),
}
LAYOUTS = [
    ("allgather", {"context": 2}), ("allgather", {"context": 4}), ("ring", {"context": 2}), ("ring", {"context": 4}),
    ("ulysses", {"context": 2, "ulysses": 2}), ("ulysses", {"context": 4, "ulysses": 4}), ("ring-ulysses", {"context": 4, "ulysses": 2}),
]  # fmt: skip
BESIDE = [  # context ranks that are not neighbours, and two groups at once
    ("allgather", {"tensor": 2, "context": 2}), ("ring", {"tensor": 2, "context": 2}), ("ulysses", {"tensor": 2, "context": 2, "ulysses": 2}),
    ("ring", {"context": 2, "data": 2}), ("ring-ulysses", {"context": 4, "ulysses": 2, "data": 2}),
]  # fmt: skip
HEADS = [(4, 4, 8, 8), (4, 2, 8, 4), (4, 1, 8, 8)]  # N, K, H of query and key, H of value
CASES = [(heads, causal, dtype) for heads in HEADS for causal in (True, False) for dtype in (torch.float64, torch.float32)]
CASES += [((4, 2, 8, 8), True, torch.bfloat16)]
# A gradient of a key sums over all tokens and the query heads that share it: a random walk of its roundings, twice (softmax of a sum)
ROUNDINGS = 4 * (2 * LENGTH * 4) ** 0.5


def inputs(tokens: int, heads: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    n, k, size, value_size = heads
    return [leaf(tokens, *shape, dtype=dtype, seed=i) for i, shape in enumerate([(n, size), (k, size), (k, value_size)])]


def with_gradients(function, tensors: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(out.dtype))]


def attend(rank: int, world: int, kind: str, degrees: dict, bounds: Bounds, cases: list) -> list[list]:
    """Per case the result and the three gradients of this rank, as numbers in float64."""
    mesh = Mesh(Layout(**degrees), rank, connect=True)
    sequences = max(bounds.total // LENGTH, 1)
    held = ContextSplit(mesh["context"].size, mesh["context"].rank).indices(sequences, LENGTH)
    answers = []
    for heads, causal, dtype in cases:
        local = [t.detach()[held].requires_grad_() for t in inputs(bounds.total, heads, dtype)]
        grad = leaf(bounds.total, heads[0], heads[3], dtype=dtype, seed=7).detach()[held]
        found = with_gradients(lambda *t: context_attention(*t, bounds, LENGTH, mesh=mesh, kind=kind, causal=causal), local, grad)
        assert all(t.dtype == dtype for t in found)
        answers.append([t.double().numpy() for t in found])
    return answers


def whole(answers: list, case: int, degrees: dict, bounds: Bounds, dtype: torch.dtype) -> list[torch.Tensor]:
    """The results of the context ranks of the first group, put together."""
    layout, results = Layout(**degrees), None
    for i, rank in enumerate(layout.group(0, "context")):
        held = ContextSplit(layout.context, i).indices(bounds.total // LENGTH, LENGTH)
        parts = [torch.from_numpy(a).to(dtype) for a in answers[rank][case]]
        results = results or [p.new_full((bounds.total, *p.shape[1:]), torch.nan) for p in parts]
        for result, part in zip(results, parts):
            result[held] = part
    return results


def serial(bounds: Bounds, heads: tuple[int, ...], causal: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """In float64, from the inputs as rounded."""
    grad = leaf(bounds.total, heads[0], heads[3], dtype=dtype, seed=7).detach()
    return with_gradients(lambda *t: attention(*t, bounds, causal), double(*inputs(bounds.total, heads, dtype)), grad)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("kind, degrees", LAYOUTS, ids=str)
def test_every_kind_equals_one_process(pool, kind, degrees, documents):
    bounds = DOCUMENTS[documents]
    answers = pool.run(attend, Layout(**degrees).world, kind, degrees, bounds, CASES)
    for i, case in enumerate(CASES):
        assert_near(whole(answers, i, degrees, bounds, case[2]), serial(bounds, *case), ROUNDINGS, 1)


@pytest.mark.parametrize("kind, degrees", BESIDE, ids=str)
def test_beside_other_axes(pool, kind, degrees):
    bounds, world = DOCUMENTS["two sequences, packed"], Layout(**degrees).world
    answers = pool.run(attend, world, kind, degrees, bounds, CASES[:1])
    assert_near(whole(answers, 0, degrees, bounds, torch.float64), serial(bounds, *CASES[0]), ROUNDINGS, 1)
    assert_near(whole(answers[::-1], 0, degrees, bounds, torch.float64)[:0], [], 0)


def test_key_heads_and_ranks_that_do_not_divide_each_other(pool):
    """6 query heads on 3 ranks with 2 key heads: the middle rank needs both."""
    global_length = 36
    assert global_length % 6 == 0
