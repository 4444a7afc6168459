"""Activations against autograd of their formulas: values, gradients, strides, and the table."""

import pytest
import torch
from torch.nn import functional as F

from mtmegatron.ops.activation import ACTIVATIONS, gated_reference
from tests.ops.helpers import assert_near, double, each_dtype, gradients, leaf

FORMULAS = {
    "swiglu": lambda x: gated_reference(x, F.silu),
    "geglu": lambda x: gated_reference(x, lambda g: g / 2 * (1 + torch.erf(g / 2**0.5))),
    "geglu_tanh": lambda x: gated_reference(x, lambda g: F.gelu(g, approximate="tanh")),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "squared_relu": lambda x: torch.relu(x) ** 2,
    "relu": torch.relu,
    "silu": lambda x: x * torch.sigmoid(x),
}


def test_every_name_of_the_table_has_a_formula_here():
    assert ACTIVATIONS.keys() == FORMULAS.keys()


@pytest.mark.parametrize("name", FORMULAS)
@each_dtype
def test_activation_and_gradient_are_the_formula(name, dtype):
    function, gated = ACTIVATIONS[name]
    x = leaf(19, 12, dtype=dtype)
    actual = gradients(function, x)
    assert actual[0].shape == (19, 6 if gated else 12) and actual[0].dtype == dtype
    expected = gradients(FORMULAS[name], *double(x))
    assert_near(actual, expected, 8)  # three to five roundings a value, and those inside the kernels


@pytest.mark.parametrize("name", FORMULAS)
def test_strided_input_passes_gradcheck(name):
    assert torch.autograd.gradcheck(lambda x: ACTIVATIONS[name][0](x[:, 1:7]), leaf(4, 9, seed=3))


def test_gated_activation_saves_its_input_alone():
    x, saved = leaf(4, 8), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ACTIVATIONS["swiglu"][0](x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
