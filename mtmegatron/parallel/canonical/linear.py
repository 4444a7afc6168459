"""The linear function of `parallel/tensor.py` with the same bits in every layout.

Notable: Y = X Wᵀ is cut in chunks of tokens times cells of the split dimension. With a column split the cells of Y stand side by side and those of
dX add up; with a row split the cells of Y add up and those of dX stand side by side; dW is always a sum over chunks. All that adds up is integers,
over cells, chunks, ranks and micro-batches alike.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtmegatron.layout import Layout
from mtmegatron.parallel.canonical.exact import (
    ACTIVATION,
    GRADIENT,
    Exact,
    number,
    packed,
    product,
)
from mtmegatron.parallel.gradient import trained
from mtmegatron.parallel.recompute import remake_of
from mtmegatron.parallel.tensor import Moves


@dataclass
class Cut:
    """A weight of a linear layer [outputs, inputs] and the cells of its split dimension; one cell when it is whole on each rank."""

    weight: nn.Parameter
    rows: bool
    cells: list[slice]

    @classmethod
    def of(cls, weight: nn.Parameter, exact: Exact, layout: Layout, rank: int) -> "Cut":
        splits = weight.placement.split
        if not splits:
            return cls(weight, False, [slice(0, weight.shape[0])])
        ((dim, _),) = splits
        offset, size = weight.placement.offset_and_size(layout, rank)
        return cls(weight, dim == 1, exact.cells(weight.placement.shape[dim], offset[dim], size[dim]))

    def blocks(self) -> Iterable[tuple[slice, Tensor]]:
        """(cell, its weights)."""
        return [(cell, packed(self.weight[:, cell] if self.rows else self.weight[cell])) for cell in self.cells]


def linear(x: Tensor, cuts: list[Cut], biases: list[nn.Parameter], moves: Moves, exact: Exact) -> Tensor:
    """As `parallel.tensor.linear`. Shapes: x [T, in] (T / tensor where `before` gathers) -> [T, out]."""
    return _Linear.apply(x, moves, exact, remake_of(x), cuts, biases, *(cut.weight for cut in cuts), *biases)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, moves: Moves, exact: Exact, remake, cuts: list[Cut], biases, *_):
        ctx.moves, ctx.exact, ctx.cuts, ctx.biases, ctx.remake = moves, exact, cuts, biases, remake
        ctx.save_for_backward(*(() if remake else (x,)))
        whole = moves.axis.all_gather(x) if moves.before == "gather" else x
        if cuts[0].rows:
            y = number(_moved(moves, moves.after, _sum_over_cells(exact, whole, cuts[0])), ACTIVATION, torch.float32)
        else:
            y = torch.cat([_side_by_side(exact, whole, cut) for cut in cuts], 1)
        if biases:
            y += torch.cat([bias.detach() for bias in biases])
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        moves, exact, cuts = ctx.moves, ctx.exact, ctx.cuts
        for bias, part in zip(ctx.biases, dy.split([b.shape[0] for b in ctx.biases], 1) if ctx.biases else ()):
            if bias.requires_grad:
                bias.grad_sum += exact.integers(part, GRADIENT).sum(0)
        dy = moves.axis.all_gather(dy) if moves.after == "scatter" else dy
        dx = _input_gradient(moves, exact, cuts, dy) if ctx.needs_input_grad[0] else None
        if trained([cut.weight for cut in cuts]):
            x = ctx.remake() if ctx.remake else ctx.saved_tensors[0]
            moves.queue.add(_weight_gradients(moves, exact, cuts, dy, x))
        return dx, *[None] * (5 + len(cuts) + len(ctx.biases))


def _moved(moves: Moves, move: str | None, total: Tensor) -> Tensor:
    """Integers summed over the tensor ranks, where a layout has several."""
    if move in ("scatter", "gather"):
        return moves.axis.reduce_scatter(total)
    return moves.axis.all_reduce(total) if move in ("reduce", "copy") else total


def _side_by_side(exact: Exact, x: Tensor, cut: Cut) -> Tensor:
    """[T, out] of a column split, fp32."""
    y = torch.empty(x.shape[0], cut.weight.shape[0], dtype=torch.float32, device=x.device)
    for cell, block in cut.blocks():
        for rows in exact.chunks(x.shape[0]):
            y[rows, cell] = product(x[rows], block.t())
    return y


def _sum_over_cells(exact: Exact, x: Tensor, cut: Cut) -> Tensor:
    """[T, out] of a row split, as integers."""
    total = torch.zeros(x.shape[0], cut.weight.shape[0], dtype=torch.int64, device=x.device)
    for cell, block in cut.blocks():
        for rows in exact.chunks(x.shape[0]):
            total[rows] += exact.integers(product(x[rows, cell], block.t()), ACTIVATION)
    return total


def _input_gradient(moves: Moves, exact: Exact, cuts: list[Cut], dy: Tensor) -> Tensor:
    inputs = cuts[0].weight.shape[1]
    if cuts[0].rows:
        dx = torch.empty(dy.shape[0], inputs, dtype=torch.float32, device=dy.device)
        for cell, block in cuts[0].blocks():
            for rows in exact.chunks(dy.shape[0]):
                dx[rows, cell] = product(dy[rows], block)
        return dx.to(dy.dtype)
    total = torch.zeros(dy.shape[0], inputs, dtype=torch.int64, device=dy.device)
    for cut, part in zip(cuts, dy.split([cut.weight.shape[0] for cut in cuts], 1)):
        for cell, block in cut.blocks():
            for rows in exact.chunks(dy.shape[0]):
                total[rows] += exact.integers(product(part[rows, cell], block), GRADIENT)
    return number(_moved(moves, moves.before, total), GRADIENT, dy.dtype)


def _weight_gradients(moves: Moves, exact: Exact, cuts: list[Cut], dy: Tensor, x: Tensor) -> Callable[[], None]:
    """What adds dYᵀ X to the sums of the weights."""

    def add() -> None:
        whole = moves.axis.all_gather(x) if moves.before == "gather" else x
        for cut, part in zip(cuts, dy.split([cut.weight.shape[0] for cut in cuts], 1)):
            for cell in cut.cells:
                into = cut.weight.grad_sum[:, cell] if cut.rows else cut.weight.grad_sum[cell]
                left, right = (part, whole[:, cell]) if cut.rows else (part[:, cell], whole)
                for rows in exact.chunks(whole.shape[0]):
                    into += exact.integers(product(left[rows].t(), right[rows]), GRADIENT)

    return add
