"""How large gradients are: the squared norm of a buffer is off by the rounding of a few sums, however long the buffer."""

import pytest
import torch

from mtmegatron.parallel.gradient import squared_norm

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1_000_003])
def test_the_squared_norm_is_exact_to_rounding(size):
    """Torch's own norm of the longest is off by 86 units on a CPU: its parts of a sum are as long as the buffer."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)) + 1
    found, right = float(squared_norm(x)), float(x.double().square().sum())
    assert abs(found - right) <= 4 * EPS * right  # rounded squares, a sum of a row in pairs and lanes, a square of its root, a sum of rows


def test_the_squared_norm_runs_in_fp64_and_without_data():
    x = torch.linspace(0, 1, 10_000, dtype=torch.float64)
    assert float(squared_norm(x)) == pytest.approx(float(x @ x), rel=8 * torch.finfo(torch.float64).eps)
    assert squared_norm(x.to("meta")).shape == ()
