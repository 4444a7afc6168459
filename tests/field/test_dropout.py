"""Dropout under parallelism as users met it: masks that drift apart, repeat on every rank, draw from shared state.

tests/ops/test_dropout.py covers the masks themselves; the cross product (tests/parity) the gradients of all layouts."""

import math

import pytest
import torch

from mtmegatron.batch import Bounds
from mtmegatron.layers.attention import Where
from mtmegatron.layers.dropout import Noise
from mtmegatron.verify.protocol import batches, world_of
from tests.field.training import engine_of, joined, largest_difference, name, parts_of, spread
from tests.tiny import tiny

SMALL = {"model": {"layers": 2}}
RATE = 0.5
DROPPING = {"model": {"layers": 2, "dropout_embedding": 0.1, "dropout_attention": 0.1, "dropout_residual": 0.1}}


def residual_masks(layout: dict) -> list[torch.Tensor]:
    """On each rank of a layout, what residual dropout keeps of the first micro-batch, [T', D]."""
    masks = []
    for rank in range(world_of(layout)):
        engine = engine_of(tiny(SMALL), layout, rank)
        numbers = batches(engine, 0)[0].numbers
        ones = torch.ones(len(numbers) // (engine.build.tensor.size if engine.mesh.layout.sequence else 1), 64)
        masks.append(Noise(7, 0, numbers).drop(ones, 1, "mlp out", RATE, engine.build) != 0)
    return masks


def assert_rate(kept: torch.Tensor) -> None:
    """Within 5 standard deviations of a coin; those of this file are below the 0.02 of the report."""
    assert abs(kept.double().mean() - (1 - RATE)) < 5 * math.sqrt(RATE * (1 - RATE) / kept.numel())


def test_p21_tensor_ranks_with_all_tokens_drop_the_same():
    one, two = residual_masks({"tensor": 2, "sequence": False})
    assert torch.equal(one, two)
    assert torch.equal(one, *residual_masks({}))
    assert_rate(one)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"context": 2}, {"data": 2}, {"tensor": 2, "context": 2}], ids=name)
def test_p21_ranks_with_other_tokens_drop_others(layout):
    masks = residual_masks(layout)
    for i, one in enumerate(masks):
        for two in masks[:i]:
            agreement = (one == two).double().mean()
            assert abs(agreement - 0.5) < 5 * math.sqrt(0.25 / one.numel())  # as two independent coins
    assert_rate(torch.cat(masks))


def attention_masks(layout: dict) -> list[torch.Tensor]:
    """On each tensor rank, what attention keeps: [T, N, T], by values that name their key and equal scores."""
    masks, tokens = [], 64
    for rank in range(world_of(layout)):
        engine = engine_of(tiny(SMALL, {"model": {"dropout_attention": RATE}}, data={"sequence": tokens}), layout, rank)
        attention = engine.model.layers["1"].attention
        query, key = torch.zeros(tokens, attention.heads, 16), torch.zeros(tokens, attention.kv_heads, 16)
        value = torch.eye(tokens)[:, None].expand(-1, attention.kv_heads, -1)
        noise = Noise(7, 0, torch.arange(tokens))
        out = attention._attend(query, key, value, Where(Bounds.equal(1, tokens), tokens, noise=noise))
        masks.append((out != 0).transpose(0, 1)[:, torch.ones(tokens, tokens).tril() > 0])
    return masks


@pytest.mark.parametrize("sequence", [True, False])
def test_p21_heads_on_other_ranks_drop_others(sequence):
    (whole,) = attention_masks({})
    assert torch.equal(torch.cat(attention_masks({"tensor": 2, "sequence": sequence})), whole)
    for i, one in enumerate(whole):
        for two in whole[:i]:
            assert abs((one == two).double().mean() - 0.5) < 5 * math.sqrt(0.25 / one.numel())
    assert_rate(whole)


def trained(rank: int, world: int, layout: dict, steps: int):
    """Weights after some steps with dropout, losses and norms, and whether the global generator was touched."""
    engine = engine_of(tiny(DROPPING, train={"global_batch": 4}), layout, rank, world)
    torch.manual_seed(rank)
    before, results, untouched = torch.get_rng_state(), [], True
    for step in range(steps):
        result = engine.step(batches(engine, step), step)
        results.append((result.loss, result.grad_norm))
        untouched = untouched and torch.equal(torch.get_rng_state(), before)
    return parts_of(engine), results, untouched


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 2, "sequence": False}], ids=name)
def test_p21_p22_replicas_stay_equal_for_twenty_steps_and_nobody_draws_from_the_global_generator(layout, pool):
    steps = 20
    ((right, expected, _),) = spread(pool, trained, {}, {}, steps)
    ranks = spread(pool, trained, layout, layout, steps)
    assert all(untouched for _, _, untouched in ranks)
    assert ranks[0][1] == ranks[1][1]  # losses and norms, bit for bit
    # `joined` asserts that copies have the same bits. Each step moves a weight by at most lr = 1e-2, and where its
    # gradient is near zero, Adam's 1e-8 turns rounding of 64 units into a part of that (as in test_parallel.py)
    bound = steps * 1e-2 * 64 * torch.finfo(torch.float64).eps / 1e-8
    assert largest_difference(joined([parts for parts, _, _ in ranks]), joined([right])) < bound
    assert [loss for loss, _ in ranks[0][1]] == pytest.approx([loss for loss, _ in expected], abs=bound)


def test_p22_evaluation_drops_nothing_and_steps_drop_anew():
    engine = engine_of(tiny(DROPPING, train={"global_batch": 4}), {})
    mine = batches(engine, 0)
    tokens = engine.count_tokens(mine)
    still = engine_of(tiny({"model": {"layers": 2}}, train={"global_batch": 4}), {})
    assert engine.evaluate(mine) == still.evaluate(mine)
    losses = [engine.gradients(mine, tokens, step)[0] for step in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]
