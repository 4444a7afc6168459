"""Codes, scales and blocks: against the cast of torch element by element, and against what the formats promise."""

import pytest
import torch

from mtmegatron.precision.quantise import (
    LARGEST,
    Cut,
    Grid,
    amax,
    decoded,
    quantise,
    scale_of,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# relative half step between two normal codes, and the smallest step at all (that of the numbers below the smallest normal one)
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
BLOCKS = [(None, None), (1, None), (None, 1), (1, 32), (32, 1), (1, 128), (128, 128), (7, 5)]


def grid_of(x, block, offset=(0, 0)):
    return Grid(*(Cut.of(size, b, o) for size, b, o in zip(x.shape, block, offset)))


def quantised(x, block=(None, None), dtype=E4M3, power_of_two=False):
    grid = grid_of(x, block)
    return quantise(x, grid, scale_of(amax(x, grid), dtype, power_of_two), dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_stands_for_what_torch_says(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    right = codes.double()
    finite = right.isfinite()
    assert torch.equal(decoded(codes, torch.float64)[finite], right[finite])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [(64, 256), (31, 176), (130, 33), (1, 1)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_each_number_is_off_by_half_a_step(dtype, block, power_of_two, size, kind):
    x = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(3).to(kind)
    found = quantised(x, block, dtype, power_of_two)
    values = found.values(torch.float64)
    scale = found.grid.join(found.scale.double()[:, None, :, None].expand(found.grid.split(x).shape))
    slack = 1 + 8 * torch.finfo(found.scale.dtype).eps  # of the scale, its reciprocal and the product
    bound = torch.maximum(x.double().abs() * HALF_STEP[dtype], scale * SMALLEST[dtype] / 2) * slack
    assert bool(((values - x.double()).abs() <= bound).all())


@pytest.mark.parametrize("block", BLOCKS)
def test_each_block_is_scaled_by_its_own_largest_number(block):
    x = torch.randn(64, 256, dtype=torch.float64).exp()
    rows, columns = (b or n for b, n in zip(block, x.shape))
    found = amax(x, grid_of(x, block))
    for i in range(found.shape[0]):
        for j in range(0, found.shape[1], 7):
            assert found[i, j] == x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].max()


def test_the_blocks_are_those_of_the_whole_matrix():
    """A part of a matrix that begins inside a block: with the whole block's maximum its codes are those of the whole."""
    x = torch.randn(4, 300)
    whole = quantised(x, (1, 128))
    part = x[:, 100:260]
    grid = grid_of(part, (1, 128), (0, 100))
    assert (grid.columns.count, grid.columns.padding) == (3, (100, 124))
    found = quantise(part, grid, whole.scale, E4M3)
    assert torch.equal(found.codes.view(torch.uint8), whole.codes[:, 100:260].contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_number_has_the_largest_code(dtype):
    for largest in (1e-30, 0.3, 1.0, 7e4, 3e38):
        found = quantised(torch.tensor([[largest, -largest, largest / 3]]), dtype=dtype)
        assert found.codes.float()[0, :2].tolist() == [LARGEST[dtype], -LARGEST[dtype]]


@pytest.mark.parametrize("power", [-100, -3, 0, 5, 90])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_power_of_two_scales_are_rounded_up(power, dtype):
    """2^ceil(log2(amax / largest)): nothing saturates, and no smaller power would do."""
    exact = LARGEST[dtype] * 2.0**power
    for factor, right in ((1.0, power), (1.0001, power + 1), (1.9, power + 1), (0.51, power)):
        scale = scale_of(torch.tensor([[exact * factor]], dtype=torch.float64), dtype, power_of_two=True)
        assert scale.item() == 2.0**right, (factor, scale)


def test_zeros_have_scale_one_and_stay_zeros():
    found = quantised(torch.zeros(5, 40), (1, 32), power_of_two=True)
    assert found.scale.unique().tolist() == [1.0] and not found.values(torch.float32).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_numbers_too_small_to_scale_do_not_become_infinite(dtype, power_of_two):
    x = torch.tensor([[1e-40, 3e-45, -1e-39, 1e-38]]).to(dtype)
    found = quantised(x, power_of_two=power_of_two)
    assert found.scale.reciprocal().isfinite().all() and found.values(torch.float32).abs().max() <= 2e-38


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", [(None, None), (1, None), (1, 32), (128, 128)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_not_finite_is_not_hidden(bad, dtype, block, power_of_two):
    """The cast to e4m3 makes 448 of an infinity: the whole block is NaN instead, the others are as ever."""
    x = torch.randn(40, 64)
    clean = quantised(x, block, dtype, power_of_two).values(torch.float32)
    x[3, 40] = bad
    values = quantised(x, block, dtype, power_of_two).values(torch.float32)
    assert values[3, 40].isnan()
    spoiled = values.isnan()
    assert torch.equal(values[~spoiled], clean[~spoiled])
    assert int(spoiled.sum()) == {(None, None): 40 * 64, (1, None): 64, (1, 32): 32, (128, 128): 40 * 64}[block]


def test_an_outlier_costs_only_its_block():
    x = torch.full((2, 256), 1e-3)
    x[0, 200] = 1e4
    blocks, tensor = (quantised(x, block).values(torch.float32) for block in ((1, 128), (None, None)))
    assert torch.allclose(blocks[0, :128], x[0, :128], rtol=1e-6) and torch.allclose(blocks[1], x[1], rtol=1e-6)
    assert not tensor[:, :128].any()  # 1e-3 is below half of the smallest code


def test_it_runs_on_the_meta_device():
    x = torch.randn(30, 70, device="meta", dtype=torch.bfloat16)
    for block in BLOCKS:
        assert quantised(x, block, power_of_two=True).values(torch.float32).shape == x.shape
