"""Expert parallel: how the rows of tokens reach their experts on other ranks, and come back.

Notable:
- The ranks of a stage are seen a second time, as `expert_data` x `expert` x `expert_tensor`, whatever tensor, context and data are: each of them
  brings its own tokens. Ranks along `expert` hold different experts; ranks along `expert_tensor` hold different columns of the same ones.
- alltoall: rows are sorted by expert (stable), counts are exchanged, then rows with variable splits; the ranks of `expert_tensor` gather theirs,
  because each computes a part of every row, and their sum is scattered. allgather: every rank of the experts' group gets all tokens of it,
  takes those of its experts, and the outputs are summed and scattered: less to prepare, more to carry.
- One gather of counts and one look at them on the host per layer; every rank then knows all sizes, and enters every exchange, with rows or without.
- An exchange is two autograd functions, `begin` and `end`: what is computed between them runs while rows travel, forward and backward. With
  `parts` the rows of one part of the tokens travel beside the products of another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mtmegatron.layout import share
from mtmegatron.mesh import Axis, Mesh, Pending
from mtmegatron.ops.permute import (
    bin_counts,
    combine,
    inverse,
    reorder,
    sort_slots,
    spread,
)
from mtmegatron.parallel.tensor import gather_tokens, scatter_sum

Compute = Callable[[Tensor, list[int]], Tensor]  # rows sorted by this rank's experts and their counts -> this rank's part of the outputs


@dataclass(frozen=True)
class Experts:
    """The experts' view of the mesh. `count`: experts of the block."""

    mesh: Mesh
    count: int

    @property
    def axis(self) -> Axis:
        """Ranks that hold different experts."""
        return self.mesh["expert"]

    @property
    def slices(self) -> Axis:
        """Ranks that hold different columns of the same experts."""
        return self.mesh["expert_tensor"]

    @property
    def group(self) -> Axis:
        """All ranks that together hold the experts once: place i * slices + s has part i of the experts, slice s of their columns."""
        return self.mesh["expert", "expert_tensor"]

    @cached_property
    def parts(self) -> list[range]:
        """The experts of each rank of `axis`."""
        shares = [share(self.count, self.axis.size, i) for i in range(self.axis.size)]
        return [range(start, start + size) for start, size in shares]

    @property
    def own(self) -> range:
        return self.parts[self.axis.rank]


