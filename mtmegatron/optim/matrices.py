"""Whole matrices from flat shards and back: who computes which matrix, and what every rank sends for it.

Notable:
- The plan is computed from placements alone, the same on every rank; nothing is asked of others. The ranks of a stage that share one copy of the
  state (data shards x context x tensor) take part; with hybrid sharding each copy does the same work.
- Any split works alike: a rank's rectangle of a matrix, and in it the run of elements that is its shard.
- Matrices go to owners so that the operations are even: the largest first, to whoever has least.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from mtmegatron.layout import share
from mtmegatron.mesh import Mesh
from mtmegatron.parallel.data import ALIGN, Bucket, Buckets
from mtmegatron.placement import Placement

Box = tuple[slice, slice]


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a rank's rectangle of a matrix, which begins at element `first` of the rank's part of the parameter."""

    box: Box
    size: tuple[int, int]
    first: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass
class Matrix:
    """Parameter `name`, or what expert `expert` has of it; pieces by the place of their rank. `given`: each element once; `wanted`: what a rank updates."""

    name: str
    expert: int
    shape: tuple[int, int]
    owner: int = 0
    given: dict[int, Piece] = field(default_factory=dict)
    wanted: dict[int, Piece] = field(default_factory=dict)

    @property
    def operations(self) -> int:
        """Of one step of the iteration."""
        small, large = sorted(self.shape)
        return small * small * (4 * large + 2 * small)


class Parts:
    """This rank's elements of parameters: `add` names some, `of` finds those of a piece."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Tensor, int]] = {}

    def add(self, name: str, first: int, elements: Tensor) -> None:
        """Elements of a parameter's local part, from the first on."""
        self._found[name] = elements, first

    def of(self, matrix: Matrix, piece: Piece) -> Tensor:
        elements, first = self._found[matrix.name]
        return elements[piece.first + piece.start - first : piece.first + piece.stop - first]


class Exchange:
    """Brings the matrices of some parameters, by name, to their owners and what was made of them back."""

    def __init__(self, names: set[str], buckets: Buckets, dtype: torch.dtype):
        self.axis = buckets.mesh["data_shards", "context", "tensor"]
        self.empty = torch.empty(0, dtype=dtype, device=buckets.mesh.device)
        self.matrices = [m for bucket in buckets.buckets for m in _matrices(names, bucket, buckets, self.axis.ranks)]
        _assign(self.matrices, self.axis.size)
        self.own = [m for m in self.matrices if m.owner == self.axis.rank]

    def transform(self, parts: Parts, change: Callable[[list[tuple[Matrix, Tensor]]], None]) -> None:
        """Replaces the elements by those of the matrices that `change` leaves in place of what they make up."""
        rank, everyone = self.axis.rank, range(self.axis.size)
        others = [[m for m in self.matrices if m.owner == other] for other in everyone]
        give = [[(m, m.given[rank]) for m in matrices if rank in m.given] for matrices in others]
        take = [[(m, m.given[other]) for m in self.own if other in m.given] for other in everyone]
        whole = self._joined(self._send(give, take, parts.of))
        change([(m, whole[m.name, m.expert]) for m in self.own])
        give = [[(m, m.wanted[other]) for m in self.own if other in m.wanted] for other in everyone]
        take = [[(m, m.wanted[rank]) for m in matrices if rank in m.wanted] for matrices in others]
        for m, piece, elements in self._send(give, take, lambda m, p: whole[m.name, m.expert][p.box].reshape(-1)[p.start : p.stop]):
            parts.of(m, piece).copy_(elements)

    def _send(
        self, give: list[list[tuple[Matrix, Piece]]], take: list[list[tuple[Matrix, Piece]]], elements: Callable[[Matrix, Piece], Tensor]
    ) -> list[tuple[Matrix, Piece, Tensor]]:  # fmt: skip
        """Sends the elements of pieces `give[i]` to rank i; what comes of the pieces `take[i]` from rank i."""
        sent = torch.cat([self.empty, *(elements(*pair) for row in give for pair in row)])
        counts = [[sum(piece.count for _, piece in row) for row in rows] for rows in (give, take)]
        received = self.axis.start_all_to_all_rows(sent, *counts).wait()
        pairs = [pair for row in take for pair in row]
        return [(*pair, x) for pair, x in zip(pairs, received.split([piece.count for _, piece in pairs]))]

    def _joined(self, arrived: list[tuple[Matrix, Piece, Tensor]]) -> dict[tuple[str, int], Tensor]:
        """The own matrices: the pieces of a rectangle end to end, the rectangles side by side."""
        whole = {(m.name, m.expert): self.empty.new_empty(m.shape) for m in self.own}
        boxes: dict[tuple, Tensor] = {}
        for m, piece, elements in arrived:
            box = boxes.setdefault((m.name, m.expert, piece.box[0].start, piece.box[1].start), elements.new_empty(piece.size))
            box.view(-1)[piece.start : piece.stop] = elements
        for m, piece, _ in arrived:
            whole[m.name, m.expert][piece.box] = boxes[m.name, m.expert, piece.box[0].start, piece.box[1].start]
        return whole


