"""Tensor and sequence parallel: the linear function with its collectives, and the four moves of activations between ranks.

Notable:
- Y = X Wᵀ with W split by columns or rows is ONE autograd function. Its three products and its collectives are explicit, so that backward overlaps
  them: with a column split the gather of X runs beside dX = dY W, and the sum of dX beside dW = dYᵀ X (Korthikanti et al. 2022, 2205.05198).
- With sequence parallel only this rank's part of X is kept for backward.
- Weights that share an input (query, key, value; gate, up) are multiplied as one matrix when they are adjacent in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mtmegatron.mesh import Axis
from mtmegatron.parallel.gradient import (
    WeightQueue,
    accumulates,
    add_to_sums,
    adjacent,
    joined,
    trained,
)
from mtmegatron.parallel.recompute import remake_of
from mtmegatron.precision.fp8 import Fp8Gemm
from mtmegatron.precision.gemm import Gemm


@dataclass(frozen=True)
class Moves:
    """What happens to activations before and after the product.

    before: "gather" tokens, "copy" (the gradient is summed over the axis), or None; after: "scatter" the sum over tokens, "reduce", or None.
    """

    axis: Axis
    gemm: Gemm | Fp8Gemm
    queue: WeightQueue
    before: str | None = None
    after: str | None = None


def linear(x: Tensor, weights: list[nn.Parameter], biases: list[nn.Parameter], moves: Moves) -> Tensor:
    """Y = X [W_1; W_2; ..]ᵀ + b, with this rank's parts of the weights.

    A bias of a row split is added once, after the sum. Shapes: x [T, in] (T / tensor where `before` gathers) -> [T, out]."""
    return _Linear.apply(x, moves, remake_of(x), len(weights), *weights, *biases)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, moves: Moves, remake, count: int, *parameters):
        weights, biases = list(parameters[:count]), list(parameters[count:])
        ctx.moves, ctx.weights, ctx.biases, ctx.remake = moves, weights, biases, remake.func if remake else _same
        ctx.save_for_backward(*(remake.args if remake else (x,)))
        bias = joined(biases) if biases else None
        late = bias is not None and moves.after is not None
        y = _products(moves, x, weights, None if late else bias)
        if moves.after == "scatter":
            y = moves.axis.reduce_scatter(y)
        elif moves.after == "reduce":
            y = moves.axis.all_reduce(y)
        return y.add_(bias) if late else y

    @staticmethod
    def backward(ctx, dy):
        moves, weights, biases = ctx.moves, ctx.weights, ctx.biases
        kept = partial(ctx.remake, *ctx.saved_tensors)
        bias_gradients = _bias_gradients(biases, dy)
        dy = moves.axis.all_gather(dy) if moves.after == "scatter" else dy
        train = trained(weights)
        gather = moves.axis.start_all_gather(kept()) if moves.before == "gather" and train and not moves.queue.defer else None
        dx, pending = None, None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(moves.gemm, dy, weights)
            if moves.before == "gather":
                pending = moves.axis.start_reduce_scatter(dx)
            elif moves.before == "copy":
                pending = moves.axis.start_all_reduce(dx)
        weight_gradients = [None] * len(weights)
        if train:
            weight_gradients = _weight_gradients(moves, weights, dy, kept, gather)
        return pending.wait() if pending else dx, None, None, None, *weight_gradients, *bias_gradients


def _products(moves: Moves, x: Tensor, weights: list[nn.Parameter], bias: Tensor | None) -> Tensor:
    gemm, axis = moves.gemm, moves.axis if moves.before == "gather" else None
    if isinstance(gemm, Fp8Gemm):
        return gemm.products(x, weights, bias, axis)
    x = axis.all_gather(x) if axis else x
    together = adjacent(weights)
    if together is not None:
        return gemm.forward(x, together, bias)
    biases = [None] * len(weights) if bias is None else bias.split([w.shape[0] for w in weights])
    return torch.cat([gemm.forward(x, w, b) for w, b in zip(weights, biases)], dim=1)


def _input_gradient(gemm: Gemm | Fp8Gemm, dy: Tensor, weights: list[nn.Parameter]) -> Tensor:
    if isinstance(gemm, Fp8Gemm):
        return gemm.input_gradients(dy, weights)
    together = adjacent(weights)
    if together is not None:
        return gemm.input_gradient(dy, together)
    parts = dy.split([w.shape[0] for w in weights], dim=1)
    return sum(gemm.input_gradient(part, w) for part, w in zip(parts, weights))


def _same(x: Tensor) -> Tensor:
    return x


def _weight_gradients(moves: Moves, weights: list[nn.Parameter], dy: Tensor, kept: Callable[[], Tensor], gather) -> list[Tensor | None]:
    """Adds dYᵀ X to the sums of the weights, now or through the queue; without sums, returns it. `kept()` gives this rank's part of X."""

    def whole() -> Tensor:
        if moves.before != "gather":
            return kept()
        return gather.wait() if gather is not None else moves.axis.all_gather(kept())

    if not accumulates(weights):
        if isinstance(moves.gemm, Fp8Gemm):
            sums = [torch.zeros_like(w) for w in weights]
            moves.gemm.weight_gradients(sums, dy, whole(), weights)
            return sums
        gradient = moves.gemm.product(dy.t(), whole())
        return list(gradient.split([w.shape[0] for w in weights]))
    if moves.queue.defer:  # what was dropped is made again now: with ZeRO 3 the weights for it are gone later
        kept = partial(_same, kept())
    moves.queue.add(lambda: _accumulate(moves.gemm, weights, dy, whole()))
    return [None] * len(weights)


def _accumulate(gemm: Gemm | Fp8Gemm, weights: list[nn.Parameter], dy: Tensor, x: Tensor) -> None:
    if isinstance(gemm, Fp8Gemm):
        return gemm.weight_gradients([w.grad_sum for w in weights], dy, x, weights)
    total = adjacent([w.grad_sum for w in weights])
    if total is not None:
        gemm.weight_gradient(total, dy, x)
        return
    for w, part in zip(weights, dy.split([w.shape[0] for w in weights], dim=1)):
        gemm.weight_gradient(w.grad_sum, part, x)


def _bias_gradients(biases: list[nn.Parameter], dy: Tensor) -> list[Tensor | None]:
    """A bias is added after the sum over ranks, so its gradient is that of this rank's tokens."""
    if not trained(biases):
        return [None] * len(biases)
    gradient = dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))
    if not accumulates(biases):
        return [part.to(dy.dtype) for part in gradient.split([b.shape[0] for b in biases])]
    add_to_sums(biases, gradient)
    return [None] * len(biases)


def gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """All tokens from each rank's part; the gradient is summed and cut again."""
    return x if axis.size == 1 else _GatherTokens.apply(x, axis)


def scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    """This rank's tokens of the sum over ranks; the gradient is gathered."""
    return x if axis.size == 1 else _ScatterSum.apply(x, axis)


def copy(x: Tensor, axis: Axis) -> Tensor:
    """The same on every rank; the gradient is summed."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks; the gradient is the same on every rank."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return axis.all_gather(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.axis.reduce_scatter(dy), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return axis.reduce_scatter(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.axis.all_gather(dy), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.axis.all_reduce(dy.clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return axis.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx, dy):
        return dy, None
