"""Dropout whose mask is a pure function of (seed, step, layer, site, global token, channel).

Notable:
- No generator and no state: each element's bits are a hash of where it stands in the run. So the mask is the same in
  every layout, in a recomputed forward, in backward (which computes it again: nothing is saved) and after a resume.
- A stream and a token give 64 well mixed bits, once per row. An element mixes them with its channel in two 32-bit
  multiply-and-fold rounds, one half of the row's bits before each, so that two rows repeat each other only when all 64
  agree. On a CPU this costs less than half of `torch.rand`, because integer operations vectorise and torch's generator
  does not.
- Integer operations alone, which wrap around alike everywhere: the mask has the same bits on every device.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 16  # elements hashed at a time on a CPU: both temporaries stay in its second-level cache
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, the step between the inputs of splitmix64


@dataclass(frozen=True)
class Stream:
    """One independent stream of random bits: `step` of the optimizer, `layer`, and the `site` within it ("attention")."""

    seed: int
    step: int
    layer: int
    site: str

    @property
    def key(self) -> int:
        """64 bits, signed as torch wants them, that no other stream of the run shares."""
        text = f"{self.seed}/{self.step}/{self.layer}/{self.site}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def dropout(x_TC: Tensor, stream: Stream, rows: Tensor, columns: range | Tensor, p: float) -> Tensor:
    """y = x * keep / (1 - p), keep = `keep_mask(stream, rows, columns, p)`; x itself when p is 0.

    Shapes: x and result [T, C]; rows [T] and columns [C] as in `keep_mask`. Source: Srivastava et al. 2014, scaled in
    training instead of evaluation.
    """
    assert x_TC.shape == (len(rows), len(columns)), "every row and column of x needs its global number"
    return x_TC if p == 0 else _Dropout.apply(x_TC, stream, rows, columns, p)


def keep_mask(stream: Stream, rows: Tensor, columns: range | Tensor, p: float) -> Tensor:
    """True with probability 1 - p, for each element by itself.

    `rows` are global token numbers within the step's global batch, int64; `columns` are global channel numbers below
    2^32. Any subset of rows and columns, in any order, gets the elements that the whole has there.

    Shapes: rows [T], columns [C] or a range of C; result [T, C], bool.
    """
    assert 0 <= p < 1, f"p is {p}: a probability to drop is at least 0 and below 1"
    if isinstance(columns, range):
        columns = torch.arange(columns.start, columns.stop, columns.step, device=rows.device)
    columns, bits = columns.to(torch.int32), _row_bits(stream, rows)
    keep = torch.empty(len(rows), len(columns), dtype=torch.bool, device=rows.device)
    lowest_kept = min(round(p * 2**32), 2**32 - 1) - 2**31
    height = max(1, BLOCK // max(1, len(columns))) if rows.device.type == "cpu" else max(1, len(rows))
    for first, second, out in zip(*(half[:, None].split(height) for half in bits), keep.split(height)):
        torch.ge(_element_bits(first, second, columns), lowest_kept, out=out)
    return keep


class _Dropout(torch.autograd.Function):
    """Linear with a diagonal matrix, so backward is the same function of the gradient."""

    @staticmethod
    def forward(ctx, x, *where):
        ctx.where = where
        return (x * keep_mask(*where)).mul_(1 / (1 - where[-1]))

    @staticmethod
    def backward(ctx, grad):
        return _Dropout.apply(grad, *ctx.where), None, None, None, None


def _row_bits(stream: Stream, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 words per row: splitmix64 of the stream at that row (Steele et al. 2014, constants of Stafford's mix 13)."""
    x = rows * GOLDEN + stream.key
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    x = x ^ _shifted(x, 31)
    return x.to(torch.int32), (x >> 32).to(torch.int32)


def _element_bits(first_T1: Tensor, second_T1: Tensor, columns_C: Tensor) -> Tensor:
    """[T, C] int32 whose upper half is well mixed, which is what a comparison looks at (constants: Wellons, lowbias32)."""
    x = (first_T1 ^ columns_C).mul_(0x2C1B3C6D)
    space = torch.empty_like(x)
    x.bitwise_xor_(_shifted(x, 16, space)).mul_(0x7FEB352D).bitwise_xor_(second_T1)
    return x.bitwise_xor_(_shifted(x, 15, space)).mul_(0x846CA68B - (1 << 32))


def _shifted(x: Tensor, places: int, out: Tensor | None = None) -> Tensor:
    """x >> places with zeros shifted in: torch repeats the sign."""
    return torch.bitwise_right_shift(x, places, out=out).bitwise_and_((1 << (x.element_size() * 8 - places)) - 1)
