"""Grouped products: rows sorted by expert, each run of them times the matrix of its expert.

Notable:
- On a CPU a loop of products is as fast as torch's grouped one (measured within 2 % from 256 rows an expert), and gives the same numerics as the
  other linear layers (`Gemm`): so the loop is the reference and what runs there. An accelerator takes one call where it can.
- The weight gradient of each expert is accumulated straight into its part of the sum and may be put off, as in `parallel/tensor.py`. An expert
  without rows costs nothing and adds nothing.
- In fp8 rows and matrices are quantised whole, before they are cut by expert.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn

from mtmegatron.precision.fp8 import Fp8Experts
from mtmegatron.precision.gemm import Gemm

ALIGN = 16  # bytes: rows of the operands of torch's grouped product begin at multiples of it


class Queue(Protocol):
    """Where work of weight gradients goes; `defer`: it is kept until later."""

    defer: bool

    def add(self, work: Callable[[], None]) -> None: ...


def grouped(
    x: Tensor, weights: Sequence[nn.Parameter], counts: Sequence[int], gemm: Gemm, queue: Queue, remake: Callable[[], Tensor] | None = None
) -> Tensor:  # fmt: skip
    """Y = X_e [W_1e; W_2e; ..]ᵀ for the rows of each expert e, `counts[e]` of them, end to end.

    `remake` makes x again in backward, which then need not be kept. Shapes: x [R, in], weights [E, out, in] each -> [R, sum of outs]."""
    assert sum(counts) == x.shape[0], f"{sum(counts)} rows are counted, there are {x.shape[0]}"
    return _Grouped.apply(x, tuple(counts), gemm, queue, remake, *weights)


def products(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int], gemm: Gemm) -> Tensor:
    """The forward product, expert by expert."""
    y, all_columns = x.new_empty(x.shape[0], sum(w.shape[1] for w in weights)), _columns(weights)
    if isinstance(gemm, Fp8Experts):
        x, weights = gemm.tokens(x, weights[0], gradient=False), [gemm.weight(w, transposed=False) for w in weights]
    for e, rows in runs(counts):
        for w, columns in zip(weights, all_columns):
            y[rows, columns] = gemm.forward(x[rows], w[e])
    return y


def products_in_one(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The forward product in one call per matrix. Rows after the last count would be uninitialised, so there are none."""
    ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
    return torch.cat([nn.functional.grouped_mm(x, w.transpose(1, 2), offs=ends) for w in weights], dim=1)


def runs(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows), for experts that have any."""
    start = 0
    for e, count in enumerate(counts):
        if count:
            yield e, slice(start, start + count)
        start += count


def _columns(weights: Sequence[Tensor]) -> list[slice]:
    return [slice(end - w.shape[1], end) for w, end in zip(weights, accumulate(w.shape[1] for w in weights))]


def _one_call(x: Tensor, weights: Sequence[Tensor], gemm: Gemm) -> bool:
    sizes = [x.shape[1], *(w.shape[1] for w in weights)]
    aligned = all(size * x.element_size() % ALIGN == 0 for size in sizes)
    plain = gemm.native and not isinstance(gemm, Fp8Experts)
    return x.device.type not in ("cpu", "meta") and plain and x.dtype == torch.bfloat16 and aligned


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, gemm, queue, remake, *weights):
        ctx.counts, ctx.gemm, ctx.queue, ctx.remake, ctx.weights = counts, gemm, queue, remake, weights
        ctx.save_for_backward(*(() if remake else (x,)))
        return products_in_one(x, weights, counts) if _one_call(x, weights, gemm) else products(x, weights, counts, gemm)

    @staticmethod
    def backward(ctx, dy):
        weights = ctx.weights
        dx = _input_gradient(dy, weights, ctx.counts, ctx.gemm) if ctx.needs_input_grad[0] else None
        if not any(w.requires_grad for w in weights):
            return dx, None, None, None, None, *[None] * len(weights)
        x = ctx.remake() if ctx.remake else ctx.saved_tensors[0]
        totals = [getattr(w, "grad_sum", None) for w in weights]
        if any(total is None for total in totals):
            totals = [torch.zeros_like(w) for w in weights]
            _weight_gradients(totals, dy, x, ctx.counts, ctx.gemm)
            return dx, None, None, None, None, *totals
        counts, gemm = ctx.counts, ctx.gemm
        ctx.queue.add(lambda: _weight_gradients(totals, dy, x, counts, gemm))
        return dx, None, None, None, None, *[None] * len(weights)


def _input_gradient(dy: Tensor, weights: Sequence[Tensor], counts: Sequence[int], gemm: Gemm) -> Tensor:
    dx, parts = dy.new_empty(dy.shape[0], weights[0].shape[2]), [dy[:, columns] for columns in _columns(weights)]
    if isinstance(gemm, Fp8Experts):
        parts = [gemm.tokens(part, w, gradient=True) for part, w in zip(parts, weights)]
        weights = [gemm.weight(w, transposed=True) for w in weights]
    for e, rows in runs(counts):
        first, *rest = (gemm.input_gradient(part[rows], w[e]) for part, w in zip(parts, weights))
        for part in rest:
            first += part
        dx[rows] = first
    return dx


def _weight_gradients(totals: Sequence[Tensor], dy: Tensor, x: Tensor, counts: Sequence[int], gemm: Gemm) -> None:
    for e, rows in runs(counts):
        for total, columns in zip(totals, _columns(totals)):
            gemm.weight_gradient(total[e], dy[rows, columns], x[rows])
