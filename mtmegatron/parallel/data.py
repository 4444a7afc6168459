"""Data parallel: flat buckets of parameters and gradients, their reduction, ZeRO.

Notable:
- Parameters of a bucket are views of one buffer and their gradient sums views of another; collectives work on the buffers, nothing is copied.
- A bucket has one set of axes over which its gradients are summed (`placement.summed`). So a norm weight under sequence parallel (summed over data
  and tensor), a key/value head held twice, and a tied table on two stages are reduced, sharded and counted by the same lines as all else.
- Each rank of a bucket's axes owns one equal shard of it. The clipping norm is the sum over shards, so every element counts once.
- ZeRO stages differ in what is whole: 0 keeps gradients and optimizer state whole on every rank, 1 shards the optimizer state.
- Buckets are reduced in one fixed order; those whose axes leave the stage come last, since the stages finish at different times.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mtmegatron.layout import share
from mtmegatron.mesh import Axis, Mesh, Pending
from mtmegatron.precision.types import Types

ALIGN = 16  # elements: shards begin on cache lines


@dataclass
class Item:
    """A parameter in a bucket: its elements are [start, stop) of the buffer."""

    name: str
    param: nn.Parameter
    start: int
    stop: int


@dataclass
class Bucket:
    """Some parameters with the same summed axes. `values`, `gradients`: flat buffers; `shard`: this rank's part of them."""

    axis: Axis
    counted: bool
    leaves_stage: bool
    units: set[str] = field(default_factory=set)
    items: list[Item] = field(default_factory=list)
    values: Tensor | None = None
    gradients: Tensor | None = None
    decaying: int = 0  # the first so many elements belong to parameters that decay
    pending: Pending | None = None

    @property
    def shard(self) -> slice:
        start, size = share(self.gradients.numel(), self.axis.size, self.axis.rank)
        return slice(start, start + size)

    def fill(self, parameters: list[tuple[str, nn.Parameter]], types: Types) -> None:
        """Lays the parameters out, decaying ones and matrices first, and makes them views of the buffers."""
        order = sorted(parameters, key=lambda np: (not np[1].placement.decay, -np[1].dim()))
        position = 0
        for name, param in order:
            self.items.append(Item(name, param, position, position + param.numel()))
            position += param.numel()
            if param.placement.decay:
                self.decaying = position
        block = ALIGN * self.axis.size
        total = -(-position // block) * block
        device = order[0][1].device
        self.values = torch.zeros(total, dtype=types.compute, device=device)
        self.gradients = torch.zeros(total, dtype=types.gradient, device=device)
        for item in self.items:
            self._adopt(item)

    def _adopt(self, item: Item) -> None:
        param = item.param
        view = self.values[item.start : item.stop].view_as(param)
        view.copy_(param.data)
        param.data = view
        param.grad_sum = self.gradients[item.start : item.stop].view_as(param)
        if param.grad_sum.dtype == param.dtype:
            param.grad = param.grad_sum  # autograd adds in place
        else:
            param.register_post_accumulate_grad_hook(_fold)

    def start_reduction(self) -> None:
        if self.axis.size > 1:
            self.pending = self.axis.start_reduce_scatter(self.gradients)

    def finish_reduction(self, whole: bool) -> None:
        """Afterwards this rank's shard of `gradients` holds the sum; all of it when `whole`."""
        if self.pending is None:
            return
        part, self.pending = self.pending.wait(), None
        if whole:
            self.axis.all_gather(part, out=self.gradients)
        else:
            self.gradients[self.shard].copy_(part)


def _fold(param: nn.Parameter) -> None:
    """Adds what autograd delivered in a 16-bit type to the wide sum."""
    if param.grad is not None:  # None: the function that used it added to the sum itself
        param.grad_sum.add_(param.grad)
        param.grad = None


class Buckets:
    """All parameters of this rank in flat buckets, in the order in which backward completes them."""

    def __init__(self, model: nn.Module, mesh: Mesh, types: Types, *, zero: int, bucket_bytes: float, overlap: bool):
        self.mesh, self.zero, self.overlap = mesh, zero, overlap
        self.buckets = _build(model, mesh, types, bucket_bytes)
        self._waiting: dict[int, set[str]] = {}
        self._next = 0

    def start(self) -> None:
        """Clears the gradients of the last step."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
        self._waiting = {i: set(bucket.units) for i, bucket in enumerate(self.buckets)}
        self._next = 0

    def unit_done(self, unit: str) -> None:
        """All gradients of a unit are there, in the last backward of a step: reduces the buckets that this completes, in order."""
        for waiting in self._waiting.values():
            waiting.discard(unit)
        while self.overlap and self._next < len(self.buckets) and not self._waiting[self._next]:
            if self.buckets[self._next].leaves_stage:
                break
            self.buckets[self._next].start_reduction()
            self._next += 1

    def finish(self) -> None:
        """Completes all reductions."""
        for bucket in self.buckets[self._next :]:
            bucket.start_reduction()
        self._next = len(self.buckets)
        for bucket in self.buckets:
            bucket.finish_reduction(whole=self.zero == 0)

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm; the sum over the world counts every logical element once."""
        wide = torch.promote_types(self.buckets[0].gradients.dtype, torch.float32) if self.buckets else torch.float32
        parts = [torch.linalg.vector_norm(b.gradients[b.shard]).square() for b in self.buckets if b.counted]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=wide, device=self.mesh.device)

    def zero_gradients(self, below: float) -> Tensor:
        """How many elements of this rank's shards have a gradient of zero, or of at most `below`, which is rounding."""
        count = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        for bucket in self.buckets:
            if bucket.counted:
                start, stop = bucket.shard.start, min(bucket.shard.stop, bucket.items[-1].stop)
                count += (bucket.gradients[start : max(start, stop)].abs() <= below).sum()
        return count

    def gather_values(self) -> None:
        """Makes `values` whole again after each rank updated its shard."""
        if self.zero == 0:
            return
        for bucket in self.buckets:
            if bucket.axis.size > 1:
                bucket.axis.all_gather(bucket.values[bucket.shard], out=bucket.values)


