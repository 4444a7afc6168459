"""The three matrix products of a linear layer, as one object that a layer is given.

Notable: without native 16-bit units a 16-bit product is the fp32 product of the 16-bit values, rounded once: what an accelerator computes, and tens
of times faster than the native call on such a CPU. Weight gradients are always accumulated in the type of the gradient buffer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Gemm:
    """Products on weights of shape [out, in]. `native`: the device multiplies the compute type itself; `mixed`: and gives the result in fp32."""

    native: bool = True
    mixed: bool = False

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Y = X Wᵀ + b. Shapes: x [T, in], weight [out, in] -> [T, out]."""
        if self.native or x.dtype not in SIXTEEN_BITS:
            return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        y = x.float() @ weight.float().t()
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """dX = dY W."""
        if self.native or dy.dtype not in SIXTEEN_BITS:
            return dy @ weight
        return (dy.float() @ weight.float()).to(dy.dtype)

    def weight_gradient(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        """total += dYᵀ X, in the type of total."""
        if self.mixed and dy.dtype == x.dtype and x.dtype in SIXTEEN_BITS and total.dtype == torch.float32:
            total.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))
            return
        total.addmm_(dy.to(total.dtype).t(), x.to(total.dtype))

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b in the compute type."""
        if self.native or a.dtype not in SIXTEEN_BITS:
            return a @ b
        return (a.float() @ b.float()).to(a.dtype)
