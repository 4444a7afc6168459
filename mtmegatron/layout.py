"""Where every rank stands: pure arithmetic, no process group, thousands of ranks in no time.

Notable: every axis, also a derived one, is a pair (stride, size): `coordinate = rank // stride % size`, tensor fastest, then context, data,
pipeline. Two further views of the same ranks are just more pairs:

- `key_value` and `key_value_copies` cut the tensor axis when there are fewer key/value heads than tensor ranks;
- `ulysses` and `ring` cut the context axis, `data_shards` and `data_copies` the data axis (hybrid sharding);
- `ends` joins the first and the last pipeline stage, which both hold a tied embedding table;
- `expert_tensor`, `expert` and `expert_data` cut the ranks of a stage anew, whatever tensor, context and data are: experts have a layout of their own.

A group is the set of ranks reached by moving along some axes, so a parameter says everything about its gradient with axis names alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product


@dataclass(frozen=True)
class LayoutAxis:
    """An axis of the grid of ranks: `coordinate(rank) = rank // stride % size`."""

    name: str
    stride: int
    size: int

    def coordinate(self, rank: int) -> int:
        return rank // self.stride % self.size


@dataclass(frozen=True)
class Layout:
    """The parallel degrees of a run, and from them each rank's coordinates and groups.

    `sequence`: between the tensor-parallel blocks each tensor rank holds its part of the tokens.
    `key_value`: into how many parts the key/value heads are cut; the tensor degree, or fewer. `ulysses`: the part of the context degree that
    exchanges heads. `shards`: data ranks that share one sharded copy of the state; default: all. `expert`: ranks that share the experts of a block;
    0: the model has none. `expert_tensor`: ranks that share the matrices of an expert.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    sequence: bool = False
    key_value: int = 0
    ulysses: int = 1
    shards: int = 0
    expert: int = 0
    expert_tensor: int = 1

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world(self) -> int:
        return self.stage * self.pipeline

    @cached_property
    def axes(self) -> dict[str, LayoutAxis]:
        t, c, d, p = self.tensor, self.context, self.data, self.pipeline
        parts, u, shards = self.key_value or t, self.ulysses, self.shards or d
        last, e, et = self.stage * max(p - 1, 1), max(self.expert, 1), self.expert_tensor
        table = [
            ("tensor", 1, t), ("context", t, c), ("data", t * c, d), ("pipeline", self.stage, p),
            ("ulysses", t, u), ("ring", t * u, c // u), ("data_shards", t * c, shards), ("data_copies", t * c * shards, d // shards),
            ("key_value", t // parts, parts), ("key_value_copies", 1, t // parts), ("ends", last, min(p, 2)),
            ("expert_tensor", 1, et), ("expert", et, e), ("expert_data", et * e, self.stage // (et * e)),
        ]  # fmt: skip
        return {name: LayoutAxis(name, stride, size) for name, stride, size in table}

    def coordinate(self, rank: int, axis: str) -> int:
        return self.axes[axis].coordinate(rank)

    def size(self, axes: str | Iterable[str]) -> int:
        total = 1
        for name in _names(axes):
            total *= self.axes[name].size
        return total

    def group(self, rank: int, axes: str | Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` in the given axes alone, in ascending order."""
        chosen = [self.axes[name] for name in _names(axes)]
        base = rank - sum(axis.coordinate(rank) * axis.stride for axis in chosen)
        offsets = product(*(range(0, axis.stride * axis.size, axis.stride) for axis in chosen))
        return tuple(sorted(base + sum(offset) for offset in offsets))

    def describe(self) -> str:
        """One line, as a user would write it: `tensor=2,pipeline=2`."""
        degrees = [("tensor", self.tensor), ("context", self.context), ("pipeline", self.pipeline), ("data", self.data)]
        degrees += [("expert", self.expert), ("expert_tensor", self.expert_tensor)]
        return ",".join(f"{name}={size}" for name, size in degrees if size > 1) or "serial"


def _names(axes: str | Iterable[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Part `index` of `total` things cut in `parts` parts as equal as possible, the larger ones first: (start, size)."""
    base, extra = divmod(total, parts)
    return index * base + min(index, extra), base + (index < extra)
