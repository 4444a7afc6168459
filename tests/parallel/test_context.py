"""Context parallel attention is that of one process, for every kind, mask, grouping of heads and packing; its parts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.batch import IGNORE, Batch, Bounds
from mtmegatron.errors import UserError
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.ops.attention import attention
from mtmegatron.parallel.context import ContextSplit, context_attention, valid_lengths
from mtmegatron.parallel.ring import pieces, plan
from tests.ops.helpers import assert_near, double, leaf

LENGTH = 48
DOCUMENTS = {
    "one sequence": Bounds.equal(1, LENGTH),
    "two sequences": Bounds.equal(2, LENGTH),
    "across chunk borders": Bounds((0, 1, 2, 13, 14, 47, 48)),
    "two sequences, packed": Bounds((0, 7, 8, 21, LENGTH, 63, 64, 65, 2 * LENGTH)),
    "over the end of a sequence": Bounds((0, 27, 60, 2 * LENGTH)),
    "single tokens": Bounds.equal(LENGTH, 1),
    "equal, but not to chunks": Bounds.equal(6, 16),
}
LAYOUTS = [
    ("allgather", {"context": 2}), ("allgather", {"context": 4}), ("ring", {"context": 2}), ("ring", {"context": 4}),
    ("ulysses", {"context": 2, "ulysses": 2}), ("ulysses", {"context": 4, "ulysses": 4}),
    ("ring-ulysses", {"context": 4, "ulysses": 2}),
]  # fmt: skip
BESIDE = [  # context ranks that are not neighbours, and two groups at once
    ("allgather", {"tensor": 2, "context": 2}), ("ring", {"tensor": 2, "context": 2}),
    ("ulysses", {"tensor": 2, "context": 2, "ulysses": 2}), ("ring", {"context": 2, "data": 2}),
    ("ring-ulysses", {"context": 4, "ulysses": 2, "data": 2}),
]  # fmt: skip
HEADS = [(4, 4, 8, 8), (4, 2, 8, 4), (4, 1, 8, 8)]  # N, K, H of query and key, H of value
DTYPES = (torch.float64, torch.float32)
CASES = [(heads, causal, dtype) for heads in HEADS for causal in (True, False) for dtype in DTYPES]
CASES += [((4, 2, 8, 8), True, torch.bfloat16)]
# A gradient of a key sums over a document's tokens and at most 4 query heads that share it: a random walk of roundings,
# twice (softmax of a sum)
ROUNDINGS = 4 * (4 * LENGTH) ** 0.5
lengths_of_documents = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def inputs(tokens: int, heads: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value, and the gradient of the result."""
    n, k, size, value_size = heads
    shapes = (n, size), (k, size), (k, value_size), (n, value_size)
    return [leaf(tokens, *shape, dtype=dtype, seed=i).detach() for i, shape in enumerate(shapes)]


