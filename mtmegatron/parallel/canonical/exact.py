"""Sums that do not depend on their order, and the blocks that no layout cuts.

Notable:
- `integers(x, bits)` is round(x * 2^bits) as int64. Integers add up exactly, whatever the order, and wrap around harmlessly on the way, as long as
  the whole sum fits: 2^(63 - bits).
- A number that does not fit, or is not finite, cannot be on the grid: it counts as zero and spoils the step, which the engine then reports as it
  reports a gradient that is not finite.
- A matrix product with the same operands of the same shapes has the same bits. So a product is cut where any layout may cut it: into `blocks` parts
  along a split dimension and into chunks of tokens along a sequence, in every layout alike.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mtmegatron.layout import share
from mtmegatron.mesh import Axis

GRADIENT = 55  # bits after the point of gradients: up to 128, in steps of 3e-17
ACTIVATION = 40  # of activations: up to 4 million, in steps of 1e-12
LOSS = 30  # of summed losses: up to 8e9, in steps of 1e-9
SQUARE = 30  # of squares, in each of two limbs


@dataclass
class Exact:
    """`blocks`: parts of each split dimension; `chunk`: tokens of a sequence that one product takes; `spoiled`: whether a number of this step did
    not fit on the grid."""

    blocks: int
    chunk: int
    spoiled: bool = False

    def integers(self, x: Tensor, bits: int) -> Tensor:
        """round(x * 2^bits), int64; 0 where it does not fit."""
        scaled = x.to(torch.float64, copy=True).mul_(2.0**bits)
        fits = scaled.abs() < 2.0**62  # false for NaN
        if not x.is_meta and not bool(fits.all()):
            self.spoiled = True
            scaled.masked_fill_(~fits, 0.0)
        return scaled.round_().to(torch.int64)

    def cells(self, total: int, start: int, size: int) -> list[slice]:
        """The parts of [start, start + size) of a dimension of `total`, cut wherever a degree that divides `blocks` cuts it; relative to start."""
        degrees = [d for d in range(1, self.blocks + 1) if self.blocks % d == 0]
        cuts = {share(total, degree, part)[0] for degree in degrees for part in range(degree)}
        inside = sorted(cut - start for cut in cuts if start < cut < start + size)
        return [slice(a, b) for a, b in pairwise([0, *inside, size]) if b > a]

    def chunks(self, tokens: int) -> list[slice]:
        """Whole sequences, or a context rank's parts of them, as chunks of tokens."""
        assert tokens % self.chunk == 0, f"{tokens} tokens are not whole chunks of {self.chunk}"
        return [slice(first, first + self.chunk) for first in range(0, tokens, self.chunk)]


def number(total: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The number that a sum of integers stands for, rounded to a type."""
    return total.to(torch.float64).mul_(2.0**-bits).to(dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32, of operands that lie alike in memory whatever they were cut from."""
    return packed(a) @ packed(b)


def packed(x: Tensor) -> Tensor:
    """A copy in fp32, contiguous and aligned."""
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def sum_of_squares(parts: list[Tensor], axis: Axis) -> Tensor:
    """The sum of the squares of all elements on all ranks of an axis, fp64, whatever the ranks' parts.

    The largest element comes first: squares relative to it, in [0, 1], are split in two limbs of SQUARE bits, each summed as integers."""
    device = parts[0].device if parts else "cpu"
    tops = [part.abs().amax().to(torch.float64) for part in parts if part.numel()]
    top = axis.all_reduce(torch.stack(tops).amax().reshape(1) if tops else torch.zeros(1, dtype=torch.float64, device=device), "max")
    limbs = torch.zeros(2, dtype=torch.int64, device=device)
    for part in parts:
        square = (part.to(torch.float64) / top.where(top > 0, 1.0)).square_()
        high = (square * 2.0**SQUARE).round_()
        low = ((square - high * 2.0**-SQUARE) * 4.0**SQUARE).round_()
        limbs += torch.stack([high.to(torch.int64).sum(), low.to(torch.int64).sum()])
    high, low = axis.all_reduce(limbs).to(torch.float64)
    return (high * 2.0**-SQUARE + low * 4.0**-SQUARE) * top.square()[0]
