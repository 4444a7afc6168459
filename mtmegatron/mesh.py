"""The process groups of a layout, as axis objects with a size, a rank and collectives. One object, passed to whoever communicates.

Notable:
- an axis of size 1 has no group and its collectives return their input: serial code is parallel code with sizes 1;
- where the backend leaves the order of a sum open (Gloo), a reduce-scatter is an all-to-all and a sum in rank order, in fp32 for 16-bit
  inputs: deterministic, independent of how tensors are packed into buckets, and faster than Gloo's own;
- so are the sums of 16-bit floats where the library adds them in 16 bits: 16 bits travel, and are added in fp32;
- ranks of one host on a CPU exchange through shared memory (`shared_memory.py`, `shared_messages.py`), with the bits that Gloo's way gives;
- all groups are made at once, in one order on all ranks, by their members alone;
- `Mesh(layout, rank)` without processes serves to build and describe any rank of any layout alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mtmegatron import shared_connect
from mtmegatron.layout import Layout
from mtmegatron.shared_memory import Channel, Exchange, Ongoing
from mtmegatron.shared_messages import Arrival, Line

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# every set of axes that something communicates over; made in this order on every rank
GROUPS = (
    ("tensor",), ("context",), ("ulysses",), ("ring",), ("data",), ("data_copies",), ("pipeline",), ("data", "context"),
    ("data_shards", "context"), ("data_shards", "context", "tensor"), ("data_shards", "context", "key_value_copies"),
    ("data_shards", "context", "ends"), ("data", "context", "tensor", "pipeline"),
    ("expert",), ("expert_tensor",), ("expert_data",), ("expert", "expert_tensor"), ("context", "tensor"),
)  # fmt: skip
# torch 2.13 renamed two collectives; the names before work from 2.11 on
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
EXPERTS = GROUPS[-5:]  # those that only a model with experts needs
SMALL = 1 << 15  # elements below which a sum is gathered whole rather than scattered: latency decides there


@dataclass
class Pending:
    """A collective under way; `wait` returns its result. The work holds its buffers until then."""

    work: dist.Work | Ongoing | Arrival | None
    finish: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.finish()


class Axis:
    """One axis, or a product of axes, as one rank sees it.

    `ranks`: global ranks along it, ascending; `rank`: this rank's place among them. Collectives need equal sizes on all ranks and
    contiguous tensors; they work along dim 0.
    """

    def __init__(
        self, name: str, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None, ordered_sum: bool, channel: Channel | None = None,
        lines: dict[int, Line] | None = None, narrow_sum: bool = False,
    ):  # fmt: skip
        self.name, self.ranks, self.rank, self.size = name, ranks, rank, len(ranks)
        self.group, self._ordered, self._narrow, self._channel, self._lines = group, ordered_sum, narrow_sum, channel, lines or {}

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Sum, max or min over the axis, in place; the same bits on every rank."""
        if self.size == 1:
            return x
        assert x.is_contiguous(), "an all-reduce of a view would be lost"
        if self._folds(x) and (op != "sum" or not x.is_floating_point() or self._whole(x)):
            return self._shared_all_reduce(x, op, later=False).wait()
        if op != "sum" or not self._orders(x) or not x.is_floating_point():
            dist.all_reduce(x, OPERATIONS[op], group=self.group)
            return x
        if self._whole(x):
            parts = self.all_gather(x.reshape(1, -1))
            return x.copy_(_ordered_sum(parts, x.dtype).view_as(x))
        flat = x.view(-1)
        return self.all_gather(self.reduce_scatter(flat), out=flat).view_as(x)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The parts of all ranks, end to end along dim 0."""
        return self._all_gather(x, out, later=False).wait()

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part along dim 0 of the sum over the axis."""
        return self._reduce_scatter(x, None, later=False).wait()

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """The parts that all ranks hold for this one, in rank order: of `size` equal parts along dim 0, part i goes to rank i."""
        if self.size == 1:
            return x
        x = x.contiguous()
        result = torch.empty_like(x)
        if self._channel:
            return self._exchange("all-to-all", x.view(self.size, -1), result.view(self.size, -1), result, later=False).wait()
        dist.all_to_all_single(result, x, group=self.group)
        return result

    def start_all_to_all_rows(self, x: torch.Tensor, send: list[int], receive: list[int]) -> Pending:
        """Of the rows of x, end to end, `send[i]` go to rank i; the result is the `receive[i]` rows that rank i has for this one, in rank order.

        A part without rows travels as one row that nobody looks at: not every backend carries nothing."""
        if self.size == 1:
            return Pending(None, lambda: x)
        parts = [part if n else x.new_zeros(1, *x.shape[1:]) for part, n in zip(x.split(send), send)]
        sent = x.contiguous() if all(send) else torch.cat(parts)
        legs = [max(n, 1) for n in receive]
        received = x.new_empty(sum(legs), *x.shape[1:])
        work = dist.all_to_all_single(received, sent, legs, [max(n, 1) for n in send], group=self.group, async_op=True)
        return Pending(work, lambda: received if all(receive) else torch.cat([part[:n] for part, n in zip(received.split(legs), receive)]))

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        """Sum over the axis, in place once waited for."""
        if self.size == 1:
            return Pending(None, lambda: x)
        assert x.is_contiguous(), "an all-reduce of a view would be lost"
        if not self._orders(x):
            return Pending(dist.all_reduce(x, group=self.group, async_op=True), lambda: x)
        if self._folds(x) and self._whole(x):
            return self._shared_all_reduce(x, "sum", later=True)
        if self._whole(x):
            return Pending(None, lambda: self.all_reduce(x))
        scattered = self.start_reduce_scatter(x.view(-1))
        return Pending(None, lambda: self.all_gather(scattered.wait(), out=x.view(-1)).view_as(x))

    def start_all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> Pending:
        return self._all_gather(x, out, later=True)

    def start_reduce_scatter(self, x: torch.Tensor, dtype: torch.dtype | None = None, out: torch.Tensor | None = None) -> Pending:
        """`dtype`: what travels; the sum has the type of x. `out`: where it goes; this rank's part of x, or apart from x."""
        return self._reduce_scatter(x, dtype, later=True, out=out)

    def _all_gather(self, x: torch.Tensor, out: torch.Tensor | None, later: bool) -> Pending:
        if self.size == 1:
            return Pending(None, lambda: x if out is None or out.data_ptr() == x.data_ptr() else out.copy_(x))
        x = x.contiguous()
        result = x.new_empty(x.shape[0] * self.size, *x.shape[1:]) if out is None else out
        if self._channel:
            return self._exchange("all-gather", x.view(1, -1), result.view(self.size, -1), result, later)
        work = _all_gather(result, x, group=self.group, async_op=True)
        return Pending(work, lambda: result)

    def _reduce_scatter(self, x: torch.Tensor, dtype: torch.dtype | None, later: bool, out: torch.Tensor | None = None) -> Pending:
        if self.size == 1:
            return Pending(None, lambda: x)
        into = (lambda sum_: sum_) if out is None else out.copy_
        sent = x.contiguous() if dtype is None else x.to(dtype)
        if self._folds(x):
            result = x.new_empty(x.shape[0] // self.size, *x.shape[1:]) if out is None else out
            return self._exchange("reduce-scatter", sent.view(self.size, -1), result.view(-1), result, later, "sum")
        if not self._orders(sent):
            result = sent.new_empty(x.shape[0] // self.size, *x.shape[1:])
            return Pending(_reduce_scatter(result, sent, group=self.group, async_op=True), lambda: into(result.to(x.dtype)))
        parts = torch.empty_like(sent)
        work = dist.all_to_all_single(parts, sent, group=self.group, async_op=True)
        return Pending(work, lambda: into(_ordered_sum(parts.view(self.size, -1), x.dtype).view(-1, *x.shape[1:])))

    def _orders(self, x: torch.Tensor) -> bool:
        """Whether a sum is made here, in rank order, and not by the library."""
        return self._ordered or self._narrow and x.dtype in (torch.bfloat16, torch.float16)

    def _whole(self, x: torch.Tensor) -> bool:
        """Whether each rank makes the whole sum, rather than its part of it: where that is little, or as little."""
        return x.numel() < SMALL or x.numel() % self.size > 0 or self.size == 2 and self._channel is not None

    def _folds(self, x: torch.Tensor) -> bool:
        """Whether elements of x can be combined through shared memory."""
        return self._channel is not None and x.dtype != torch.bool and not x.is_complex()

    def _shared_all_reduce(self, x: torch.Tensor, op: str, later: bool) -> Pending:
        return self._exchange("all-reduce", x.view(1, -1), x.view(-1), x, later, op)

    def _exchange(
        self, what: str, x: torch.Tensor, out: torch.Tensor, result: torch.Tensor, later: bool, fold: str | None = None,
        sources: list[int] | None = None,
    ) -> Pending:  # fmt: skip
        """Begins a collective through shared memory, or does it. `out`: the result as rows of the ranks, or as one with `fold`."""
        exchange = Exchange(f"{what} over {self.name}", self.rank, self.size, x.detach(), out.detach(), fold, sources)
        complete = self._channel.start(exchange) if later else self._channel.run(exchange)
        return Pending(complete, lambda: result)

    def send(self, x: torch.Tensor, to: int) -> Pending:
        """Begins to send a contiguous tensor to place `to` of the axis; it may not change before it is waited for."""
        line = self._lines.get(self.ranks[to])
        if line is not None and line.send(x.detach().view(-1)):
            return Pending(None, lambda: x)
        return Pending(dist.isend(x, self.ranks[to], group=self.group), lambda: x)

    def receive(self, buffer: torch.Tensor, source: int) -> Pending:
        """Begins to fill a buffer with what place `source` of the axis sends. Between two places messages keep their order."""
        rank = self.ranks[source]
        line = self._lines.get(rank)
        if line is not None:
            return Pending(line.receive(buffer.view(-1), lambda: dist.recv(buffer, rank, group=self.group)), lambda: buffer)
        return Pending(dist.irecv(buffer, rank, group=self.group), lambda: buffer)

    def start_shift(self, x: torch.Tensor) -> Pending:
        """Sends x to the next place, round the end; the result is what the place before sends, and waits until x has left too."""
        sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        if self._channel:
            source = [(self.rank - 1) % self.size]
            return self._exchange("shift", sent.view(1, -1), received.view(1, -1), received, later=True, sources=source)
        after, before = self.ranks[(self.rank + 1) % self.size], self.ranks[self.rank - 1]
        both = [dist.P2POp(dist.isend, sent, after, self.group), dist.P2POp(dist.irecv, received, before, self.group)]
        works = dist.batch_isend_irecv(both)

        def arrived() -> torch.Tensor:
            for work in works:
                work.wait()
            return received

        return Pending(None, arrived)

    def __repr__(self) -> str:
        return f"Axis({self.name}, {self.rank} of {self.size})"


def _ordered_sum(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum over dim 0 in index order; 16-bit floats are summed in fp32 and rounded once, to `dtype`."""
    wide = torch.promote_types(parts.dtype, torch.float32) if parts.dtype.is_floating_point else parts.dtype
    total = torch.add(parts[0].to(wide), parts[1].to(wide))
    for part in parts[2:]:
        total += part
    return total.to(dtype)


def _group(ranks: tuple[int, ...], world: int) -> dist.ProcessGroup:
    return dist.group.WORLD if len(ranks) == world else dist.new_group(list(ranks), use_local_synchronization=True)


def _timeout() -> float:
    """Seconds that a collective of the default group may take."""
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _share(groups: list[tuple[int, ...]], chain: tuple[int, ...], rank: int) -> tuple[dict[tuple[int, ...], Channel], dict[int, Line], str]:
    """(channels of the groups that share memory, lines to neighbours in the chain by their rank, why there are fewer than there should be)."""
    at = chain.index(rank)
    neighbours = {chain[at - 1], chain[(at + 1) % len(chain)]} - {rank}
    pairs = {other: (max(rank, other), min(rank, other)) for other in neighbours}  # falling, as no group is
    sections, peers, why = shared_connect.connect([*groups, *pairs.values()], rank)
    channels = {ranks: Channel(ranks, rank, sections[ranks], peers, _timeout()) for ranks in groups if ranks in sections}
    return channels, {other: Line(rank, other, sections[pair], peers, _timeout()) for other, pair in pairs.items() if pair in sections}, why


class Mesh:
    """All axes of this rank. `mesh["tensor"]`, `mesh["data", "context"]`."""

    def __init__(
        self, layout: Layout, rank: int = 0, device: torch.device | str = "cpu", *, ordered_sum: bool = True, connect: bool = False,
        axis: Callable[..., Axis] = Axis, shared: bool = True, narrow_sum: bool = False,
    ):  # fmt: skip
        assert not connect or dist.get_world_size() == layout.world, f"{layout} is not for {dist.get_world_size()} processes"
        self.layout, self.rank, self.device = layout, rank, torch.device(device)
        self._axes: dict[tuple[str, ...], Axis] = {}
        # one group for one set of ranks: torch names a group by its ranks, and a second of the same name reads the first one's addresses
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        members = {names: layout.group(rank, names) if self._present(names) else (rank,) for names in GROUPS}
        for ranks in members.values():
            if ranks not in made:
                made[ranks] = _group(ranks, layout.world) if connect and len(ranks) > 1 else None
        channels, lines, self.not_shared = {}, {}, ""  # why ranks of this host that should exchange through shared memory do not
        if connect and shared and ordered_sum and self.device.type == "cpu":
            channels, lines, self.not_shared = _share([ranks for ranks in made if len(ranks) > 1], members[("pipeline",)], rank)
        for names, ranks in members.items():
            more = {"channel": channels[ranks]} if ranks in channels else {}
            more |= {"lines": lines} if names == ("pipeline",) and lines else {}
            self._axes[names] = axis("x".join(names), ranks, ranks.index(rank), made[ranks], ordered_sum, narrow_sum=narrow_sum, **more)

    def _present(self, names: tuple[str, ...]) -> bool:
        """`ends` exists on the first and the last stage alone, the groups of experts where the model has some."""
        if names in EXPERTS and not self.layout.expert:
            return False
        stage = self.layout.coordinate(self.rank, "pipeline")
        return "ends" not in names or stage in (0, self.layout.pipeline - 1)

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        return self._axes[(names,) if isinstance(names, str) else names]

    @property
    def world(self) -> Axis:
        return self["data", "context", "tensor", "pipeline"]

    def coordinate(self, axis: str) -> int:
        return self.layout.coordinate(self.rank, axis)

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.layout.world}: {self.layout.describe()})"
