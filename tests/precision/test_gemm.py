"""Weight gradients of 16-bit operands: where a device has a product with an fp32 result, it is asked for; elsewhere operands are widened."""

import pytest
import torch

from mtmegatron.precision.gemm import Gemm

KINDS = [(torch.bfloat16, torch.float32, True), (torch.float16, torch.float32, True), (torch.bfloat16, torch.float64, False), (torch.float32, torch.float32, False)]


@pytest.mark.parametrize(("dtype", "sums", "asked"), KINDS)
def test_the_product_with_a_wide_result_is_asked_for_where_it_is(dtype, sums, asked, monkeypatch):
    """On the meta device, which knows the operator that a CPU lacks."""
    calls, product = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: calls.append(k) or product(*a, **k))
    total, dy, x = (torch.zeros(size, dtype=kind, device="meta") for size, kind in (((4, 6), sums), ((8, 4), dtype), ((8, 6), dtype)))
    Gemm(True, mixed=True).weight_gradient(total, dy, x)
    assert [k for k in calls if k] == ([{"out_dtype": torch.float32}] if asked else [])


def test_operands_of_16_bits_are_never_rounded_on_the_way_to_the_sum():
    dy, x, total = torch.ones(512, 1, dtype=torch.bfloat16), torch.full((512, 1), 1 + 2.0**-7, dtype=torch.bfloat16), torch.zeros(1, 1)
    Gemm(True).weight_gradient(total, dy, x)
    assert total.item() == 516.0