def with_gradients(function, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients of query, key and value."""
    *leaves, grad = (t.detach().requires_grad_() for t in tensors)
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]


def serial(bounds: Bounds, causal: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return with_gradients(lambda *t: attention(*t, bounds, causal), *tensors)


def attend(rank: int, world: int, kind: str, degrees: dict, bounds: Bounds, problems: list) -> list:
    """For each (causal, tensors of the whole micro-batch) the result and gradients of this rank's tokens."""
    mesh = Mesh(Layout(**degrees), rank, connect=True)
    held = ContextSplit(mesh["context"].size, mesh["context"].rank).indices(bounds.total // LENGTH, LENGTH)
    answers = []
    for causal, tensors in problems:
        function = lambda *t: context_attention(*t, bounds, LENGTH, mesh=mesh, kind=kind, causal=causal)
        answers.append(with_gradients(function, *(t[held] for t in tensors)))
    return answers


def together(pool, kind: str, degrees: dict, bounds: Bounds, problems: list, of: int = 0) -> list:
    """The answers for the whole micro-batch, from the context ranks that go with rank `of`."""
    layout = Layout(**degrees)
    ranks = pool.run(attend, layout.world, kind, degrees, bounds, problems)
    splits = [ContextSplit(layout.context, i) for i in range(layout.context)]
    place = torch.cat([split.indices(bounds.total // LENGTH, LENGTH) for split in splits]).argsort()
    members = [ranks[rank] for rank in layout.group(of, "context")]
    return [[torch.cat(parts)[place] for parts in zip(*answers)] for answers in zip(*members)]


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("kind, degrees", LAYOUTS, ids=str)
def test_every_kind_equals_one_process(pool, kind, degrees, documents):
    bounds = DOCUMENTS[documents]
    problems = [(causal, inputs(bounds.total, heads, dtype)) for heads, causal, dtype in CASES]
    for (causal, tensors), answers in zip(problems, together(pool, kind, degrees, bounds, problems)):
        assert {t.dtype for t in answers} == {tensors[0].dtype}
        assert_near(answers, serial(bounds, causal, *double(*tensors)), ROUNDINGS, 1)


@pytest.mark.parametrize("kind, degrees", BESIDE, ids=str)
def test_beside_other_axes(pool, kind, degrees):
    bounds = DOCUMENTS["two sequences, packed"]
    tensors = inputs(bounds.total, (4, 2, 8, 8), torch.float64)
    for of in (0, Layout(**degrees).world - 1):
        (answers,) = together(pool, kind, degrees, bounds, [(True, tensors)], of)
        assert_near(answers, serial(bounds, True, *tensors), ROUNDINGS, 1)


@pytest.mark.parametrize("kind, ulysses", [("ulysses", 3), ("ring", 1)])
def test_three_ranks_and_two_key_heads(pool, kind, ulysses):
    """Six query heads on three ranks: the one in the middle needs both key heads."""
    degrees = {"context": 3, "ulysses": ulysses}
    bounds = DOCUMENTS["two sequences, packed"]
    tensors = inputs(bounds.total, (6, 2, 8, 8), torch.float64)
    (answers,) = together(pool, kind, degrees, bounds, [(True, tensors)])
    assert_near(answers, serial(bounds, True, *tensors), ROUNDINGS, 1)


def test_where_the_same_kernel_sees_the_same_rows_the_bits_are_equal(pool):
    """Documents inside a chunk are one block with or without the split; heads are independent, so Ulysses always is."""
    inside = Bounds((0, 5, 12, 13, 24, 36, 40, LENGTH))
    cases = [(kind, degrees, inside) for kind, degrees in LAYOUTS if degrees["context"] == 2]
    cases += [(kind, degrees, DOCUMENTS["two sequences, packed"]) for kind, degrees in LAYOUTS if kind == "ulysses"]
    for kind, degrees, bounds in cases:
        tensors = inputs(bounds.total, (4, 4, 8, 8), torch.float32)
        (answers,) = together(pool, kind, degrees, bounds, [(True, tensors)])
        assert torch.equal(answers[0], serial(bounds, True, *tensors)[0]), kind


@pytest.mark.parametrize("kind, degrees", LAYOUTS, ids=str)
def test_padding_of_nan_in_its_own_document_reaches_nobody(pool, kind, degrees):
    bounds = Bounds((0, 30, LENGTH - 1, LENGTH))
    tensors = inputs(bounds.total, (4, 2, 8, 8), torch.float32)
    clean = serial(bounds, True, *double(*tensors))
    for t in tensors:
        t[-1] = torch.nan
    (answers,) = together(pool, kind, degrees, bounds, [(True, tensors)])
    assert_near([t[:-1] for t in answers], [t[:-1] for t in clean], ROUNDINGS, 1)


@pytest.mark.parametrize("kind, degrees", LAYOUTS, ids=str)
def test_large_scores_stay_finite(pool, kind, degrees):
    """Merged blocks whose log-sum-exps are a thousand apart."""
    bounds = DOCUMENTS["one sequence"]
    tensors = [100 * t for t in inputs(bounds.total, (4, 2, 8, 8), torch.float32)]
    (answers,) = together(pool, kind, degrees, bounds, [(True, tensors)])
    assert all(t.isfinite().all() for t in answers)


def kept(rank: int, world: int, kind: str, degrees: dict, bounds: Bounds) -> int:
    """Bytes of the distinct storages that autograd keeps for backward."""
    mesh = Mesh(Layout(**degrees), rank, connect=True)
    held = ContextSplit(world, rank).indices(bounds.total // LENGTH, LENGTH)
    tensors = [t[held].requires_grad_() for t in inputs(bounds.total, (4, 4, 8, 8), torch.float32)[:3]]
    storages: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        context_attention(*tensors, bounds, LENGTH, mesh=mesh, kind=kind)
    return sum(storages.values())


@pytest.mark.parametrize("kind, degrees", LAYOUTS, ids=str)
def test_what_is_kept_for_backward_falls_with_the_degree(pool, kind, degrees):
    """Queries, keys, values, results and a log-sum-exp per query and head, of T / c tokens: nothing of other ranks."""
    bounds, world = DOCUMENTS["two sequences"], degrees["context"]
    assert pool.run(kept, world, kind, degrees, bounds) == [bounds.total // world * 4 * (4 * 8 + 1) * 4] * world


def test_zigzag_of_two_ranks():
    """Chunks and rotary positions of two sequences of 8 tokens on 2 ranks."""
    assert ContextSplit(2, 0).indices(2, 8).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert ContextSplit(2, 1).indices(2, 8).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    batch = Batch(torch.arange(16) + 100, torch.arange(16) + 101, torch.arange(8).repeat(2), Bounds.equal(2, 8))
    batch.labels[6] = IGNORE
    mine = ContextSplit(2, 0).select(batch, 2)
    assert mine.positions.tolist() == [0, 1, 6, 7] * 2
    assert mine.tokens.tolist() == [100, 101, 106, 107, 108, 109, 114, 115]
    assert mine.labels.tolist() == [101, 102, IGNORE, 108, 109, 110, 115, 116]
    assert mine.bounds == batch.bounds


@given(degree=st.integers(1, 9), sequences=st.integers(1, 3), chunk=st.integers(1, 5))
def test_every_token_has_one_rank(degree, sequences, chunk):
    length = 2 * degree * chunk
    held = [ContextSplit(degree, rank).indices(sequences, length) for rank in range(degree)]
    assert {len(part) for part in held} == {sequences * 2 * chunk}
    assert torch.equal(torch.cat(held).sort().values, torch.arange(sequences * length))


@given(length=st.integers(1, 200), degree=st.integers(1, 9))
def test_valid_lengths_are_the_nearest(length, degree):
    fits = [n for n in range(1, length + 2 * degree + 1) if degree == 1 or n % (2 * degree) == 0]
    below, above = [n for n in fits if n <= length][-1:], [n for n in fits if n >= length][:1]
    assert valid_lengths(length, degree) == sorted({*below, *above})


@pytest.mark.parametrize("length, degree, advice", [(31, 2, "28 or 32"), (30, 2, "28 or 32"), (7, 4, "of 8,")])
def test_a_length_that_does_not_divide_is_refused(length, degree, advice):
    with pytest.raises(UserError, match=f"{length} tokens .* {advice}"):
        ContextSplit(degree, 0).indices(2, length)
    assert ContextSplit(1, 0).indices(2, 31).tolist() == list(range(62))  # nothing is cut


def planned(bounds: Bounds, length: int, degree: int, causal: bool, whole: bool):
    """For each rank and source of keys: (numbers of its tokens, numbers of the keys, blocks)."""
    total, size = bounds.total, length // (2 * degree)
    runs = [ContextSplit(degree, rank).runs(total // length, length) for rank in range(degree)]
    sources = [[(start, start + size) for start in range(0, total, size)]] if whole else runs
    numbers = lambda held: torch.cat([torch.arange(*run) for run in held])
    for own in runs:
        for keys in sources:
            yield numbers(own), numbers(keys), plan(pieces(bounds, own), pieces(bounds, keys), causal)


@settings(deadline=None)
@given(lengths_of_documents, st.integers(2, 4), st.integers(1, 2), st.booleans(), st.booleans())
def test_blocks_are_the_mask_each_pair_once(lengths, degree, sequences, causal, whole):
    unit = 2 * degree * sequences
    lengths = [*lengths, -sum(lengths) % unit]
    bounds = Bounds(tuple(sum(lengths[:i]) for i in range(len(lengths) + (lengths[-1] > 0))))
    seen = torch.zeros(bounds.total, bounds.total, dtype=torch.int)
    for queries, keys, blocks in planned(bounds, bounds.total // sequences, degree, causal, whole):
        for block in blocks:
            mask = torch.ones(len(queries[block.queries]), len(keys[block.keys]), dtype=torch.int)
            mask = mask.tril() if block.causal else mask
            seen[queries[block.queries, None], keys[block.keys]] += mask
            assert mask.sum() == block.products
    document = torch.repeat_interleave(torch.arange(len(bounds.lengths)), torch.tensor(bounds.lengths))
    expected = (document[:, None] == document).int()
    assert torch.equal(seen, expected.tril() if causal else expected)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_zigzag_balances_the_work_of_every_hop(degree):
    bounds = Bounds.equal(1, 2 * degree * 6)
    plans = [blocks for _, _, blocks in planned(bounds, bounds.total, degree, True, False)]
    work = [sum(block.products for block in blocks) for blocks in plans]
    own, others = work[:: degree + 1], [w for i, w in enumerate(work) if i % (degree + 1)]
    assert len(set(own)) == len(set(others)) == 1
    assert sum(work) == math.comb(bounds.total + 1, 2)
    assert {len(blocks) for i, blocks in enumerate(plans) if i % (degree + 1)} == {1}  # one product with each visitor
