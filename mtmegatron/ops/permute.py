"""Rows on their way to experts and back: tokens to assignments sorted by expert, any order to another, weighted sums of a token's rows.

Notable: the backward of each move is a gather by the inverse index and a sum in a fixed order, never an addition at random places: the same bits
at every run, on every device. The number of rows is known on the host before they are moved, so nothing is allocated that is not filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """Assignments (token, choice) sorted by bin, ties in the order of tokens; those without a bin are left out.

    order: [R], the assignments t * k + j in sorted order; place: [T, k], where each stands among them, R for those left out."""

    order: Tensor
    place: Tensor

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    @property
    def token(self) -> Tensor:
        """[R], the token of each row."""
        return self.order // self.place.shape[1]


def bin_counts(bins: Tensor, count: int) -> Tensor:
    """How many elements are in each of `count` bins; others are not counted. Integers, so in no order and exact. Shapes: any -> [count]."""
    flat = bins.reshape(-1)
    inside = flat.clamp(max=count)
    return flat.new_zeros(count + 1).scatter_add_(0, inside, torch.ones_like(flat))[:count]


def sort_slots(bins: Tensor, rows: int) -> Slots:
    """Sorts assignments by bin; `rows`: how many have one, which are those with the lowest bins. Shapes: bins [T, k]."""
    order = bins.reshape(-1).argsort(stable=True)
    return Slots(order[:rows], inverse(order).clamp(max=rows).view(bins.shape))


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def spread(x: Tensor, slots: Slots) -> Tensor:
    """The row of its token for each sorted assignment; the gradients of a token's rows add up in fp32 or wider. Shapes: [T, D] -> [R, D]."""
    return _Spread.apply(x, slots)


def combine(rows: Tensor, weights: Tensor, slots: Slots, dtype: torch.dtype) -> Tensor:
    """y_t = sum_j w_tj rows[place_tj], in fp32 or wider, rounded to `dtype`; what was left out adds nothing.

    Shapes: rows [R, D], weights [T, k] -> [T, D]."""
    return _Combine.apply(rows, weights, slots, dtype)


def reorder(x: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """x[index], where the number of rows of x stands for a row of zeros; `back`: the index of the inverse move. Shapes: [R, D] -> [R', D]."""
    return _Reorder.apply(x, index, back)


def fill_runs(counts: Sequence[int], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(index, back) of `reorder` from runs of `counts` rows to runs of `size` each, the rest of which are zeros."""
    total, starts = sum(counts), [0, *accumulate(counts)]
    assert max(counts) <= size, f"a run of {max(counts)} rows does not fit in {size}"
    place, run = torch.arange(size, device=device), torch.tensor(counts, device=device)[:, None]
    index = torch.where(place < run, place + torch.tensor(starts[:-1], device=device)[:, None], total).flatten()
    back = torch.cat([torch.arange(e * size, e * size + n, device=device) for e, n in enumerate(counts)])
    return index, back


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x; its length as an index gives zeros."""
    if x.shape[0] == 0:
        return x.new_zeros(*index.shape, *x.shape[1:])
    outside = index >= x.shape[0]
    return x.index_select(0, index.clamp(max=x.shape[0] - 1)).masked_fill_(outside[:, None], 0)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slots: Slots):
        ctx.slots, ctx.dtype = slots, x.dtype
        return x.index_select(0, slots.token)

    @staticmethod
    def backward(ctx, drows):
        columns = ctx.slots.place.unbind(1)
        dx = _take(drows, columns[0]).to(_wide(drows))
        for column in columns[1:]:
            dx += _take(drows, column)
        return dx.to(ctx.dtype), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, slots: Slots, dtype):
        ctx.slots = slots
        ctx.save_for_backward(rows, weights)
        wide = _wide(rows)
        y = torch.zeros(weights.shape[0], rows.shape[1], dtype=wide, device=rows.device)
        for weight, place in zip(weights.to(wide).unbind(1), slots.place.unbind(1)):
            y.addcmul_(_take(rows, place).to(wide), weight[:, None])
        return y.to(dtype)

    @staticmethod
    def backward(ctx, dy):
        rows, weights = ctx.saved_tensors
        slots, wide = ctx.slots, torch.promote_types(_wide(rows), dy.dtype)
        weight = weights.reshape(-1).index_select(0, slots.order).to(wide)
        drows = (dy.index_select(0, slots.token).to(wide) * weight[:, None]).to(rows.dtype)
        dweights = [torch.linalg.vecdot(_take(rows, place).to(wide), dy.to(wide)) for place in slots.place.unbind(1)]
        return drows, torch.stack(dweights, dim=1).to(weights.dtype), None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, back):
        ctx.index, ctx.back = index, back
        return _take(x, index)

    @staticmethod
    def backward(ctx, dy):
        return _take(dy, ctx.back), None, None
