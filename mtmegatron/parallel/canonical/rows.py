"""Functions of one token at a time: norms and activations, and sums of gradients over tokens.

Notable: they run in double precision and are rounded once. A vector unit and its scalar remainder may differ in the last bit of a double, which
rounding to fp32 or bf16 hides; where a layout cuts the tokens then no longer matters. Divisions and roots are exactly rounded as they are.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mtmegatron.parallel.canonical.exact import GRADIENT, Exact


def norm(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, eps: float, exact: Exact) -> Tensor:
    """w (x - m) / sqrt(mean((x - m)^2) + eps) + b, with m = mean(x) where there is a bias (layer norm), else 0 (RMS norm).

    Shapes: [.., D] -> [.., D], in the dtype of the weight."""
    return _Norm.apply(x, weight, bias, eps, exact)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, exact):
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.eps, ctx.exact, ctx.weight = bias, eps, exact, weight
        y = _normed(x, eps, bias is not None)[0] * weight
        return (y if bias is None else y + bias).to(weight.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        normed, root = _normed(x, ctx.eps, ctx.bias is not None)
        wide = dy.double()
        if ctx.weight.requires_grad:
            ctx.weight.grad_sum += ctx.exact.integers((wide * normed).flatten(0, -2), GRADIENT).sum(0)
        if ctx.bias is not None and ctx.bias.requires_grad:
            ctx.bias.grad_sum += ctx.exact.integers(wide.flatten(0, -2), GRADIENT).sum(0)
        slope = wide * weight
        dx = slope - normed * (slope * normed).mean(-1, keepdim=True)
        if ctx.bias is not None:
            dx = dx - slope.mean(-1, keepdim=True)
        return (dx / root).to(x.dtype), None, None, None, None


def _normed(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """((x - m) / root, root) in double precision."""
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    root = (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return wide / root, root


def wide(function: Callable[..., Tensor], x: Tensor, *more: Tensor) -> Tensor:
    """function(x, ..) in double precision, rounded to the type of x."""
    return function(x.double(), *(t.double() for t in more)).to(x.dtype)
