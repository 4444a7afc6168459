"""A Bᵀ of quantised matrices: on the device's own 8-bit units where they know the scales, else of their values.

Notable: products of two codes are exact in fp32, so both ways differ in the order and the width of the accumulation alone (Hopper keeps about 14 bits
inside a tensor core).
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from mtmegatron.precision.quantise import Quantised

ALIGN = 16  # the units' own products take sizes that are multiples of it


def multiply(a: Quantised, b: Quantised, dtype: torch.dtype, hardware: bool, total: Tensor | None = None) -> Tensor:
    """A Bᵀ in `dtype`, added to `total` where that is given. Shapes: a [M, K], b [N, K] -> [M, N]."""
    if multiplies(a, b, hardware):
        product = scaled(a, b) if scalable(a, b) else _in_blocks().blockwise_product(a, b)
        return product.to(dtype) if total is None else total.add_(product)
    if total is None:
        return a.values(dtype) @ b.values(dtype).t()
    return total.addmm_(a.values(dtype), b.values(dtype).t())


def multiplies(a: Quantised, b: Quantised, hardware: bool) -> bool:
    """Whether the device's units make this product; without Triton those with one scale for each row at most."""
    return hardware and not a.codes.is_meta and (scalable(a, b) or _in_blocks() is not None and _in_blocks().fits(a, b))


@cache
def _in_blocks() -> ModuleType | None:
    """The products in blocks, where Triton is there."""
    return import_module("mtmegatron.precision.blockwise") if find_spec("triton") else None


def scalable(a: Quantised, b: Quantised) -> bool:
    """Whether all scales lie along the kept dims, and the units know the pair of types."""
    return a.scale.shape[1] == b.scale.shape[1] == 1 and torch.float8_e4m3fn in (a.codes.dtype, b.codes.dtype) and a.scale.dtype == torch.float32


def scaled(a: Quantised, b: Quantised) -> Tensor:
    """A Bᵀ by `torch._scaled_mm`, with one scale for each matrix or one for each of its rows."""
    m, n = a.codes.shape[0], b.codes.shape[0]
    whole = a.scale.numel() == b.scale.numel() == 1
    scales = (a.scale[0, 0], b.scale[0, 0]) if whole else (_rows(a.scale, m), _rows(b.scale, n).t())
    product = torch._scaled_mm(_aligned(a.codes), _aligned(b.codes).t(), *scales, out_dtype=torch.float32 if whole else torch.bfloat16)
    return product[:m, :n]


def _aligned(codes: Tensor) -> Tensor:
    """Codes in rows, filled up with zeros."""
    rows, columns = (-size % ALIGN for size in codes.shape)
    padded = F.pad(codes.view(torch.uint8), (0, columns, 0, rows)) if rows or columns else codes
    return padded.contiguous().view(codes.dtype)


def _rows(scale: Tensor, count: int) -> Tensor:
    """One scale for each row, with those of the padding."""
    return F.pad(scale.expand(count, 1), (0, 0, 0, -count % ALIGN), value=1.0).contiguous()
