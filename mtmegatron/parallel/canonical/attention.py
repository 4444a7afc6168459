"""Attention with the same bits in every layout: keys and values of the whole sequence, one chunk of queries and one key head at a time.

Notable: a chunk of queries multiplies all keys before its end, whatever the documents; a mask hides the others, so shapes depend on the place in the
sequence alone. The gradients of keys and values add up over chunks, on whichever context ranks those are, as integers. Probabilities are made again
in backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mtmegatron.batch import Bounds
from mtmegatron.mesh import Axis
from mtmegatron.parallel.canonical.exact import GRADIENT, Exact, number, product
from mtmegatron.parallel.context import ContextSplit, rank_order, sequence_order


def attention(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, length: int, axis: Axis, exact: Exact, scale: float | None = None) -> Tensor:
    """Causal softmax(scale * Q Kᵀ) V within each document, for the tokens of this rank of the context `axis`.

    Shapes: query [T, N, H], key [T, K, H], value [T, K, Hv], T = B * length / context; result [T, N, Hv]."""
    plan = _Plan(bounds, length, axis, exact, query.shape[-1] ** -0.5 if scale is None else scale)
    return _Attention.apply(query, key, value, plan)


@dataclass
class _Plan:
    bounds: Bounds
    length: int
    axis: Axis
    exact: Exact
    scale: float

    def gathered(self, x: Tensor) -> Tensor:
        """The rows of all context ranks in the order of the sequences. Shapes: [T, ..] -> [B * S, ..]."""
        if self.axis.size == 1:
            return x
        return sequence_order(self.axis.all_gather(x), self.axis.size, self.bounds.total // self.length)

    def own(self, total: Tensor) -> Tensor:
        """This rank's rows of a sum over ranks. Shapes: [B * S, ..] -> [T, ..]."""
        if self.axis.size == 1:
            return total
        return self.axis.reduce_scatter(rank_order(total, self.axis.size, self.bounds.total // self.length))

    def chunks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """(rows of this rank, keys they may see, which of those are hidden) of each chunk of queries."""
        size, document, held = self.exact.chunk, _documents(self.bounds), 0
        for first, end in ContextSplit(self.axis.size, self.axis.rank).runs(self.bounds.total // self.length, self.length):
            for start in range(first, end, size):
                keys = slice(start // self.length * self.length, start + size)
                queries = torch.arange(start, start + size)[:, None]
                hidden = (document[keys] != document[start : start + size, None]) | (torch.arange(keys.start, keys.stop) > queries)
                yield slice(held, held + size), keys, hidden
                held += size


def _documents(bounds: Bounds) -> Tensor:
    """The number of each token's document."""
    return torch.repeat_interleave(torch.arange(len(bounds.lengths)), torch.tensor(bounds.lengths))


def _probabilities(q: Tensor, k: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Softmax in double precision. Shapes: q [G, rows, H], k [keys, H], hidden [rows, keys] -> [G * rows, keys]."""
    scores = product(q.flatten(0, 1), k.t()).double().unflatten(0, q.shape[:2]) * scale
    return scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1).flatten(0, 1)


def _grouped(x: Tensor, head: int, heads: int) -> Tensor:
    """The query heads of one key head. Shapes: [rows, N, H] -> [G, rows, H]."""
    return x.unflatten(1, (heads, -1))[:, head].transpose(0, 1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, plan: _Plan):
        ctx.save_for_backward(query, key, value)
        ctx.plan, heads = plan, key.shape[1]
        keys, values = plan.gathered(key), plan.gathered(value)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for rows, seen, hidden in plan.chunks():
            for head in range(heads):
                q = _grouped(query[rows], head, heads)
                p = _probabilities(q, keys[seen, head], hidden, plan.scale)
                _grouped(out[rows], head, heads).copy_(product(p, values[seen, head]).unflatten(0, q.shape[:2]))
        return out

    @staticmethod
    def backward(ctx, grad):
        (query, key, value), plan = ctx.saved_tensors, ctx.plan
        heads, exact = key.shape[1], plan.exact
        keys, values, dquery = plan.gathered(key), plan.gathered(value), torch.empty_like(query)
        dkeys, dvalues = (torch.zeros(t.shape, dtype=torch.int64, device=t.device) for t in (keys, values))
        for rows, seen, hidden in plan.chunks():
            for head in range(heads):
                q, g = _grouped(query[rows], head, heads), _grouped(grad[rows], head, heads)
                p = _probabilities(q, keys[seen, head], hidden, plan.scale)
                dp = product(g.flatten(0, 1), values[seen, head].t()).double()
                ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * plan.scale
                _grouped(dquery[rows], head, heads).copy_(product(ds, keys[seen, head]).unflatten(0, q.shape[:2]))
                dkeys[seen, head] += exact.integers(product(ds.t(), q.flatten(0, 1)), GRADIENT)
                dvalues[seen, head] += exact.integers(product(p.t(), g.flatten(0, 1)), GRADIENT)
        return dquery, number(plan.own(dkeys), GRADIENT, key.dtype), number(plan.own(dvalues), GRADIENT, value.dtype), None
