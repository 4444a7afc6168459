"""A Bᵀ of matrices with scales in blocks of 128 along the contracted dim, in Triton. Imported only where Triton is there.

Notable: the units sum 128 products of codes, and each such sum is scaled and added in fp32: two levels, as DeepSeek-V3 does on Hopper, whose units
would keep about 14 bits of a longer sum (2412.19437, section 3.3.2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtmegatron.precision.quantise import Quantised

BLOCK = 128


@triton.jit
def _product(
    a, b, a_scale, b_scale, out, m, n, k, a_row, b_row, a_scale_row, b_scale_row, out_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile [ROWS, COLUMNS] of the result; DEPTH is the block of the scales, which COLUMNS divides."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for block in range(0, tl.cdiv(k, DEPTH)):
        place = block * DEPTH + inner
        left = tl.load(a + rows[:, None] * a_row + place[None, :], mask=(rows[:, None] < m) & (place[None, :] < k), other=0.0)
        right = tl.load(b + columns[None, :] * b_row + place[:, None], mask=(columns[None, :] < n) & (place[:, None] < k), other=0.0)
        row_scale = tl.load(a_scale + rows * a_scale_row + block, mask=rows < m, other=0.0)
        tile_scale = tl.load(b_scale + (tl.program_id(1) * COLUMNS // DEPTH) * b_scale_row + block)
        total += tl.dot(left, right) * (row_scale * tile_scale)[:, None]
    tl.store(out + rows[:, None] * out_row + columns[None, :], total, mask=(rows[:, None] < m) & (columns[None, :] < n))


def fits(a: Quantised, b: Quantised) -> bool:
    """Whether A has blocks of 1 x 128 and B of 128 x 128, none of which lies on another rank too."""
    cuts = (a.grid.columns, b.grid.columns, b.grid.rows)
    return a.grid.rows.block == 1 and all(cut.block == BLOCK and cut.first == 0 for cut in cuts) and a.scale.dtype == torch.float32


def blockwise_product(a: Quantised, b: Quantised, tile: tuple[int, int] = (128, 128)) -> Tensor:
    """A Bᵀ in fp32. Shapes: a [M, K], b [N, K] -> [M, N]."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    left, right, left_scale, right_scale = (t.contiguous() for t in (a.codes, b.codes, a.scale, b.scale))
    out = torch.empty(m, n, dtype=torch.float32, device=left.device)
    strides = (t.stride(0) for t in (left, right, left_scale, right_scale, out))
    grid = (triton.cdiv(m, tile[0]), triton.cdiv(n, tile[1]))
    _product[grid](left, right, left_scale, right_scale, out, m, n, k, *strides, ROWS=tile[0], COLUMNS=tile[1], DEPTH=BLOCK)
    return out
