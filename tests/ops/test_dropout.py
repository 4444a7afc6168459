"""Dropout: its mask against Python's integers and fixed values, its statistics, and the same element in any slicing."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mtmegatron.ops import dropout as module
from mtmegatron.ops.dropout import Stream, dropout, keep_mask, keep_reference
from tests.ops.helpers import each_dtype, leaf

STREAM = Stream(seed=1234, step=7, layer=3, site="residual")
ROWS = torch.arange(1024)
OTHERS = [Stream(1235, 7, 3, "residual"), Stream(1234, 8, 3, "residual"), Stream(1234, 7, 4, "residual")]
OTHERS += [Stream(1234, 7, 3, "embedding"), Stream(1234, 3, 7, "residual"), Stream(-1234, 7, 3, "residual")]
SIGMAS = 4  # of a fixed draw: 1 in 16 thousand fair generators fails one such test


def sigmas(count: int, trials: int, p: float) -> float:
    """How far a count lies from that of fair trials, in standard deviations."""
    return (count - trials * p) / math.sqrt(trials * p * (1 - p))


def scores_of_pairs(kept_RC: torch.Tensor, p: float) -> torch.Tensor:
    """Correlation of every two columns, in standard deviations of that of independent ones."""
    centred = kept_RC.float() - (1 - p)
    scores = centred.mT @ centred / (p * (1 - p) * math.sqrt(len(kept_RC)))
    return scores[tuple(torch.triu_indices(*scores.shape, offset=1))].double()


def assert_independent(kept_RC: torch.Tensor, p: float) -> None:
    """The squares of n scores sum to chi-square of n degrees; Bonferroni's inequality bounds the largest score."""
    scores = scores_of_pairs(kept_RC, p)
    assert abs(scores.square().sum() - len(scores)) <= SIGMAS * math.sqrt(2 * len(scores))
    assert scores.abs().max() <= math.sqrt(2 * math.log(len(scores) / 1e-3))


def test_bits_never_change():
    """Golden: a run resumed in a later version of this file must go on with the same masks."""
    words = [int("".join(str(int(k)) for k in row), 2) for row in keep_mask(STREAM, ROWS[:2], range(64), 0.5)]
    assert STREAM.key == -8940972229656801151
    assert words == [0x2908EE459311B6CA, 0xD49044443A9E14A1]
    assert keep_mask(Stream(0, 0, 0, ""), ROWS[:1000], range(1000), 0.1).sum() == 899920


def test_splitmix64_is_the_published_one():
    """First outputs from seed 0 (Vigna's splitmix64.c, in wide use as test vectors)."""
    key_0 = type("Zero", (), {"key": 0})()
    low, high = module._row_words(key_0, torch.arange(1, 4))
    words = [(h % 2**32) << 32 | lo % 2**32 for lo, h in zip(low.tolist(), high.tolist())]
    assert words == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1 - 2**-10])
def test_mask_is_that_of_unbounded_integers(p):
    """Also at the ends of the ranges, where 32 and 64-bit words wrap around."""
    rows = torch.tensor([0, 1, 77, 2**40 + 1, 2**63 - 1])
    columns = torch.tensor([0, 1, 77, 2**31 - 1, 2**31, 2**32 - 1])
    expected = [[keep_reference(STREAM, r, c, p) for c in columns.tolist()] for r in rows.tolist()]
    assert keep_mask(STREAM, rows, columns, p).tolist() == expected


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_share_of_dropped_elements(p):
    kept = keep_mask(STREAM, ROWS, range(1024), p)
    assert abs(sigmas((~kept).sum().item(), kept.numel(), p)) <= SIGMAS
    for dim in 0, 1:  # rows and columns differ from each other as much as fair ones, no more
        counts = (~kept).sum(dim).double()
        spread = ((counts - 1024 * p).square() / (1024 * p * (1 - p))).sum().item()
        assert abs(spread - 1024) <= SIGMAS * math.sqrt(2 * 1024)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("spacing", [1, 8, 4096, 2**24])
def test_channels_are_independent(p, spacing):
    assert_independent(keep_mask(STREAM, torch.arange(2**15), range(0, 128 * spacing, spacing), p), p)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_channels_of_few_bits_are_independent(p):
    """With a multiplication fewer, the second kind correlates with channel 0, up to 0.4 for bits 31 and 15 alone."""
    columns = [0] + [1 << i for i in range(32)] + [65537 << i for i in range(16)]
    assert_independent(keep_mask(STREAM, torch.arange(2**15), torch.tensor(columns), p), p)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("spacing", [1, 8, 4096, 1 << 40])
def test_tokens_are_independent(p, spacing):
    assert_independent(keep_mask(STREAM, torch.arange(128) * spacing, range(2**15), p).mT, p)


def test_tokens_that_share_half_of_their_bits_are_independent():
    """Among 2^18 tokens about 8 pairs (2^36 / 2^33) have the same low word; a 32-bit hash would repeat their masks."""
    low, _ = module._row_words(STREAM, torch.arange(2**18))
    values, rows = low.sort()
    (places,) = torch.where(values[1:] == values[:-1])
    one, other = (keep_mask(STREAM, rows[at], range(4096), 0.5) for at in (places, places + 1))
    assert len(places) > 0
    assert abs(sigmas((one == other).sum().item(), one.numel(), 0.5)) <= SIGMAS


