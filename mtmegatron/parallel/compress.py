"""A mean over an axis that sends one bit for each number, and keeps what it left out for the next time.

Notable:
- y becomes scale * sign(y), with one scale for each chunk of 256: the mean of |y| there, the best of all multiples of these signs. What that
  leaves out is added to the next y (error feedback; Karimireddy et al. 2019, 1901.09847, algorithm 2): it is late, never lost, and the mean of T
  results differs from the mean of T inputs by a part that falls as 1/T.
- Two phases, as a reduce-scatter and an all-gather (Tang et al. 2021, 2102.02888, section 4.2): each rank sends the signs of part i to rank i, which
  takes their mean, compresses it again with an error of its own, and sends that to all. All ranks end with the same bits.
- Elements that no rank uses are told apart by a mask that all ranks know: a bit cannot say zero, and a scale must not count them.
- Packing is a product: of eight bytes of 0 or 1, read as one integer, it brings all bits together in the highest byte; unpacking is the way back.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtmegatron.mesh import Axis

CHUNK = 256  # elements with a scale of their own: 36 bytes for 1024 in fp32
_GATHER = 0x0102040810204080  # brings bit 0 of byte j to bit 56 + j
_SPREAD, _PICK = 0x0101010101010101, 0x8040201008040201 - (1 << 64)  # a byte eight times; bit j of byte j


def pack(bits: Tensor) -> Tensor:
    """Bytes of eight booleans each. Shapes: [.., 8 n] -> [.., n]."""
    return ((bits.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """The booleans that `pack` was given. Shapes: [.., n] -> [.., 8 n]."""
    return ((packed.to(torch.int64) * _SPREAD) & _PICK).view(torch.uint8) != 0


def compress(y: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """(message, what it says): the bytes of scales and signs of each row, and y - what it says, which is 0 where not `used`.

    Shapes: y, used, the rest [rows, chunks, 256] -> message [rows, chunks x (size of a scale + 32)]."""
    y = torch.where(used, y, 0.0)
    positive = y >= 0
    scales = y.abs().sum(-1) / used.sum(-1).clamp(min=1)
    message = torch.cat([scales.view(torch.uint8), pack(positive).flatten(1)], 1)
    return message, y.sub_(_decoded(positive, scales, used))


def decompress(message: Tensor, used: Tensor, dtype: torch.dtype) -> Tensor:
    """What messages say, one in a row; `used` of one row serves all. Shapes: [rows, bytes] -> [rows, chunks, 256]."""
    rows, chunks = message.shape[0], used.shape[1]
    head = chunks * dtype.itemsize
    scales = message[:, :head].contiguous().view(dtype)
    return _decoded(unpack(message[:, head:].reshape(rows, chunks, -1)), scales, used)


def _decoded(positive: Tensor, scales: Tensor, used: Tensor) -> Tensor:
    """Products, which take a third of the time of choices between two scales."""
    return positive.to(scales.dtype).mul_(2).sub_(1).mul_(scales.unsqueeze(-1)).mul_(used)


class CompressedMean:
    """The mean over an axis of flat tensors of one size, a multiple of the axis's, with the errors that it keeps.

    `worker`: what this rank's messages left out so far; `server`: what those about its own part of the mean did. Where the axis has one rank
    nothing is compressed, and there are no errors."""

    def __init__(self, axis: Axis, like: Tensor):
        self.axis = axis
        several = axis.size > 1
        self.worker = torch.zeros_like(like) if several else like.new_zeros(0)
        self.server = like.new_zeros(like.numel() // axis.size if several else 0)

    def mean(self, x: Tensor, used: Tensor) -> Tensor:
        """About the mean of x over the axis, 0 where not `used`, which must be equal on all ranks. Overwrites x."""
        axis = self.axis
        if axis.size == 1:
            return x.mul_(used)
        mask = self._chunks(used)
        message, rest = compress(self._chunks(x.add_(self.worker)), mask)
        self.worker.view(axis.size, -1).copy_(self._flat(rest))
        mine = mask[axis.rank : axis.rank + 1]
        total = self._total(axis.all_to_all(message), mine, x.dtype)
        message, rest = compress(total.div_(axis.size) + self._chunks(self.server, 1), mine)
        self.server.view(1, -1).copy_(self._flat(rest))
        x.view(axis.size, -1).copy_(self._flat(decompress(axis.all_gather(message), mask, x.dtype)))
        return x

    def _total(self, messages: Tensor, used: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of what messages say, in rank order, one unpacked at a time."""
        total = decompress(messages[:1], used, dtype)
        for message in messages[1:].split(1):
            total += decompress(message, used, dtype)
        return total

    def _chunks(self, x: Tensor, rows: int | None = None) -> Tensor:
        """One row for each rank's part, or so many, filled up to whole chunks. Shapes: [n] -> [rows, chunks, 256]."""
        x = x.view(rows or self.axis.size, -1)
        return pad(x, (0, -x.shape[1] % CHUNK)).view(x.shape[0], -1, CHUNK)

    def _flat(self, chunks: Tensor) -> Tensor:
        """Rows without what filled them up. Shapes: [rows, chunks, 256] -> [rows, n / ranks]."""
        return chunks.flatten(1)[:, : self.server.numel()]

    def clear(self) -> None:
        """Forgets the errors."""
        self.worker.zero_()
        self.server.zero_()
