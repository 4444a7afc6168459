"""Data parallel: flat buckets of parameters and gradients, their reduction, ZeRO 0 to 3, hybrid sharding.

Notable:
- Parameters of a bucket are views of one buffer and their gradient sums views of another; collectives work on the buffers, nothing is copied.
- A bucket has one set of axes over which its gradients are summed (`placement.summed`). So a norm weight under sequence parallel (summed over data
  and tensor), a key/value head held twice, and a tied table on two stages are reduced, sharded and counted by the same lines as all else.
- Each rank of a bucket's axes owns one equal shard of it. The clipping norm is the sum over shards, so every element counts once.
- ZeRO stages differ in what is whole and when (Rajbhandari et al. 2020, 1910.02054): 0 gradients and optimizer state stay whole; 1 the optimizer
  state is a shard; 2 a gradient buffer exists only from the first backward that writes to it until it is reduced into the shard; 3 a value buffer
  exists only while a unit that needs it runs. A buffer that does not exist is a storage of size 0: views of it stay valid and come back with it.
- Hybrid sharding: shards lie inside groups of data ranks, the groups hold copies; a shard's gradient is summed over the copies once per step.
- Buckets are reduced in one fixed order. Those whose axes leave the stage (a tied table) are whole until the end of the step, since the stages
  finish at different times.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mtmegatron.device import flat_zeros
from mtmegatron.layout import share
from mtmegatron.mesh import Axis, Mesh, Pending
from mtmegatron.parallel.canonical.exact import GRADIENT, number
from mtmegatron.parallel.gradient import squared_norm
from mtmegatron.placement import Placement
from mtmegatron.precision.types import Types

ALIGN = 16  # elements: shards begin on cache lines


@dataclass
class Item:
    """A parameter in a bucket: its elements are [start, stop) of the buffer."""

    name: str
    param: nn.Parameter
    start: int
    stop: int

    @property
    def placement(self) -> Placement:
        return self.param.placement


@dataclass
class Bucket:
    """Some parameters with the same summed axes. `axis`: the ranks that share its shards; `copies`: those that hold the same shard;
    `forward_only`: backward does not read the values, so with ZeRO 3 they are not gathered for it.

    `values`, `gradients`: the whole buffers, into which backward adds; `own_values`, `own_sums`: this rank's shard of them, which always exists.
    `reduced`: the gradients that the optimizer gets, of all of the bucket with ZeRO 0, else of the shard; `own_gradients`: of the shard. They are the
    sums themselves, or the numbers that the integers of canonical numerics stand for."""

    axis: Axis
    copies: Axis
    counted: bool
    leaves_stage: bool
    zero: int
    forward_only: bool = False
    units: set[str] = field(default_factory=set)
    items: list[Item] = field(default_factory=list)
    values: Tensor | None = None
    gradients: Tensor | None = None
    own_values: Tensor | None = None
    own_sums: Tensor | None = None
    reduced: Tensor | None = None
    own_gradients: Tensor | None = None
    empty: bool = True  # nothing has been reduced in this step
    adds: bool = False  # what is being reduced is added to the sum so far
    decaying: int = 0  # the first so many elements belong to parameters that decay
    reducing: Pending | None = None
    gathering: Pending | None = None

    @property
    def shard(self) -> slice:
        start, size = share(self.values.numel(), self.axis.size, self.axis.rank)
        return slice(start, start + size)

    @property
    def loose_gradients(self) -> bool:
        """Whether the gradient buffer comes and goes."""
        return self.zero >= 2 and not self.leaves_stage

    @property
    def loose_values(self) -> bool:
        """Whether the value buffer comes and goes."""
        return self.zero >= 3 and not self.leaves_stage

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
        self.values = flat_zeros(total, types.compute, device)
        self.gradients = flat_zeros(total, types.sums, device)
        for item in self.items:
            self._adopt(item)
        self.own_values = self.values[self.shard].clone() if self.loose_values else self.values[self.shard]
        self.own_sums = flat_zeros(total // self.axis.size, types.sums, device) if self.loose_gradients else self.gradients[self.shard]
        sums = self.gradients if self.zero == 0 else self.own_sums
        self.reduced = sums if types.sums == types.gradient else flat_zeros(len(sums), types.gradient, device)
        self.own_gradients = self.reduced[self.shard] if self.zero == 0 else self.reduced
        if self.loose_gradients:
            _release(self.gradients)
        if self.loose_values:
            _release(self.values)

    def _adopt(self, item: Item) -> None:
        param = item.param
        view = self.values[item.start : item.stop].view_as(param)
        view.copy_(param.data)
        param.data = view
        param.grad_sum = self.gradients[item.start : item.stop].view_as(param)
        if param.grad_sum.dtype == param.dtype:
            param.grad = param.grad_sum  # autograd adds in place
        else:
            param.register_post_accumulate_grad_hook(_fold if param.grad_sum.is_floating_point() else _refuse)

    # ---- gradients

    def clear(self) -> None:
        """Gradients of the last step go."""
        (self.own_sums if self.loose_gradients else self.gradients).zero_()
        self.empty = True

    def expect_gradients(self) -> None:
        """Something is about to be added to the sums: the buffer has to exist."""
        if not self.loose_gradients:
            return
        self.finish_reduction()
        if not _exists(self.gradients):
            _bring_back(self.gradients)
            self.gradients.zero_()

    def start_reduction(self, dtype: torch.dtype) -> None:
        if _exists(self.gradients) and self.reducing is None:
            self.adds, self.empty = self.loose_gradients and (not self.empty or self.axis.size == 1), False
            self.reducing = self.axis.start_reduce_scatter(self.gradients, dtype, out=None if self.adds else self.own_sums)

    def finish_reduction(self) -> None:
        """Afterwards the own shard holds the sum of all that was added so far."""
        if self.reducing is None:
            return
        part, self.reducing = self.reducing.wait(), None
        if self.adds:
            self.own_sums += part
        if self.loose_gradients:
            _release(self.gradients)

    def sum_copies(self) -> None:
        """The sum over groups that hold copies of the shard; for ZeRO 0 the whole gradient."""
        self.copies.all_reduce(self.own_sums)
        if self.zero == 0 and self.axis.size > 1:
            self.axis.all_gather(self.own_sums, out=self.gradients)
        if not self.gradients.is_floating_point():
            sums = self.gradients if self.zero == 0 else self.own_sums
            self.reduced.copy_(number(sums, GRADIENT, self.reduced.dtype))

    # ---- values

    def start_gather(self) -> None:
        """Begins to make the whole values from the shards, unless they are there or on their way."""
        if self.loose_values and not _exists(self.values):
            _bring_back(self.values)
            self.gathering = self.axis.start_all_gather(self.own_values, out=self.values)

    def finish_gather(self) -> None:
        self.start_gather()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def drop_values(self) -> None:
        if self.loose_values and _exists(self.values):
            self.finish_gather()
            _release(self.values)


def _exists(buffer: Tensor) -> bool:
    return buffer.untyped_storage().size() > 0


def _release(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(0)


def _bring_back(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())


def _refuse(param: nn.Parameter) -> None:
    assert param.grad is None, "canonical numerics: a function handed a sum of floats to autograd"


def _fold(param: nn.Parameter) -> None:
    """Adds what autograd delivered in a 16-bit type to the wide sum."""
    if param.grad is not None:  # None: the function that used it added to the sum itself
        param.grad_sum.add_(param.grad)
        param.grad = None


class Buckets:
    """All parameters of this rank in flat buckets, in the order in which backward completes them.

    `units`: modules whose parameters are used together, by name, in the order of the forward pass. The model calls `before_forward` and so on
    around each of them; a module whose backward does not read its parameters says so by `forward_only`.
    `buffers`: by name, what belongs to the model's state and has no gradient: whole and equal on every rank of its stage."""

    def __init__(
        self, units: dict[str, list[nn.Module]], names: dict[nn.Parameter, str], mesh: Mesh, types: Types, *, zero: int,
        bucket_bytes: float, overlap: bool, reduce_dtype: torch.dtype | None = None, buffers: dict[str, Tensor] | None = None,
    ):  # fmt: skip
        self.buffers = buffers or {}
        self.mesh, self.zero, self.overlap = mesh, zero, overlap
        self.reduce_dtype = reduce_dtype or types.sums
        self.order = list(units)
        self.buckets = _build(units, names, mesh, types, zero, 0.0 if zero >= 3 else bucket_bytes)
        self.of_unit = {unit: [b for b in self.buckets if unit in b.units] for unit in units}
        self.reduces = True
        self.complete = False  # whether the backward under way completes gradients: the last of a step, or any with ZeRO 2 and 3
        self._left: dict[int, set[str]] = {}

    # ---- around a step

    def start(self, reduces: bool = True) -> None:
        """Clears the gradients of the last step. `reduces`: whether this step sums them over the ranks; else each keeps its part."""
        self.reduces = reduces
        for bucket in self.buckets:
            bucket.clear()
        self._left = {id(bucket): set(bucket.units) for bucket in self.buckets}

    def finish(self) -> None:
        """Completes all reductions of the step; those that leave the stage come last."""
        for bucket in self.buckets if self.reduces else ():
            bucket.start_reduction(self.reduce_dtype)
        for bucket in self.buckets if self.reduces else ():
            bucket.finish_reduction()
            bucket.sum_copies()

    # ---- around the units of a model

    def before_forward(self, unit: str) -> None:
        """Values of the unit have to be there; those of the next are sent for. The head adds to its sums in forward."""
        self._need_values(unit, +1)
        if unit == "head" and torch.is_grad_enabled():
            self.expect(unit)

    def after_forward(self, unit: str) -> None:
        self._drop_values(unit)

    def before_backward(self, unit: str) -> None:
        self._need_values(unit, -1)
        self.expect(unit)

    def after_backward(self, unit: str) -> None:
        """All gradients of the unit for this micro-batch are there, unless some were put off."""
        self._drop_values(unit)
        if self.complete:
            self.unit_done(unit)

    def expect(self, unit: str) -> None:
        """Gradients of the unit are about to be added."""
        for bucket in self.of_unit[unit]:
            bucket.expect_gradients()

    def unit_done(self, unit: str) -> None:
        """Reduces the buckets that this unit completes. All ranks of a bucket run the same units, so they do it in the same order."""
        for bucket in self.of_unit[unit]:
            left = self._left[id(bucket)]
            left.discard(unit)
            if self.reduces and not left and not bucket.leaves_stage and (self.overlap or self.zero >= 2):
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.start_reduction(self.reduce_dtype)
        if self.zero >= 2:
            self._left[id(bucket)] = set(bucket.units)
            for other in self.buckets:  # one buffer on its way beside the one being filled
                if other is not bucket and other.loose_gradients:
                    other.finish_reduction()
        if not self.overlap:
            bucket.finish_reduction()

    def _need_values(self, unit: str, direction: int) -> None:
        if self.zero < 3:
            return
        for bucket in self._read(unit, direction):
            bucket.finish_gather()
        neighbour = self.order.index(unit) + direction
        if self.overlap and 0 <= neighbour < len(self.order):
            for bucket in self._read(self.order[neighbour], direction):
                bucket.start_gather()

    def _read(self, unit: str, direction: int) -> list[Bucket]:
        """Buckets whose values a unit reads, forward (+1) or backward (-1)."""
        return [bucket for bucket in self.of_unit[unit] if direction > 0 or not bucket.forward_only]

    def _drop_values(self, unit: str) -> None:
        if self.zero >= 3:
            for bucket in self.of_unit[unit]:
                bucket.drop_values()

    # ---- sums over all parameters

    def counted_gradients(self) -> list[Tensor]:
        """This rank's shards of which every logical element counts once in a sum over the world."""
        return [b.own_gradients for b in self.buckets if b.counted]

    def scale_gradients(self, factor: float) -> None:
        """Reduced gradients, or this rank's parts of them, times a factor."""
        for bucket in self.buckets:
            (bucket.reduced if self.reduces else bucket.gradients).mul_(factor)

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm; the sum over the world counts every logical element once.

        Without reduction: of the mean over ranks of the squared norm of a rank's gradient, its part times their number."""
        counted = [(b.own_gradients, 1) if self.reduces else (b.gradients, b.axis.size) for b in self.buckets if b.counted]
        parts = [squared_norm(x) * ranks for x, ranks in counted]
        return torch.stack(parts).sum() if parts else torch.zeros((), device=self.mesh.device)

    def zero_gradients(self, below: float) -> Tensor:
        """How many elements of this rank's shards have a gradient of zero, or of at most `below`, which is rounding."""
        count = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        for bucket in self.buckets:
            if bucket.counted:
                used = max(bucket.items[-1].stop - bucket.shard.start, 0)
                count += (bucket.own_gradients[:used].abs() <= below).sum()
        return count

    def not_finite(self) -> bool:
        """Whether any gradient on this rank is infinite or NaN; asked only when looking for a fault."""
        buffers = [b.own_sums for b in self.buckets] + [b.gradients for b in self.buckets if _exists(b.gradients)]
        return not all(bool(torch.isfinite(x).all()) for x in buffers)

    # ---- whole values

    def publish(self) -> None:
        """Every rank updated its shard: makes the values whole where they are kept whole."""
        for bucket in self.buckets:
            if self.zero and not bucket.loose_values and bucket.axis.size > 1:
                bucket.axis.all_gather(bucket.own_values, out=bucket.values)

    def whole_values(self) -> Iterator[Item]:
        """All parameters, one after the other, with their values there while they are looked at or set."""
        for bucket in self.buckets:
            bucket.finish_gather()
            yield from bucket.items
            if bucket.loose_values:
                bucket.own_values.copy_(bucket.values[bucket.shard])
                bucket.drop_values()


