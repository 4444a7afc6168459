"""Quantisation to 8-bit floats: the codes, the scale of each block of a matrix, and back.

Notable:
- One function for all recipes: they differ in the sizes of a block alone. Blocks lie on the grid of the whole matrix, not of the part that a rank
  holds, so a block that two ranks share can have one scale. Edges that fill no block are padded inside.
- value = code * scale, scale = max |x| of the block / the largest code; 1 for a block of zeros; rounded up to a power of two for `mxfp8`
  (2^ceil(log2(amax / largest)): rounding down, as OCP's formula does, saturates and diverges; Mishra et al. 2025, 2506.08027).
- A cast would hide an infinity behind the largest code. Here a block with a number that is not finite has a scale of NaN: what is made of it is NaN,
  the step is seen to be faulty and is skipped, without asking the device anything.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
Block = tuple[int | None, int | None]  # elements of a block along each dim; None: all of the whole dim


@dataclass(frozen=True)
class Cut:
    """One dim of a local matrix in blocks: `size` local elements, the first of which is element `first` of its block."""

    size: int
    block: int
    first: int = 0

    @classmethod
    def of(cls, size: int, block: int | None, offset: int = 0) -> "Cut":
        """`offset`: of the local part in the whole dim."""
        return cls(size, max(size, 1)) if block is None else cls(size, block, offset % block)

    @property
    def count(self) -> int:
        return -(-(self.first + self.size) // self.block)

    @property
    def padding(self) -> tuple[int, int]:
        return self.first, self.count * self.block - self.first - self.size


@dataclass(frozen=True)
class Grid:
    """The blocks of a local matrix, or of each of a stack of matrices."""

    rows: Cut
    columns: Cut

    def split(self, x: Tensor) -> Tensor:
        """Shapes: [.., R, C] -> [.., blocks along rows, rows of a block, blocks along columns, columns of a block], padded with zeros."""
        edges = (*self.columns.padding, *self.rows.padding)
        x = F.pad(x, edges) if any(edges) else x
        return x.reshape(*x.shape[:-2], self.rows.count, self.rows.block, self.columns.count, self.columns.block)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        r, c = self.rows, self.columns
        whole = x.reshape(*x.shape[:-4], r.count * r.block, c.count * c.block)
        return whole[..., r.first : r.first + r.size, c.first : c.first + c.size]

    def t(self) -> "Grid":
        return Grid(self.columns, self.rows)


@dataclass(frozen=True)
class Quantised:
    """A matrix as codes [R, C] in an 8-bit type and one scale per block [blocks along rows, blocks along columns]; or a stack of them."""

    codes: Tensor
    scale: Tensor
    grid: Grid

    def values(self, dtype: torch.dtype) -> Tensor:
        """code * scale. Exact for scales that are powers of two, else rounded once."""
        return self.grid.join(self.grid.split(decoded(self.codes, dtype)) * self.scale.to(dtype)[..., :, None, :, None])

    def t(self) -> "Quantised":
        return Quantised(self.codes.mT, self.scale.mT, self.grid.t())

    def __getitem__(self, index: int | slice) -> "Quantised":
        """One matrix of a stack; some rows of a matrix whose rows have scales of their own."""
        codes, scale = self.codes[index], self.scale[index]
        return Quantised(codes, scale, self.grid if isinstance(index, int) else Grid(Cut(len(codes), 1), self.grid.columns))


def amax(x: Tensor, grid: Grid) -> Tensor:
    """max |x| of each local block, at least fp32; infinity where a number is not finite, which a maximum over ranks keeps."""
    found = grid.split(x.abs()).amax((-3, -1)).to(torch.promote_types(x.dtype, torch.float32))
    return found.masked_fill(~found.isfinite(), torch.inf)


def scale_of(largest: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """The scale for blocks whose max |x| is given: at least the smallest normal number, so that its reciprocal is finite; NaN for infinity."""
    scale = largest / LARGEST[dtype]
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1): the power itself is 0.5
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    scale = scale.clamp_min(torch.finfo(scale.dtype).tiny).masked_fill(largest == 0, 1.0)
    return scale.masked_fill(largest.isinf(), torch.nan)


def quantise(x: Tensor, grid: Grid, scale: Tensor, dtype: torch.dtype) -> Quantised:
    """The nearest code of each x / scale, ties to even; what is larger than the largest code becomes that."""
    wide, most = x.to(scale.dtype), LARGEST[dtype]
    codes = (grid.split(wide) * scale.reciprocal()[..., :, None, :, None]).clamp_(-most, most).to(dtype)
    return Quantised(grid.join(codes), scale, grid)


def decoded(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that codes stand for; those for NaN, which only blocks with a scale of NaN have, aside.

    By their bits on a CPU, where the cast is slow: both formats are cut from that of fp16, e4m3 with another bias."""
    if codes.device.type != "cpu":
        return codes.to(dtype)
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    if codes.dtype == torch.float8_e5m2:
        return (bits << 8).view(torch.float16).to(dtype)
    return (bits << 7 & ~(1 << 14)).view(torch.float16).to(dtype) * 2.0**8
