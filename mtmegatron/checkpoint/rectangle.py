"""Rectangles: the pieces that tensors are stored in, and their geometry. Pure: no files.

Notable: `flat_rectangles` is why every flat shard (ZeRO) of a tensor can be stored and read again in any other cut, and
`tiling_fault` proves that the pieces of a tensor leave no hole and no overlap in time near linear in the number of
pieces, so that it can run at every save.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

Ints = tuple[int, ...]

# Names as torch prints them, and the codes of the safetensors format.
DTYPE_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class Box(NamedTuple):
    """A range of every dim: offset[d] <= index[d] < offset[d] + size[d]."""

    offset: Ints
    size: Ints

    def inside(self, shape: Ints) -> bool:
        """Whether it lies within a tensor of that shape."""
        same_dims = len(self.offset) == len(self.size) == len(shape)
        return same_dims and all(0 <= o <= o + n <= s for o, n, s in zip(self.offset, self.size, shape))

    def cut(self, other: "Box") -> "Box | None":
        """The elements in both, or None when there are none. A box of no dims holds one element."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(*self, *other))
        size = tuple(b - a for a, b in zip(low, high))
        return Box(low, size) if all(n > 0 for n in size) else None

    def slices(self, origin: Ints) -> tuple[slice, ...]:
        """Index of this box in a tensor whose first element lies at `origin`."""
        return tuple(slice(a - o, a - o + n) for a, n, o in zip(self.offset, self.size, origin))


@dataclass(frozen=True)
class Rectangle:
    """The part [offset, offset + size) of the tensor `name`, whose global shape and dtype ("bfloat16") are given."""

    name: str
    shape: Ints
    dtype: str
    offset: Ints
    size: Ints

    def __post_init__(self):
        assert Box(self.offset, self.size).inside(self.shape), self
        assert prod(self.size) or not prod(self.shape), f"an empty rectangle of a tensor that is not empty: {self}"
        assert self.dtype in DTYPE_CODES, self

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> "Rectangle":
        shape = tuple(tensor.shape)
        return cls(name, shape, dtype_name(tensor.dtype), (0,) * len(shape), shape)

    @property
    def key(self) -> str:
        """Name in a file: the tensor's own where the rectangle is all of it, as any safetensors reader expects."""
        return self.name if self.size == self.shape else f"{self.name}@{','.join(map(str, self.offset))}"


def flat_rectangles(shape: Ints, start: int, stop: int) -> list[Box]:
    """The boxes that cover elements start <= i < stop of a row-major tensor.

    They come in flat order, and each is a contiguous run of it. At most 2 * dims - 1: for a matrix the end of a row,
    whole rows, the beginning of a row.
    """
    assert 0 <= start <= stop <= prod(shape), (shape, start, stop)
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(shape, first, head, tail)
    boxes = []
    if head:
        boxes += _in_row(shape, first, head, row)
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if tail:
        boxes += _in_row(shape, last, 0, tail)
    return boxes


def _in_row(shape: Ints, row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.size)) for box in flat_rectangles(shape[1:], start, stop)]


def tiling_fault(shape: Ints, boxes: list[Box]) -> str:
    """Where the boxes fail to cover each element exactly once ("hole at (3, 0)", "overlap at (0, 7)"); else "".

    Sweep along dim 0: between two neighbouring bounds of boxes the set of boxes is constant, and must tile the rest of
    the dims.
    """
    if prod(shape) == 0:
        return "" if len(boxes) == 1 else f"{len(boxes)} rectangles for an empty tensor"
    return _sweep(shape, 0, boxes, ())


def _sweep(shape: Ints, dim: int, boxes: list[Box], point: Ints) -> str:
    if len(boxes) == 0:
        return f"hole at {(*point, *(0 for _ in shape[dim:]))}"
    if dim == len(shape):
        return "" if len(boxes) == 1 else f"overlap at {point}"
    bounds = sorted({0, shape[dim], *(b.offset[dim] for b in boxes), *(b.offset[dim] + b.size[dim] for b in boxes)})
    slab_of = {bound: i for i, bound in enumerate(bounds)}
    slabs: list[list[Box]] = [[] for _ in bounds[1:]]
    for box in boxes:
        for i in range(slab_of[box.offset[dim]], slab_of[box.offset[dim] + box.size[dim]]):
            slabs[i].append(box)
    faults = (_sweep(shape, dim + 1, slab, (*point, bound)) for slab, bound in zip(slabs, bounds))
    return next(filter(None, faults), "")
