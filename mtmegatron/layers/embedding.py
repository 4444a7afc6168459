"""Embedding tables: tokens (split over the vocabulary) and learned positions.

Notable: rows of the vocabulary are shared as equally as possible, so there are no padding rows: nothing can see them, and nothing depends on them.
"""

import torch
from torch import Tensor, nn

from mtmegatron.layers.build import Build
from mtmegatron.parallel.canonical.exact import GRADIENT, Exact
from mtmegatron.parallel.gradient import accumulates
from mtmegatron.placement import GRADIENT_AXES, Init


class TokenEmbedding(nn.Module):
    """x = W[tokens], W of global shape [vocab, width] split by rows over `tensor`.

    Each rank looks up the tokens whose rows it holds, zeros elsewhere; the sum over ranks is the embedding. `two_stages`: the table is also the
    output projection, on another pipeline rank. Shapes: T -> [T', D]."""

    forward_only = True  # as output projection too: `linear_cross_entropy` makes its gradients in forward

    def __init__(self, vocab: int, width: int, build: Build, *, std: float, decay: bool, two_stages: bool):
        super().__init__()
        ends = ("ends",) if two_stages else ()
        self.build, self.vocab = build, vocab
        self.weight = build.parameter((vocab, width), Init(std), decay, ((0, "tensor"),), GRADIENT_AXES + ends)
        (self.start, _), _ = self.weight.placement.offset_and_size(build.layout, build.mesh.rank)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.build.sum_of_parts(lookup(self.weight, tokens, self.start, self.vocab, self.build.exact))


class PositionEmbedding(nn.Module):
    """x = W[positions], whole on every rank. Shapes: T' -> [T', D]."""

    forward_only = True

    def __init__(self, positions: int, width: int, build: Build, *, std: float, decay: bool):
        super().__init__()
        self.weight = build.parameter((positions, width), Init(std), decay, (), build.token_axes)
        self.positions, self.exact = positions, build.exact

    def forward(self, positions: Tensor) -> Tensor:
        return lookup(self.weight, positions, 0, self.positions, self.exact)


def lookup(weight: nn.Parameter, index: Tensor, start: int, total: int, exact: Exact | None = None) -> Tensor:
    """Rows `index - start` of this rank's part of a table of `total` rows; zeros where another rank holds the row."""
    return _Lookup.apply(weight, index, start, total, exact)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, index, start, total, exact):
        ctx.weight, ctx.outside, ctx.exact = weight, None, exact
        local = index
        if weight.shape[0] != total:
            local = index - start
            ctx.outside = (local < 0) | (local >= weight.shape[0])
            local = local.masked_fill(ctx.outside, 0)
        ctx.save_for_backward(local)
        rows = weight.index_select(0, local)
        return rows if ctx.outside is None else rows.masked_fill_(ctx.outside[:, None], 0)

    @staticmethod
    def backward(ctx, dy):
        (local,), weight = ctx.saved_tensors, ctx.weight
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        if ctx.outside is not None:
            dy = dy.masked_fill(ctx.outside[:, None], 0)
        if accumulates([weight]):
            rows = ctx.exact.integers(dy, GRADIENT) if ctx.exact else dy.to(weight.grad_sum.dtype)
            weight.grad_sum.index_add_(0, local, rows)
            return None, None, None, None, None
        return torch.zeros_like(weight).index_add_(0, local, dy.to(weight.dtype)), None, None, None, None
