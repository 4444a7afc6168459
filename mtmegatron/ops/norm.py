"""Root-mean-square norm and layer norm over the last dim, alone and fused with the residual addition before them.

Notable:
- Statistics are at least fp32 whatever the input, and the result has the dtype of the weight: of an input in 16 bits, or
  of a sum that is kept in fp32 beside weights of 16 bits. The RMS norm rounds to the input's dtype before it multiplies by
  the weight and once more after, as Hugging Face's Llama does; the layer norm rounds once, at the end, as torch does.
- The RMS backward makes one product g * x and reads both of its sums from it, the weight's gradient and the row's
  correction, as two matrix-vector products. Torch's layer norm is already a single pass each way: it is the fast
  version, also after a residual.
- `add_rms_norm` adds the residual's gradient into the norm's: one pass and one autograd node fewer per residual.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """y = w * x / sqrt(mean(x^2) + eps) over the last dim (Zhang and Sennrich 2019, eq. 4).

    Shapes: x [..., D] of any strides, weight [D]; result as x, in the dtype of the weight, which is no wider than x.
    """
    return _RMSNorm.apply(x_TD, weight_D, eps)


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(s, rms_norm(s)) with s = x + delta, in the wider dtype of the two.

    Shapes: x, delta and both results [..., D], weight [D].
    """
    return _AddRMSNorm.apply(x_TD, delta_TD, weight_D, eps)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """y = w * (x - mean(x)) / sqrt(var(x) + eps) + b over the last dim, var biased (Ba et al. 2016).

    Shapes: x [..., D], weight and bias [D]; result as x, in the dtype of the weight.
    """
    weight, bias = (None if t is None else t.to(x_TD.dtype) for t in (weight_D, bias_D))  # the kernels of some devices want one dtype
    return F.layer_norm(x_TD, weight_D.shape, weight, bias, eps).to(weight_D.dtype)


def add_layer_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(s, layer_norm(s)) with s = x + delta, in the wider dtype of the two.

    Shapes: x, delta and both results [..., D], weight and bias [D].
    """
    total = x_TD + delta_TD
    return total, layer_norm(total, weight_D, bias_D, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        normed, rstd = _rms_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return normed

    @staticmethod
    def backward(ctx, grad):
        return *_rms_backward(grad, *ctx.saved_tensors, ctx.needs_input_grad[1]), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, weight, eps):
        total = x + delta
        normed, rstd = _rms_forward(total, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.delta_dtype = delta.dtype
        return total, normed

    @staticmethod
    def backward(ctx, grad_total, grad_normed):
        dx, dweight = _rms_backward(grad_normed, *ctx.saved_tensors, ctx.needs_input_grad[2], residual=grad_total)
        return dx, dx.to(ctx.delta_dtype), dweight, None


def _rms_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, 1/rms); each product rounds to x.dtype where it is written, and the last to that of the weight."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(x, rstd, out=normed)
    return torch.mul(normed, weight, out=normed).to(weight.dtype), rstd


def _rms_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, train: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """dx = r (w g - x r^2 mean(w g x)) + residual and, to `train` w, dw = sum over tokens of g x r, with r = 1/rms."""
    g, w, wide_x = (t.to(rstd.dtype) for t in (grad, weight, x))
    product = torch.empty(x.shape, dtype=rstd.dtype, device=x.device)
    flat = torch.mul(g, wide_x, out=product).view(-1, x.shape[-1])
    dweight = torch.mv(flat.t(), rstd.view(-1)).to(weight.dtype) if train else None
    correction = torch.mv(flat, w).view_as(rstd).mul_(rstd.square()).div_(-x.shape[-1])
    dx = torch.mul(g, w, out=product).addcmul_(wide_x, correction).mul_(rstd)
    if residual is not None:
        dx.add_(residual)
    return dx.to(x.dtype), dweight


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm`, operation by operation."""
    x = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x_TD.dtype) * weight_D).to(weight_D.dtype)


def layer_norm_reference(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """`layer_norm`, operation by operation."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    x = x_TD.to(wide)
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight_D.to(wide)
    return (normed if bias_D is None else normed + bias_D.to(wide)).to(weight_D.dtype)
