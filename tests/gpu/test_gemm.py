"""Weight gradients of 16-bit operands on a device: fp32 sums that were never rounded to 16 bits."""

import pytest
import torch

from mtmegatron.device import choose_device
from mtmegatron.precision.gemm import SIXTEEN_BITS, Gemm

DEVICE = choose_device("auto")
pytestmark = pytest.mark.skipif(not DEVICE.mixed_products, reason="no device that multiplies 16-bit numbers into fp32")


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_weight_gradients_are_added_in_fp32(dtype):
    dy, x = (torch.randn(515, n, dtype=dtype, device=DEVICE.torch_device) for n in (96, 160))
    total = torch.randn(96, 160, device=DEVICE.torch_device)
    right = total.double() + dy.double().t() @ x.double()
    magnitude = total.double().abs() + dy.double().abs().t() @ x.double().abs()
    Gemm(True, mixed=True).weight_gradient(total, dy, x)
    assert bool(((total - right).abs() <= 515 * torch.finfo(torch.float32).eps * magnitude).all())
