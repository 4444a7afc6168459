"""Activations of the feed-forward block, gated and plain, and the table of their names.

Notable: a gated activation reads one [T, 2F] tensor, as one fused GEMM writes it, saves nothing else, and writes both
halves of its gradient into one [T, 2F] tensor, ready for the GEMM of the backward, in chunks of rows that a CPU's cache
holds. The plain composition saves act(gate) as well, half as much again. Torch's kernels do the transcendental part, so
every floating dtype and device works.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
CACHED = 2**20  # elements of gate and up in one chunk of the backward: more leaves the cache, less pays for calls


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """y = silu(gate) * up, gate the first half of the last dim and up the second (Shazeer 2020, eq. 6).

    Shapes: [..., 2F] -> [..., F].
    """
    return _Gated.apply(gate_up_T2F, aten.silu.out, _swiglu_gradient)


def geglu(gate_up_T2F: Tensor) -> Tensor:
    """y = gelu(gate) * up with the exact, error-function gelu (Shazeer 2020, eq. 6).

    Shapes: [..., 2F] -> [..., F].
    """
    gradient = partial(_kernel_gradient, aten.gelu.out, aten.gelu_backward.grad_input)
    return _Gated.apply(gate_up_T2F, aten.gelu.out, gradient)


def geglu_tanh(gate_up_T2F: Tensor) -> Tensor:
    """`geglu` with the tanh approximation of gelu (Gemma).

    Shapes: [..., 2F] -> [..., F].
    """
    forward, backward = (partial(f, approximate="tanh") for f in (aten.gelu.out, aten.gelu_backward.grad_input))
    return _Gated.apply(gate_up_T2F, forward, partial(_kernel_gradient, forward, backward))


def gelu(x: Tensor) -> Tensor:
    """y = x * Phi(x), exact (Hendrycks and Gimpel 2016); torch's kernel saves the input alone."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """y = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """y = max(x, 0)^2 (So et al. 2021)."""
    return _SquaredReLU.apply(x)


class _Gated(torch.autograd.Function):
    """y = f(gate) * up; dgate = f'(gate) * up * dy, dup = f(gate) * dy."""

    @staticmethod
    def forward(ctx, gate_up, activate, gradient):
        ctx.save_for_backward(gate_up)
        ctx.gradient = gradient
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        return activate(gate, out=out).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        both = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        rows = max(1, CACHED // gate_up.shape[-1]) if grad.device.type == "cpu" else grad.shape[0]
        for dy, x, dx in zip(*(t.flatten(0, -2).split(rows) for t in (grad, gate_up, both))):
            ctx.gradient(dy, *x.chunk(2, dim=-1), *dx.chunk(2, dim=-1))
        return both, None, None


def _kernel_gradient(
    activate: Callable, activate_backward: Callable, dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor
) -> None:
    """By torch's kernels for an activation and its derivative."""
    torch.mul(dy, up, out=dgate)
    activate_backward(dgate, gate, grad_input=dgate)
    activate(gate, out=dup).mul_(dy)


def _swiglu_gradient(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """silu' = s (1 - silu) + silu, s = sigmoid(gate): one exponential for both halves; too coarse in 16 bits."""
    if dy.dtype not in (torch.float32, torch.float64):
        return _kernel_gradient(aten.silu.out, aten.silu_backward.grad_input, dy, gate, up, dgate, dup)
    torch.sigmoid(gate, out=dgate)
    torch.mul(gate, dgate, out=dup)
    dgate.addcmul_(dgate, dup, value=-1).add_(dup).mul_(up).mul_(dy)
    dup.mul_(dy)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x).square_()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.relu(x).mul_(grad).mul_(2)


def gated_reference(gate_up_T2F: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """activate(gate) * up, by autograd."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return activate(gate) * up


# name -> (function, gated): a gated function halves the last dim
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "swiglu": (swiglu, True),
    "geglu": (geglu, True),
    "geglu_tanh": (geglu_tanh, True),
    "gelu": (gelu, False),
    "gelu_tanh": (gelu_tanh, False),
    "squared_relu": (squared_relu, False),
    "relu": (torch.relu, False),
    "silu": (F.silu, False),
}
