"""fp8 on a device's own units: the codes of the host, and products that differ from those of their values by accumulation alone."""

import pytest
import torch

from mtmegatron.device import choose_device
from mtmegatron.precision.multiply import multiplies, multiply
from mtmegatron.precision.quantise import Cut, Grid, amax, quantise, scale_of
from mtmegatron.precision.recipes import RECIPES

DEVICE = choose_device("auto")
pytestmark = pytest.mark.skipif(not DEVICE.native_fp8, reason="no device that multiplies 8-bit floats")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR_CORE = 2.0**-13  # relative: Hopper keeps about 14 bits of a product inside


def quantised(x, block, dtype, power_of_two=False):
    grid = Grid(Cut.of(x.shape[0], block[0]), Cut.of(x.shape[1], block[1]))
    return quantise(x, grid, scale_of(amax(x, grid), dtype, power_of_two), dtype)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_codes_and_scales_are_those_of_the_host(recipe, dtype):
    found, x = RECIPES[recipe], torch.randn(257, 384) * 3
    here, there = (quantised(x.to(d), found.tokens, dtype, found.power_of_two) for d in ("cpu", DEVICE.torch_device))
    assert torch.equal(here.scale, there.scale.cpu()) and torch.equal(here.codes.view(torch.uint8), there.codes.cpu().view(torch.uint8))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [(256, 512, 1024), (31, 20, 300)])
def test_products_are_those_of_the_values(recipe, dtype, size):
    (m, n, k), found = size, RECIPES[recipe]
    a = quantised(torch.randn(m, k, device=DEVICE.torch_device), found.tokens, dtype)
    b = quantised(torch.randn(n, k, device=DEVICE.torch_device), found.weight, E4M3)
    assert multiplies(a, b, hardware=True)
    product, right = multiply(a, b, torch.float32, hardware=True), multiply(a, b, torch.float64, hardware=False)
    size = a.values(torch.float64).abs() @ b.values(torch.float64).abs().t()
    assert bool(((product.double() - right).abs() <= (TENSOR_CORE + torch.finfo(torch.bfloat16).eps) * size).all())