def alltoall(
    x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts, compute: Compute, meanwhile: Callable[[], None], parts: int = 1
) -> Tensor:  # fmt: skip
    """y_t = sum_j weights_tj expert_{chosen_tj}(x_t). `chosen` of `experts.count`: no expert, adds nothing. `meanwhile` runs while rows travel.

    Shapes: x [T', D], weights and chosen [T', k] -> [T', D]."""
    bins = chosen.tensor_split(parts)
    counts = all_counts(torch.stack([bin_counts(b, experts.count) for b in bins]), chosen.numel() // parts, experts)
    trips = [_Trip.of(experts, counts, part) for part in range(parts)]
    slots = [sort_slots(b, sum(trip.send)) for b, trip in zip(bins, trips)]

    def leave(part: int) -> Tensor:
        return begin(spread(pieces[part], slots[part]), trips[part].there)

    pieces, on_their_way, back = x.tensor_split(parts), [], []
    on_their_way.append(leave(0))
    meanwhile()
    for part, trip in enumerate(trips):
        if part + 1 < parts:
            on_their_way.append(leave(part + 1))
        back.append(begin(_computed(end(on_their_way[part], trip.there), trip, experts, compute), trip.back))
    outs = [
        combine(end(rows, trip.back), w, s, x.dtype) for rows, trip, w, s in zip(back, trips, weights.tensor_split(parts), slots)
    ]  # fmt: skip
    return outs[0] if parts == 1 else torch.cat(outs)


def allgather(
    x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts, compute: Compute, meanwhile: Callable[[], None]
) -> Tensor:  # fmt: skip
    """The same as `alltoall`, to rounding. Every rank of the group has equally many tokens."""
    axis, wide = experts.group, torch.promote_types(x.dtype, torch.float32)
    gather = Exchange(x.shape[0] * axis.size, axis.start_all_gather, axis.start_reduce_scatter, axis.size == 1)
    travelling = begin(x, gather)
    meanwhile()
    everything, weights, chosen = end(travelling, gather), gather_tokens(weights, axis), axis.all_gather(chosen)
    own, size = experts.own, len(experts.own)
    bins = torch.where((chosen >= own.start) & (chosen < own.stop), chosen - own.start, size)
    counted = bin_counts(bins, size)
    counts = _evenly(bins.numel() // experts.axis.size, size) if counted.is_meta else counted.tolist()
    slots = sort_slots(bins, sum(counts))
    outs = combine(compute(spread(everything, slots), counts), weights, slots, wide)
    return scatter_sum(outs, axis).to(x.dtype)


def all_counts(own: Tensor, assignments: int, experts: Experts) -> list[list[list[int]]]:
    """counts[rank of the group][part][expert] from this rank's [parts, E]; on the meta device as if all were even."""
    parts, count = own.shape
    gathered = experts.group.all_gather(own.unsqueeze(0))
    if own.is_meta:
        return [[_evenly(assignments, count)] * parts] * experts.group.size
    return gathered.tolist()


def _evenly(total: int, parts: int) -> list[int]:
    return [share(total, parts, i)[1] for i in range(parts)]


@dataclass(frozen=True)
class _Trip:
    """What one part of the tokens sends and receives.

    send: rows to each rank of the axis; blocks: [slice][source][own expert], the rows that arrive at each rank of `slices`."""

    axis: Axis
    send: list[int]
    blocks: list[list[list[int]]]
    slice: int

    @classmethod
    def of(cls, experts: Experts, counts: list[list[list[int]]], part: int) -> "_Trip":
        mine, own, slices = counts[experts.group.rank][part], experts.own, experts.slices
        send = [sum(mine[r.start : r.stop]) for r in experts.parts]
        blocks = [[counts[i * slices.size + s][part][own.start : own.stop] for i in range(experts.axis.size)] for s in range(slices.size)]
        return cls(experts.axis, send, blocks, slices.rank)

    @property
    def receive(self) -> list[int]:
        return [sum(block) for block in self.blocks[self.slice]]

    @cached_property
    def there(self) -> "Exchange":
        return _rows_exchange(self.axis, self.send, self.receive)

    @cached_property
    def back(self) -> "Exchange":
        return _rows_exchange(self.axis, self.receive, self.send)

    @property
    def per_slice(self) -> list[int]:
        """Rows that arrive at each rank of `slices`."""
        return [sum(map(sum, sources)) for sources in self.blocks]

    def by_expert(self, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
        """(index, back, counts): from all slices' rows, each filled up to the most of any, to rows sorted by own expert, and the way back."""
        most, ids, lengths, count = max(self.per_slice), [], [], len(self.blocks[0][0])
        for sources, rows in zip(self.blocks, self.per_slice):
            ids += [*range(count)] * len(sources) + [count]
            lengths += [n for block in sources for n in block] + [most - rows]
        total = most * len(self.blocks)
        bins = torch.repeat_interleave(torch.tensor(ids, device=device), torch.tensor(lengths, device=device), output_size=total)
        order, valid = bins.argsort(stable=True), sum(self.per_slice)
        counts = [sum(block[e] for sources in self.blocks for block in sources) for e in range(count)]
        return order[:valid], inverse(order).clamp(max=valid), counts


def _computed(rows: Tensor, trip: _Trip, experts: Experts, compute: Compute) -> Tensor:
    """Outputs of the rows that arrived, in the order in which they did."""
    if experts.group.size == 1:  # sorted by expert when they left
        return compute(rows, trip.blocks[0][0])
    slices = experts.slices
    if slices.size > 1:
        rows = gather_tokens(_filled(rows, max(trip.per_slice)), slices)
    index, back, counts = trip.by_expert(rows.device)
    y = reorder(compute(reorder(rows, index, back), counts), back, index)
    return scatter_sum(y, slices)[: sum(trip.receive)]


def _filled(rows: Tensor, most: int) -> Tensor:
    """Rows and zeros below them."""
    return torch.nn.functional.pad(rows, (0, 0, 0, most - rows.shape[0]))


# ---- an exchange that is begun and awaited


@dataclass
class Exchange:
    """A collective on rows and its transpose, which carries the gradient back. `rows`: of the result; `idle`: nobody to exchange with."""

    rows: int
    start: Callable[[Tensor], Pending]
    start_back: Callable[[Tensor], Pending]
    idle: bool
    pending: Pending | None = None

    def take(self) -> Tensor:
        pending, self.pending = self.pending, None
        return pending.wait()


def _rows_exchange(axis: Axis, send: list[int], receive: list[int]) -> Exchange:
    return Exchange(
        sum(receive), lambda x: axis.start_all_to_all_rows(x, send, receive), lambda x: axis.start_all_to_all_rows(x, receive, send), axis.size == 1
    )  # fmt: skip


def begin(x: Tensor, exchange: Exchange) -> Tensor:
    """Begins; the result stands for the rows that `end` gives. Backward ends the exchange of the gradient."""
    return x if exchange.idle else _Begin.apply(x, exchange)


def end(travelling: Tensor, exchange: Exchange) -> Tensor:
    """The rows that arrive. Backward begins the exchange of the gradient."""
    return travelling if exchange.idle else _End.apply(travelling, exchange)


def _placeholder(like: Tensor, rows: int) -> Tensor:
    """The shape of what is on its way, without its memory."""
    return like.new_zeros(()).expand(rows, *like.shape[1:])


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange: Exchange):
        ctx.exchange = exchange
        exchange.pending = exchange.start(x.detach())
        return _placeholder(x, exchange.rows)

    @staticmethod
    def backward(ctx, dy):
        return ctx.exchange.take(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, travelling, exchange: Exchange):
        ctx.exchange, ctx.rows = exchange, travelling.shape[0]
        return exchange.take()

    @staticmethod
    def backward(ctx, dy):
        ctx.exchange.pending = ctx.exchange.start_back(dy.contiguous())
        return _placeholder(dy, ctx.rows), None
