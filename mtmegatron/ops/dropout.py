"""Dropout whose mask is a pure function of (seed, step, layer, site, global token, channel).

Notable:
- No generator and no state: each element's bits are a hash of where it stands in the run. So the mask is the same in
  every layout, in a recomputed forward, in backward (which hashes again: nothing is saved) and after a resume.
- A stream and a token give 64 well mixed bits, once per row. An element mixes them with its channel in three 32-bit
  multiplications, one half of the row's bits before each of the outer two, so that two rows repeat each other only
  when all 64 agree. The first multiplication is there for channels whose numbers differ by j * 65537: without it they
  were measured to correlate. All of it costs a CPU about half of `torch.rand`, because integer operations vectorise.
- Integers wrap around alike everywhere: the mask has the same bits on every device.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 16  # elements hashed at a time on a CPU: both temporaries stay in its second-level cache
GOLDEN, MIX_1, MIX_2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
SPREAD, MIX_3, MIX_4 = 0x2C1B3C6D, 0x7FEB352D, 0x846CA68B - (1 << 32)  # signed, as torch wants them


@dataclass(frozen=True)
class Stream:
    """One stream of random bits: `step` of the optimizer, `layer` of the model, `site` in the layer ("attention")."""

    seed: int
    step: int
    layer: int
    site: str

    @property
    def key(self) -> int:
        """64 bits, signed, in which another stream differs as if drawn at random."""
        text = f"{self.seed}/{self.step}/{self.layer}/{self.site}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def dropout(x_TC: Tensor, stream: Stream, rows: Tensor, columns: range | Tensor, p: float) -> Tensor:
    """y = x * keep / (1 - p) with keep = `keep_mask(stream, rows, columns, p)`; x itself when p is 0.

    The factor belongs to training, so that evaluation has nothing to do (Srivastava et al. 2014, section 10).

    Shapes: x and result [T, C]; rows [T] and columns [C] as in `keep_mask`.
    """
    assert x_TC.shape == (len(rows), len(columns)), "every row and column of x needs its global number"
    return x_TC if p == 0 else _Dropout.apply(x_TC, stream, rows, columns, p)


def keep_mask(stream: Stream, rows: Tensor, columns: range | Tensor, p: float) -> Tensor:
    """True with probability 1 - p (to 2^-32), each element independently.

    `rows` are global numbers of tokens in the step's whole batch, int64; `columns` are global numbers of channels,
    below 2^32. Any subset of rows and columns, in any order, gets the elements that the whole has there.

    Shapes: rows [T], columns [C] or a range of C; result [T, C], bool.
    """
    assert 0 <= p < 1, f"p is {p}: a probability to drop is at least 0 and below 1"
    if isinstance(columns, range):
        columns = torch.arange(columns.start, columns.stop, columns.step, device=rows.device)
    columns, words = columns.to(torch.int32), _row_words(stream, rows)
    keep = torch.empty(len(rows), len(columns), dtype=torch.bool, device=rows.device)
    height = max(1, BLOCK // max(1, len(columns)) if rows.device.type == "cpu" else len(rows))
    for low, high, out in zip(*(word[:, None].split(height) for word in words), keep.split(height)):
        torch.ge(_element_words(low, high, columns), _lowest_kept(p), out=out)
    return keep


def uniform(stream: Stream, rows: Tensor, columns: range) -> Tensor:
    """Numbers from (0, 1), fp32, of the same bits as `keep_mask`. Shapes: rows [T], columns a range of C; result [T, C]."""
    low, high = (word[:, None] for word in _row_words(stream, rows))
    words = _element_words(low, high, torch.arange(columns.start, columns.stop, dtype=torch.int32, device=rows.device))
    return (_shifted(words, 9).float() + 0.5) * 2.0**-23  # 24 bits with the half: exact


class _Dropout(torch.autograd.Function):
    """A product with a diagonal matrix, so backward is the same function of the gradient."""

    @staticmethod
    def forward(ctx, x, *where):
        ctx.where = where
        return (x * keep_mask(*where)).mul_(1 / (1 - where[-1]))

    @staticmethod
    def backward(ctx, grad):
        return _Dropout.apply(grad, *ctx.where), None, None, None, None


def _lowest_kept(p: float) -> int:
    """The int32 with a share p of all int32 below it."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def _row_words(stream: Stream, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high int32 of splitmix64, started at the stream's key, after `row` steps (Steele, Lea and Flood 2014)."""
    assert rows.dtype == torch.int64, "the mixing of row numbers is 64-bit"
    x = rows * GOLDEN + stream.key
    x = (x ^ _shifted(x, 30)) * MIX_1
    x = (x ^ _shifted(x, 27)) * MIX_2
    x = x ^ _shifted(x, 31)
    return x.to(torch.int32), (x >> 32).to(torch.int32)


def _element_words(low_T1: Tensor, high_T1: Tensor, columns_C: Tensor) -> Tensor:
    """[T, C] int32, mixed for a comparison, that is best in the upper bits (folds and MIX of Wellons' lowbias32)."""
    x = (low_T1 ^ columns_C).mul_(SPREAD)
    space = torch.empty_like(x)
    x.bitwise_xor_(_shifted(x, 16, space)).mul_(MIX_3).bitwise_xor_(high_T1)
    return x.bitwise_xor_(_shifted(x, 15, space)).mul_(MIX_4)


def _shifted(x: Tensor, places: int, out: Tensor | None = None) -> Tensor:
    """x >> places with zeros shifted in: torch repeats the sign."""
    return torch.bitwise_right_shift(x, places, out=out).bitwise_and_((1 << (x.element_size() * 8 - places)) - 1)


def keep_reference(stream: Stream, row: int, column: int, p: float) -> bool:
    """One element of `keep_mask`, in Python's unbounded integers."""
    x = (row * GOLDEN + stream.key) % 2**64
    x = (x ^ x >> 30) * MIX_1 % 2**64
    x = (x ^ x >> 27) * MIX_2 % 2**64
    x ^= x >> 31
    low, high = x % 2**32, x >> 32
    x = (low ^ column) * SPREAD % 2**32
    x = (x ^ x >> 16) * MIX_3 % 2**32 ^ high
    x = (x ^ x >> 15) * MIX_4 % 2**32
    return (x ^ 2**31) - 2**31 >= _lowest_kept(p)