def _build(units: dict[str, list[nn.Module]], names: dict[nn.Parameter, str], mesh: Mesh, types: Types, zero: int, bucket_bytes: float) -> list[Bucket]:
    """Walks the units in backward order; a bucket is closed at the end of the unit in which it became large enough."""
    open_buckets: dict[tuple, tuple[Bucket, list]] = {}
    done: list[tuple[Bucket, list]] = []
    home: dict[nn.Parameter, Bucket] = {}
    width = torch.empty((), dtype=types.gradient).element_size()
    for unit, modules in reversed(units.items()):
        for param, spared in [(p, zero >= 3 and getattr(module, "forward_only", False)) for module in modules for p in module.parameters()]:
            if param in home:  # a table that two units use
                home[param].units.add(unit)
                continue
            key = (param.placement.summed, param.placement.copies, spared)
            if key not in open_buckets:
                open_buckets[key] = (_empty(mesh, zero, *key), [])
            bucket, content = open_buckets[key]
            bucket.units.add(unit)
            content.append((names[param], param))
            home[param] = bucket
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


def _empty(mesh: Mesh, zero: int, summed: tuple[str, ...], copies: tuple[str, ...], forward_only: bool) -> Bucket:
    sharing = tuple("data_shards" if axis == "data" else axis for axis in summed)
    counted = all(mesh.coordinate(axis) == 0 for axis in (*copies, "data_copies"))
    return Bucket(mesh[sharing], mesh["data_copies"], counted, "ends" in summed, zero, forward_only)
