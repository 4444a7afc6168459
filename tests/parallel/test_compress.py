"""The compressed mean: bits, what a message says, what errors hold back, and that all of it comes in the end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.layout import Layout
from mtmegatron.mesh import Axis, Mesh
from mtmegatron.parallel.compress import (
    CHUNK,
    CompressedMean,
    compress,
    decompress,
    pack,
    unpack,
)

SIZE = 16 * 4 * 37  # of no whole chunk on any number of ranks here


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.lists(st.booleans(), min_size=8, max_size=64))
@settings(max_examples=50, deadline=None)
def test_bits_come_back_from_their_bytes(bits):
    given_ = torch.tensor(bits[: len(bits) // 8 * 8])
    assert pack(given_).dtype == torch.uint8 and pack(given_).numel() * 8 == given_.numel()
    assert torch.equal(unpack(pack(given_)), given_)


def test_every_byte_is_what_its_bits_say():
    packed = pack(torch.tensor([[value >> bit & 1 for bit in range(8)] for value in range(256)]).bool())
    assert packed.flatten().tolist() == list(range(256))


def test_a_message_says_the_nearest_multiple_of_the_signs_of_each_chunk_and_the_rest_is_what_it_left_out():
    y, used = normal(1, 2, 3, CHUNK), torch.rand(2, 3, CHUNK) < 0.7
    used[1, 2] = False
    message, rest = compress(y, used)
    said = torch.cat([decompress(message[i : i + 1], used[i : i + 1], y.dtype) for i in range(2)])
    assert message.shape == (2, 3 * (8 + CHUNK // 8))
    assert torch.equal(said + rest, torch.where(used, y, 0.0)) or (said + rest - torch.where(used, y, 0.0)).abs().max() <= 1e-15
    for row, chunk in ((0, 0), (1, 1)):
        kept = used[row, chunk]
        signs = y[row, chunk][kept].sign()
        best = (y[row, chunk][kept] * signs).mean()  # least squares: <y, signs> / <signs, signs>
        assert torch.allclose(said[row, chunk][kept], best * signs, rtol=1e-14, atol=0)
    assert not said[~used].any() and not rest[~used].any()


def means_rank(rank: int, world: int, steps: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of the compressed mean of a constant of each rank; the right mean; worker and server errors of all ranks, averaged."""
    axis = Mesh(Layout(data=world), rank, connect=True)["data"]
    x, used = normal(rank, SIZE).to(dtype), torch.arange(SIZE) % 5 > 0
    compressed = CompressedMean(axis, x)
    results = torch.stack([compressed.mean(x.clone(), used).clone() for _ in range(steps)])
    right = axis.all_reduce(torch.where(used, x, 0.0)) / world
    left = axis.all_reduce(compressed.worker.clone()) / world + axis.all_gather(compressed.server)
    return results, right, left


@pytest.mark.parametrize("world", [2, 4])
def test_results_are_the_same_bits_on_all_ranks_and_nothing_is_lost(world, pool):
    ranks = pool.run(means_rank, world, 12, torch.float32)
    results, right, left = ranks[0]
    assert all(torch.equal(other, results) for other, _, _ in ranks)
    # what came so far and what is held back add up to what went in: 12 sums of numbers below 16
    total = results.double().sum(0) + left.double()
    assert (total - 12 * right.double()).abs().max() <= 12 * 16 * (world + 3) * torch.finfo(torch.float32).eps
    assert not results[:, ::5].any() and not left[::5].any(), "what takes no part"


def test_the_running_mean_of_a_constant_converges_as_one_over_the_number_of_steps(pool):
    """Once the errors have grown to the size at which they stay: they are of the largest elements, which a scale has to catch up with."""
    results, right, _ = pool.run(means_rank, 2, 1600, torch.float32)[0]
    running = results.double().cumsum(0) / torch.arange(1, 1601).unsqueeze(1)
    errors = [float((running[t - 1] - right).norm() / right.norm()) for t in (10, 400, 1600)]
    assert errors[0] < 0.5 and errors[1] < errors[0] / 8 and errors[2] < errors[1] / 3, errors


class Counted(Axis):
    """An axis that counts the bytes which this rank sends to others."""

    def __init__(self, inner: Axis):
        self.__dict__.update(inner.__dict__)
        self.sent = 0

    def all_to_all(self, x):
        self.sent += x.nbytes * (self.size - 1) // self.size
        return super().all_to_all(x)

    def all_gather(self, x, out=None):
        self.sent += x.nbytes * (self.size - 1)
        return super().all_gather(x, out)


def bytes_rank(rank: int, world: int, size: int) -> tuple[int, int]:
    axis = Counted(Mesh(Layout(data=world), rank, connect=True)["data"])
    CompressedMean(axis, torch.zeros(size)).mean(torch.ones(size), torch.ones(size, dtype=torch.bool))
    return axis.sent, 2 * 4 * size * (world - 1) // world


def test_bytes_on_the_wire_are_a_28th_of_those_of_an_all_reduce_in_fp32(pool):
    (sent, plain), *others = pool.run(bytes_rank, 4, 1 << 16)
    assert all(other == (sent, plain) for other in others)
    assert plain / sent == pytest.approx(32 / (1 + 32 / CHUNK), rel=1e-12)


def test_a_single_rank_sends_nothing_and_rounds_nothing():
    x, used = normal(0, 64), torch.arange(64) > 9
    compressed = CompressedMean(Mesh(Layout())["data"], x)
    assert torch.equal(compressed.mean(x.clone(), used), torch.where(used, x, 0.0))
    assert compressed.worker.numel() == compressed.server.numel() == 0
