"""Learning-rate schedules against golden values, and AdamW against torch's, also over shards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.config.schema import OptimizerConfig
from mtmegatron.optim.schedule import learning_rate, remaining
from tests.field.training import engine_of, joined, parts_of, spread
from tests.tiny import tiny

EPS = torch.finfo(torch.float64).eps
GOLDEN = {"lr": 0.1, "min_lr": 0.001, "warmup": 100, "decay_length": 1000}


def rate(update: int, steps: int = 2000, global_batch: int = 8, **settings_) -> float:
    """The rate of an update, counted from 1."""
    config = tiny(optimizer=settings_, train={"steps": steps, "global_batch": global_batch}, data={"sequence": 4})
    return learning_rate(config, update - 1)


@pytest.mark.parametrize(
    "update, decay, right",
    [
        (1, "linear", 0.001),
        (50, "linear", 0.05),
        (100, "linear", 0.1),
        (500, "linear", 0.056),
        (1000, "linear", 0.001),
        (1500, "linear", 0.001),
        (500, "cosine", 0.0590956),
        (1000, "cosine", 0.001),
        (1500, "cosine", 0.001),
    ],
)
def test_golden_rates(update, decay, right):
    assert rate(update, decay=decay, **GOLDEN) == pytest.approx(right, rel=1e-6 if right == 0.0590956 else 8 * EPS)


def test_o01_the_first_update_is_not_zero_the_peak_is_at_the_end_of_the_warm_up_and_the_last_is_the_floor():
    rates = [rate(update, steps=30, lr=1e-3, warmup=10, min_lr=1e-5) for update in range(1, 31)]
    assert (
        rates[0] == pytest.approx(1e-4, rel=EPS)
        and rates[9] == max(rates) == 1e-3
        and rates[-1] == pytest.approx(1e-5, rel=EPS)
    )
    assert (
        rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True) and len(set(rates)) == 29 + 1
    )


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_without_warm_up_and_with_nothing_but_warm_up(decay):
    assert rate(1, steps=1, lr=1e-3, decay=decay) == (
        1e-3 if decay == "constant" else pytest.approx(0.0, abs=1e-3 * EPS)
    )
    rates = [rate(update, steps=4, lr=1e-3, warmup=4, decay=decay) for update in range(1, 5)]
    assert rates == [pytest.approx(1e-3 * i / 4, rel=EPS) for i in range(1, 5)]


@given(progress=st.floats(0, 1), kind=st.sampled_from(["cosine", "linear", "constant", "polynomial", "wsd"]))
@settings(max_examples=100, deadline=None)
def test_a_decay_stays_between_floor_and_peak_and_falls(progress, kind):
    o = OptimizerConfig(decay=kind)
    now, later = remaining(o, progress), remaining(o, min(progress + 0.01, 1.0))
    assert -EPS <= later <= now + EPS <= 1 + 2 * EPS and remaining(o, 0.0) == 1.0


@given(step=st.integers(1, 100), batch=st.integers(1, 64))
@settings(max_examples=50, deadline=None)
def test_samples_count_as_steps_times_the_batch(step, batch):
    by_steps = rate(step, steps=100, lr=1e-3, warmup=20)
    by_samples = rate(step, steps=100, global_batch=batch, lr=1e-3, warmup=20 * batch, unit="samples")
    assert by_samples == pytest.approx(by_steps, rel=8 * EPS, abs=1e-3 * 8 * EPS)


def updated_rank(rank, world, layout, steps, clip_factor):
    """Weights after updates with gradients drawn from (step, name), and how many elements the moments here have."""
    config = tiny(model={"layers": 1, "bias_qkv": True}, optimizer={"weight_decay": 0.1})
    engine = engine_of(config, layout, rank, world)
    for step in range(steps):
        engine.buckets.start()
        for key, param in engine.model.named_parameters():
            placement = param.placement
            share = placement.part(gradient(key, placement.shape, step), engine.mesh.layout, rank)
            param.grad_sum.copy_(share / engine.mesh["data", "context"].size)
        engine.buckets.finish()
        engine.optimizer.step(1e-2, clip_factor)
    return parts_of(engine), sum(state.tensors["exp_avg"].numel() for state in engine.optimizer.states)


def gradient(key: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + sum(key.encode()))
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def torch_adamw(steps: int, clip_factor: float) -> dict[str, torch.Tensor]:
    engine = engine_of(tiny(model={"layers": 1, "bias_qkv": True}), {})
    weights = {key: torch.nn.Parameter(value) for key, value in joined([parts_of(engine)]).items()}
    decays = {key: engine.model.get_parameter(key).placement.decay for key in weights}
    groups = [
        {"params": [w for key, w in weights.items() if decays[key] == d], "weight_decay": 0.1 * d}
        for d in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    for step in range(steps):
        for key, weight in weights.items():
            weight.grad = gradient(key, tuple(weight.shape), step) * clip_factor
        optimizer.step()
    return {key: weight.detach() for key, weight in weights.items()}


@pytest.mark.parametrize("clip_factor", [1.0, 0.25])
@pytest.mark.parametrize("layout", [{}, {"data": 2}, {"data": 2, "zero": 1}, {"data": 4, "zero": 1}], ids=str)
def test_adamw_is_torchs_on_whole_tensors_and_on_shards(layout, clip_factor, pool):
    ranks = spread(pool, updated_rank, layout, layout, 3, clip_factor)
    found, right = joined([parts for parts, _ in ranks]), torch_adamw(3, clip_factor)
    for key, weight in right.items():
        # three updates of size lr: each a quotient of sums of three terms
        assert (found[key] - weight).abs().max() <= 3 * 64 * EPS * max(1e-2, float(weight.abs().max())), key
    whole = ranks[0][1]
    if layout.get("zero"):
        assert all(count == whole for _, count in ranks)
        ((_, everything),) = spread(pool, updated_rank, {}, {}, 1, 1.0)
        assert everything <= whole * len(ranks) <= everything + 64 * len(ranks) * len(ranks) * 8, (
            "a shard holds its part and padding"
        )


def test_decay_is_relative_to_the_rate_and_takes_no_part_in_the_moments():
    engine = engine_of(tiny(model={"layers": 1}, optimizer={"weight_decay": 0.5}), {})
    before = parts_of(engine)
    engine.buckets.start()
    engine.optimizer.step(0.1, 1.0)
    assert not any(state.tensors["exp_avg"].any() or state.tensors["exp_avg_sq"].any() for state in engine.optimizer.states)
    for key, (_, _, value) in parts_of(engine).items():
        ratio = 0.95 if engine.model.get_parameter(key).placement.decay else 1.0
        assert value == pytest.approx(before[key][2] * ratio, rel=4 * EPS), key


def test_clip_factors_that_are_powers_of_two_only_scale_the_gradient():
    engines = [engine_of(tiny(model={"layers": 1}), {}) for _ in range(2)]
    for engine, (scale, factor) in zip(engines, ((1.0, 0.5), (0.5, 1.0))):
        engine.buckets.start()
        for key, param in engine.model.named_parameters():
            param.grad_sum.copy_(gradient(key, param.placement.shape, 0) * scale)
        engine.optimizer.step(math.pi * 1e-3, factor)
    one, two = (parts_of(engine) for engine in engines)
    assert all((one[key][2] == two[key][2]).all() for key in one)