def _build(model: nn.Module, mesh: Mesh, types: Types, bucket_bytes: float) -> list[Bucket]:
    """Walks the units in backward order; a bucket is closed at the end of the unit in which it became large enough."""
    open_buckets: dict[tuple, tuple[Bucket, list]] = {}
    done: list[tuple[Bucket, list]] = []
    names = {param: name for name, param in model.named_parameters()}
    width = torch.empty((), dtype=types.gradient).element_size()
    for unit, modules in reversed(model.units().items()):
        for param in [p for module in modules for p in module.parameters()]:
            key = (param.placement.summed, param.placement.copies)
            if key not in open_buckets:
                open_buckets[key] = (_empty(mesh, *key), [])
            bucket, content = open_buckets[key]
            bucket.units.add(unit)
            content.append((names[param], param))
        for key, (_, content) in list(open_buckets.items()):
            if sum(_largest_part(param, mesh) for _, param in content) * width >= bucket_bytes:
                done.append(open_buckets.pop(key))
    done += open_buckets.values()
    done.sort(key=lambda pair: pair[0].leaves_stage)
    for bucket, content in done:
        bucket.fill(content, types)
    return [bucket for bucket, _ in done]


def _largest_part(param: nn.Parameter, mesh: Mesh) -> int:
    """Elements of the largest part of a parameter on any rank, so that all ranks close their buckets at the same unit."""
    return math.prod(param.placement.offset_and_size(mesh.layout, 0)[1])


def _empty(mesh: Mesh, summed: tuple[str, ...], copies: tuple[str, ...]) -> Bucket:
    counted = all(mesh.coordinate(axis) == 0 for axis in copies)
    return Bucket(mesh[summed], counted, "ends" in summed)
