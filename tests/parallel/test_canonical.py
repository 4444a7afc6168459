"""Integers in place of floats: what is exact about them, where they end, and the blocks that no layout cuts."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtmegatron.batch import Bounds
from mtmegatron.layout import Layout, share
from mtmegatron.mesh import Mesh
from mtmegatron.ops.attention import attention as fast_attention
from mtmegatron.ops.norm import layer_norm_reference, rms_norm_reference
from mtmegatron.parallel.canonical.attention import attention
from mtmegatron.parallel.canonical.exact import (
    ACTIVATION,
    GRADIENT,
    Exact,
    number,
    sum_of_squares,
)
from mtmegatron.parallel.canonical.rows import norm
from mtmegatron.verify.canonical import digest

SERIAL = Mesh(Layout())["tensor"]


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=40), st.randoms())
def test_a_sum_of_integers_has_one_value_in_every_order(values, random):
    exact = Exact(4, 8)
    grid = exact.integers(torch.tensor(values), GRADIENT)
    shuffled = list(range(len(values)))
    random.shuffle(shuffled)
    assert grid.sum() == grid[shuffled].flip(0).cumsum(0)[-1]
    right = sum(Fraction(v) for v in values)
    rounded = len(values) * Fraction(1, 2 ** (GRADIENT + 1))  # each addend by half a step at most
    assert abs(Fraction(int(grid.sum()), 2**GRADIENT) - right) <= rounded and not exact.spoiled


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 128.0, -1e30])
def test_what_does_not_fit_on_the_grid_spoils_the_step(bad):
    exact = Exact(4, 8)
    assert exact.integers(torch.tensor([bad, 1.0]), GRADIENT).tolist() == [0, 2**GRADIENT]
    assert exact.spoiled
    exact = Exact(4, 8)
    exact.integers(torch.tensor([127.0]), GRADIENT)
    assert not exact.spoiled


def test_number_rounds_once_to_each_type():
    third = Exact(1, 1).integers(torch.tensor([1 / 3], dtype=torch.float64), ACTIVATION)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert number(third, ACTIVATION, dtype) == torch.tensor([int(third) / 2**ACTIVATION], dtype=torch.float64).to(dtype)


@given(st.integers(1, 300), st.sampled_from([1, 2, 4, 6, 8]), st.data())
def test_each_rank_of_each_degree_holds_whole_cells(total, blocks, data):
    exact = Exact(blocks, 1)
    whole = {(c.start, c.stop) for c in exact.cells(total, 0, total)}
    degree = data.draw(st.sampled_from([d for d in range(1, blocks + 1) if blocks % d == 0]))
    found = set()
    for rank in range(degree):
        start, size = share(total, degree, rank)
        found |= {(start + c.start, start + c.stop) for c in exact.cells(total, start, size)} if size else set()
    assert found == whole


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20])
def test_sum_of_squares_is_exact_to_double_and_does_not_depend_on_the_cut(scale):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * scale
    x[17] = scale * 1e-4
    whole = sum_of_squares([x], SERIAL)
    assert torch.equal(whole, sum_of_squares(list(x.flip(0).split(33)), SERIAL))
    assert float(whole) == pytest.approx(float(x.double().square().sum()), rel=1e-12)
    assert float(sum_of_squares([torch.zeros(3)], SERIAL)) == 0.0 and float(sum_of_squares([], SERIAL)) == 0.0


@pytest.mark.parametrize("bias", [False, True])
def test_norm_equals_the_reference(bias):
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(16, 24, generator=generator) for _ in range(2))
    parameters = [torch.nn.Parameter(torch.randn(24, generator=generator)) for _ in range(2 if bias else 1)]
    for p in parameters:
        p.grad_sum = torch.zeros(24, dtype=torch.int64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    mine = norm(a, parameters[0], parameters[1] if bias else None, 1e-5, Exact(4, 8))
    right = layer_norm_reference(b, *parameters, 1e-5) if bias else rms_norm_reference(b, *parameters, 1e-5)
    mine.backward(dy)
    right.backward(dy)
    close = dict(rtol=0, atol=24 * torch.finfo(torch.float32).eps * 8)
    torch.testing.assert_close(mine, right, **close)
    torch.testing.assert_close(a.grad, b.grad, **close)
    for p in parameters:
        torch.testing.assert_close(number(p.grad_sum, GRADIENT, torch.float32), p.grad, **close)


def test_attention_equals_the_fast_one_with_documents():
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(64, 4, 8, generator=generator)
    key, value = (torch.randn(64, 2, size, generator=generator) for size in (8, 6))
    bounds, grad = Bounds((0, 5, 32, 33, 50, 64)), torch.randn(64, 4, 6, generator=generator)
    inputs = [[t.clone().requires_grad_() for t in (query, key, value)] for _ in range(2)]
    mine = attention(*inputs[0], bounds, 32, SERIAL, Exact(2, 8))
    right = fast_attention(*inputs[1], bounds)
    mine.backward(grad)
    right.backward(grad)
    for a, b in zip((mine, *(t.grad for t in inputs[0])), (right, *(t.grad for t in inputs[1]))):
        torch.testing.assert_close(a, b, rtol=0, atol=64 * 8 * torch.finfo(torch.float32).eps)


def test_a_digest_sees_one_bit_a_swap_and_adds_up_over_parts():
    x, place = torch.randn(50, generator=torch.Generator().manual_seed(4)), torch.arange(50)
    whole = digest(x, place)
    assert (digest(x[:20], place[:20]) + digest(x[20:], place[20:])) % 2**64 == whole
    flipped, swapped = x.clone(), x.clone()
    flipped.view(torch.int32)[7] ^= 1
    swapped[[3, 4]] = x[[4, 3]]
    assert len({whole, digest(flipped, place), digest(swapped, place)}) == 3
