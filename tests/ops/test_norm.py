"""Norms against their references and torch's own, in three dtypes, strided, and with the residual fused in."""

import pytest
import torch
from torch.nn import functional as F

from mtmegatron.ops.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from tests.ops.helpers import assert_near, double, each_dtype, gradients, leaf

EPS = 1e-6
T, D = 37, 24
# A row sum of D products and a weight gradient of T: a random walk of so many roundings, and a few of the formula.
ROUNDINGS = 8 + T**0.5


@each_dtype
def test_rms_norm_is_the_formula_in_float64_of_the_rounded_inputs(dtype):
    x, weight = leaf(T, D, dtype=dtype), leaf(D, dtype=dtype)
    actual = gradients(lambda x, w: rms_norm(x, w, EPS), x, weight)
    expected = gradients(lambda x, w: rms_norm_reference(x, w, EPS), *double(x, weight))
    assert actual[0].dtype == dtype
    assert_near(actual, expected, ROUNDINGS)


def test_rms_norm_equals_torch_and_ignores_strides():
    x, weight = leaf(T, 3, 2 * D), leaf(D)
    actual = gradients(lambda x, w: rms_norm(x[:, 1:, 3 : 3 + D], w, EPS), x, weight)
    expected = gradients(lambda x, w: F.rms_norm(x[:, 1:, 3 : 3 + D], (D,), w, EPS), x, weight)
    assert_near(actual, expected, ROUNDINGS)


def test_rms_norm_in_bf16_rounds_before_the_weight_as_llama_does():
    x, weight = leaf(T, D, dtype=torch.bfloat16), leaf(D, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize("bias", [True, False])
@each_dtype
def test_layer_norm_is_the_formula(dtype, bias):
    inputs = [leaf(T, D, dtype=dtype), leaf(D, dtype=dtype)] + ([leaf(D, dtype=dtype, seed=1)] if bias else [])

    def call(function):
        return lambda x, w, b=None: function(x, w, b, EPS)

    expected = gradients(call(layer_norm_reference), *double(*inputs))
    assert_near(gradients(call(layer_norm), *inputs), expected, ROUNDINGS)


@pytest.mark.parametrize("bias", [True, False, None], ids=["bias", "no bias", "rms"])
def test_a_wide_sum_is_normed_into_the_dtype_of_the_weight_and_rounded_once(bias):
    """A residual in fp32 beside weights in bf16: neither the sum nor its gradient is rounded on the way."""
    x, delta = leaf(T, D, dtype=torch.float32), leaf(T, D, dtype=torch.bfloat16, seed=1)
    inputs = [x, delta, *(leaf(D, dtype=torch.bfloat16, seed=2 + i) for i in range(2 if bias else 1))]
    incoming = leaf(T, D, dtype=torch.float32, seed=4).detach(), leaf(T, D, dtype=torch.bfloat16, seed=5).detach()

    def run(x, delta, weight, shift=None):
        both = add_rms_norm(x, delta, weight, EPS) if bias is None else add_layer_norm(x, delta, weight, shift, EPS)
        used = [t for t in (x, delta, weight, shift) if t is not None]
        return both, torch.autograd.grad(both, used, [g.to(y.dtype) for g, y in zip(incoming, both)])

    ((total, normed), (dx, ddelta, *rest)), (right, (right_dx, *_)) = run(*inputs), run(*double(*inputs))
    assert (total.dtype, normed.dtype, dx.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert_near([total, normed, dx], [*right, right_dx], ROUNDINGS)
    assert torch.equal(ddelta, dx.bfloat16()) and all(t.dtype == torch.bfloat16 for t in rest)


@each_dtype
def test_fused_residual_forms_are_addition_then_norm(dtype):
    x, delta, weight, bias = (leaf(*s, dtype=dtype, seed=i) for i, s in enumerate([(T, D), (T, D), (D,), (D,)]))
    actual = gradients(lambda x, d, w: add_rms_norm(x, d, w, EPS), x, delta, weight)
    expected = gradients(lambda x, d, w: (x + d, rms_norm(x + d, w, EPS)), x, delta, weight)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert_near(actual, expected, 4)  # the residual's gradient is added before the rounding, not after
    total, normed = add_layer_norm(x, delta, weight, bias, EPS)
    assert torch.equal(total, x + delta) and torch.equal(normed, layer_norm(x + delta, weight, bias, EPS))


def test_rms_gradients_pass_gradcheck_also_when_one_output_is_unused():
    x, delta, weight = leaf(5, 6), leaf(5, 6, seed=1), leaf(6)
    assert torch.autograd.gradcheck(lambda *a: add_rms_norm(*a, EPS), (x, delta, weight))
    assert torch.autograd.gradcheck(lambda *a: add_rms_norm(*a, EPS)[1], (x, delta, weight))
    assert torch.autograd.gradcheck(lambda *a: rms_norm(*a, EPS), (x, weight))