@pytest.mark.parametrize("field", ["seed", "step", "layer", "site"])
def test_seeds_steps_layers_and_sites_are_independent(field):
    def at(i):
        return Stream(**{"seed": 1, "step": 1, "layer": 1, "site": "residual", field: str(i) if field == "site" else i})

    masks = [keep_mask(at(i), ROWS[:128], range(256), 0.5).flatten() for i in range(64)]
    assert_independent(torch.stack(masks, 1), 0.5)


@pytest.mark.parametrize("dim", [0, 1])
def test_every_pattern_of_eight_neighbours_is_as_frequent(dim):
    kept = keep_mask(STREAM, ROWS, range(1024), 0.5).transpose(0, dim)
    patterns = (kept.reshape(-1, 8).long() << torch.arange(8)).sum(1)
    counts, expected = torch.bincount(patterns, minlength=256).double(), len(patterns) / 256
    chi_square = ((counts - expected).square() / expected).sum().item()
    assert abs(chi_square - 255) <= SIGMAS * math.sqrt(2 * 255)


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_stream_is_another_mask(other):
    """Half of the elements agree, by chance."""
    same = keep_mask(STREAM, ROWS, range(64), 0.5) == keep_mask(other, ROWS, range(64), 0.5)
    assert abs(sigmas(same.sum().item(), same.numel(), 0.5)) <= SIGMAS


def test_digits_of_a_stream_do_not_run_together():
    streams = [Stream(1, 23, 4, "5"), Stream(12, 3, 4, "5"), Stream(1, 2, 34, "5"), Stream(1, 23, 45, "")]
    assert len({stream.key for stream in streams}) == len(streams)


@pytest.mark.parametrize("block", [1, 100, 1 << 16])
def test_any_slice_has_the_elements_of_the_whole(block, monkeypatch):
    whole = keep_mask(STREAM, ROWS, range(300), 0.3)
    monkeypatch.setattr(module, "BLOCK", block)
    some, channels = torch.tensor([5, 1023, 0, 512]), torch.tensor([299, 3, 64])
    assert torch.equal(keep_mask(STREAM, ROWS[256:400], range(100, 200), 0.3), whole[256:400, 100:200])
    assert torch.equal(keep_mask(STREAM, some, channels, 0.3), whole[some][:, channels])
    assert torch.equal(keep_mask(STREAM, ROWS[1:70], range(1, 300, 2), 0.3), whole[1:70, 1::2])
    assert keep_mask(STREAM, ROWS[:0], range(300), 0.3).shape == (0, 300)
    assert keep_mask(STREAM, ROWS, range(0), 0.3).shape == (1024, 0)


@each_dtype
def test_kept_elements_are_scaled_and_others_are_zero(dtype):
    x = leaf(64, 48, dtype=dtype)
    y = dropout(x, STREAM, ROWS[:64], range(48), 0.25)
    keep = keep_mask(STREAM, ROWS[:64], range(48), 0.25)
    assert y.dtype == dtype
    assert torch.equal(y, torch.where(keep, x * (1 / 0.75), 0))


@each_dtype
def test_backward_has_the_mask_of_forward_and_saves_no_activation(dtype):
    x, saved = leaf(64, 48, dtype=dtype), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = dropout(x, STREAM, ROWS[:64], range(48), 0.25)
    y.backward(torch.ones_like(y))
    assert not saved
    assert torch.equal(x.grad != 0, keep_mask(STREAM, ROWS[:64], range(48), 0.25))
    assert torch.equal(x.grad, (x.grad != 0) * torch.full_like(x, 1 / 0.75))


def test_gradients_of_first_and_second_order():
    def function(x):
        return dropout(x, STREAM, ROWS[:5], torch.tensor([9, 0, 4]), 0.4)

    assert torch.autograd.gradcheck(function, leaf(5, 3))
    assert torch.autograd.gradgradcheck(function, leaf(5, 3))


def test_recompute_has_the_same_mask_whatever_was_drawn_before():
    """Recompute with no random state kept, and draws of torch's generator in between (field bug P23)."""

    def block(x):
        return dropout(x.sin(), STREAM, ROWS[:64], range(48), 0.5).square()

    x = leaf(64, 48)
    (plain,) = torch.autograd.grad(block(x).sum(), x)
    y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    torch.rand(17)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain)


def test_torchs_generator_is_not_touched():
    """Ranks that draw unequally often must not drift apart (field bug P22)."""
    before = torch.get_rng_state()
    dropout(leaf(4, 4), STREAM, ROWS[:4], range(4), 0.5).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_no_dropout_is_the_input_itself():
    x = leaf(4, 4)
    assert dropout(x, STREAM, ROWS[:4], range(4), 0.0) is x
    assert keep_mask(STREAM, ROWS, range(64), 0.0).all()


def test_nan_is_not_hidden_by_the_mask():
    x = torch.full((8, 8), torch.nan)
    assert dropout(x, STREAM, ROWS[:8], range(8), 0.5).isnan().all()


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_probability_out_of_range(p):
    with pytest.raises(AssertionError, match="at least 0 and below 1"):
        keep_mask(STREAM, ROWS, range(4), p)


@pytest.mark.parametrize("rows,columns", [(3, 4), (4, 5)])
def test_numbers_must_cover_the_tensor(rows, columns):
    with pytest.raises(AssertionError, match="global number"):
        dropout(leaf(4, 4), STREAM, ROWS[:rows], range(columns), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_on_another_device(dtype):
    x = torch.empty(6, 8, dtype=dtype, device="meta", requires_grad=True)
    y = dropout(x, STREAM, ROWS[:6].to("meta"), range(8), 0.5)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert y.device.type == "meta" and (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, x.device)