def _matrices(names: set[str], bucket: Bucket, buckets: Buckets, ranks: tuple[int, ...]) -> list[Matrix]:
    """The matrices of a bucket, with the pieces of all ranks."""
    found, layout = {}, buckets.mesh.layout
    for item in bucket.items:
        if item.name in names:
            *experts, rows, columns = item.placement.shape
            found |= {(item.name, e): Matrix(item.name, e, (rows, columns)) for e in range(prod(experts))}
    for place, rank in enumerate(ranks if found else ()):
        starts, total, shard = _lay_out(bucket, buckets.mesh, rank)
        owned = slice(0, total) if buckets.zero == 0 else shard
        for item, start in zip(bucket.items, starts):
            if item.name not in names:
                continue
            counted = all(layout.coordinate(rank, axis) == 0 for axis in item.placement.copies)
            for e, piece in _rectangles(item.placement, buckets.mesh, rank):
                _add(found[item.name, e].wanted, place, piece, owned.start - start, owned.stop - start)
                if counted:
                    _add(found[item.name, e].given, place, piece, shard.start - start, shard.stop - start)
    return list(found.values())


def _lay_out(bucket: Bucket, mesh: Mesh, rank: int) -> tuple[list[int], int, slice]:
    """A rank's part of the bucket: where its parameters begin, its elements, its shard (see `Bucket.fill`)."""
    starts, total = [], 0
    for item in bucket.items:
        starts.append(total)
        total += prod(item.placement.offset_and_size(mesh.layout, rank)[1])
    axes = ["data_shards" if axis == "data" else axis for axis in bucket.items[0].placement.summed]
    group = mesh.layout.group(rank, axes)
    block = ALIGN * len(group)
    total = -(-total // block) * block
    start, size = share(total, len(group), group.index(rank))
    return starts, total, slice(start, start + size)


def _rectangles(placement: Placement, mesh: Mesh, rank: int) -> Iterator[tuple[int, Piece]]:
    """What a rank holds of a parameter: (expert, the whole rectangle of its matrix)."""
    (*skipped, row, column), (*experts, rows, columns) = placement.offset_and_size(mesh.layout, rank)
    box, size = (slice(row, row + rows), slice(column, column + columns)), rows * columns
    for e in range(prod(experts)):
        yield sum(skipped) + e, Piece(box, (rows, columns), e * size, 0, size)


def _add(pieces: dict[int, Piece], place: int, piece: Piece, first: int, last: int) -> None:
    """Notes what of a rectangle lies in elements [first, last) of the parameter's part, if anything does."""
    start, stop = max(first - piece.first, 0), min(last - piece.first, piece.stop)
    if start < stop:
        pieces[place] = replace(piece, start=start, stop=stop)


def _assign(matrices: list[Matrix], ranks: int) -> None:
    """Gives each matrix its owner."""
    load = [0] * ranks
    for matrix in sorted(matrices, key=lambda m: -m.operations):
        matrix.owner = load.index(min(load))
        load[matrix.owner] += matrix.operations
