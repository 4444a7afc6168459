"""Grouped products and the permutations around them: against plain loops and autograd, with experts and batches that are empty."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mtmegatron.ops.grouped import grouped, products, products_in_one
from mtmegatron.ops.permute import (
    bin_counts,
    combine,
    fill_runs,
    reorder,
    sort_slots,
    spread,
)
from mtmegatron.parallel.gradient import WeightQueue
from mtmegatron.precision.gemm import Gemm

COUNTS = [[3, 0, 5, 1], [0, 0, 0, 0], [0, 7, 0, 0], [2, 2, 2, 2]]


def inputs(counts, outs=(6, 6), width=5, dtype=torch.float64):
    draw = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts), width, generator=draw, dtype=dtype)
    weights = [nn.Parameter(torch.randn(len(counts), out, width, generator=draw, dtype=dtype)) for out in outs]
    return x.requires_grad_(), weights


def loop(x, weights, counts):
    """Y by the definition, with autograd's own backward."""
    rows = x.split(counts)
    return torch.cat([torch.cat([r @ w[e].t() for w in weights], dim=1) for e, r in enumerate(rows)])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("outs", [(6,), (6, 4)], ids=str)
def test_products_and_gradients_equal_the_loop(counts, outs):
    x, weights = inputs(counts, outs)
    y, right = grouped(x, weights, counts, Gemm(), WeightQueue()), loop(x, weights, counts)
    torch.testing.assert_close(y, right)
    dy = torch.randn_like(y)
    mine = torch.autograd.grad(y, [x, *weights], dy)
    for got, expected in zip(mine, torch.autograd.grad(right, [x, *weights], dy)):
        torch.testing.assert_close(got, expected)
    for w in mine[1:]:
        assert not w[[count == 0 for count in counts]].any(), "an expert without rows has a gradient of exactly zero"


def test_weight_gradients_add_up_in_the_sum_when_the_queue_is_run():
    counts, queue = COUNTS[0], WeightQueue()
    x, weights = inputs(counts)
    for w in weights:
        w.grad_sum = torch.ones_like(w)
    expected = torch.autograd.grad(loop(x, weights, counts).square().sum(), weights)
    queue.defer = True
    grouped(x, weights, counts, Gemm(), queue, remake=lambda: x.detach()).square().sum().backward()
    assert all(torch.equal(w.grad_sum, torch.ones_like(w)) and w.grad is None for w in weights), "put off until they are asked for"
    for work in queue.take():
        work()
    for w, gradient in zip(weights, expected):
        torch.testing.assert_close(w.grad_sum, 1 + gradient)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_what_is_made_again_is_not_kept(counts):
    x, weights = inputs(counts)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = grouped(x, weights, counts, Gemm(), WeightQueue(), remake=lambda: x.detach())
    assert not kept
    again = torch.autograd.grad(y.sum(), weights)
    for got, expected in zip(again, torch.autograd.grad(grouped(x, weights, counts, Gemm(), WeightQueue()).sum(), weights)):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_call_of_an_accelerator_is_the_loop(dtype):
    counts = [16, 0, 3, 24]
    x, weights = inputs(counts, (16, 8), 32, dtype)
    one, many = products_in_one(x.detach(), weights, counts), products(x.detach(), weights, counts, Gemm())
    exact = products(x.detach().double(), [w.detach().double() for w in weights], counts, Gemm())
    # each product of 32 terms is off by at most 32 roundings of their magnitudes, and by the rounding of the result
    magnitude = products(x.detach().double().abs(), [w.detach().double().abs() for w in weights], counts, Gemm())
    bound = 32 * torch.finfo(torch.float32).eps * magnitude + torch.finfo(dtype).eps * exact.abs()
    assert ((one - exact).abs() <= bound).all() and ((many - exact).abs() <= bound).all()


def test_rows_and_counts_must_agree():
    x, weights = inputs([2, 2])
    with pytest.raises(AssertionError, match="5 rows are counted, there are 4"):
        grouped(x, weights, [2, 3], Gemm(), WeightQueue())


# ---- permutations


@given(tokens=st.integers(0, 9), k=st.integers(1, 3), experts=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_spread_and_combine_are_gather_and_weighted_sum(tokens, k, experts, seed):
    draw = torch.Generator().manual_seed(seed)
    bins = torch.randint(0, experts + 1, (tokens, k), generator=draw)  # `experts` itself: dropped
    counts = bin_counts(bins, experts)
    assert counts.tolist() == [int((bins == e).sum()) for e in range(experts)]
    slots = sort_slots(bins, int(counts.sum()))
    x = torch.randn(tokens, 4, generator=draw, dtype=torch.float64).requires_grad_()
    w = torch.randn(tokens, k, generator=draw, dtype=torch.float64).requires_grad_()
    factor = torch.arange(1.0, experts + 1, dtype=torch.float64).repeat_interleave(counts)
    y = combine(spread(x, slots) * factor[:, None], w, slots, torch.float64)
    # every expert e multiplies by e + 1, one that is dropped by 0
    scale = (torch.where(bins < experts, bins + 1, 0) * w).sum(1, keepdim=True)
    right = x * scale
    torch.testing.assert_close(y, right)
    dy = torch.randn(y.shape, generator=draw, dtype=torch.float64)
    for got, expected in zip(torch.autograd.grad(y, [x, w], dy), torch.autograd.grad(right, [x, w], dy)):
        torch.testing.assert_close(got, expected)


def test_assignments_keep_the_order_of_tokens_within_an_expert():
    slots = sort_slots(torch.tensor([[1, 0], [0, 2], [1, 0]]), 5)  # 2: dropped, of two experts
    assert slots.order.tolist() == [1, 2, 5, 0, 4] and slots.token.tolist() == [0, 1, 2, 0, 2]
    assert slots.place.tolist() == [[3, 0], [1, 5], [4, 2]]


def test_16_bit_rows_are_summed_wide():
    slots, rows = sort_slots(torch.tensor([[0, 1, 2]]), 3), torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    weights = torch.ones(1, 3)
    assert combine(rows, weights, slots, torch.bfloat16).item() == 258  # 256 + 1 = 256 in bfloat16
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    spread(x, slots).backward(rows)
    assert x.grad.item() == 258


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_runs_are_filled_up_with_zeros_and_emptied_again(counts):
    x, size = torch.randn(sum(counts), 3, dtype=torch.float64, requires_grad=True), max(counts) + 1
    index, back = fill_runs(counts, size, x.device)
    filled = reorder(x, index, back)
    for run, rows in zip(filled.split(size), x.split(counts)):
        assert torch.equal(run[: len(rows)], rows) and not run[len(rows) :].any()
    assert torch.equal(reorder(filled, back, index), x)
    torch.autograd.gradcheck(lambda x: reorder(x, index, back), x) if x.numel() else None


def test_a_run_that_does_not_fit_is_our_fault():
    with pytest.raises(AssertionError, match="does not fit"):
        fill_runs([3, 1], 2, torch.device("cpu"))
