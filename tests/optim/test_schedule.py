"""Every schedule against golden values and closed forms, and the ramp of the batch against a run that counts."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.config.ramp import batch_size, batch_sizes, samples_before
from mtmegatron.config.schema import RampConfig, TrainConfig
from mtmegatron.data.loader import micro_batches, sample_numbers
from mtmegatron.optim.schedule import learning_rate, weight_decay
from mtmegatron.verify.protocol import RandomSamples
from tests.field.training import engine_of, lines_of, run, same_bits, state_of
from tests.tiny import tiny

EPS = 2.0**-52
# Megatron's test of its scheduler: 0.01 -> 0.1 in 100 steps, then to 0.001 at 1000
GOLDEN = {"lr": 0.1, "min_lr": 0.001, "warmup": 100, "warmup_from": 0.01, "decay_length": 1000}
WSD = {"lr": 0.1, "min_lr": 0.01, "warmup": 100, "decay": "wsd", "wsd_length": 200, "decay_length": 1000}


def config_of(steps: int = 2000, train: dict | None = None, **optimizer):
    return tiny(optimizer=optimizer, train={"steps": steps} | (train or {}))


def rate(update: int, steps: int = 2000, train: dict | None = None, **optimizer) -> float:
    """Of an update, counted from 1."""
    return learning_rate(config_of(steps, train, **optimizer), update - 1)


@pytest.mark.parametrize(
    "update, decay, right", [(50, "linear", 0.055), (500, "linear", 0.056), (500, "cosine", 0.0590956), (1001, "cosine", 0.001), (2000, "linear", 0.001)]
)
def test_golden_rates_from_a_first_value(update, decay, right):
    assert rate(update, decay=decay, **GOLDEN) == pytest.approx(right, rel=1e-6 if right == 0.0590956 else 8 * EPS)


@pytest.mark.parametrize(
    "update, end, shape, right", [(500, 0.1, "linear", 0.05), (100, 0.1, "linear", 0.01), (500, 0.1, "cosine", 0.05), (1500, 0.1, "cosine", 0.1), (7, None, "linear", 0.0)]
)
def test_golden_weight_decays(update, end, shape, right):
    config = config_of(weight_decay=0.0, weight_decay_end=end, weight_decay_shape=shape, decay_length=1000)
    assert weight_decay(config, update - 1) == pytest.approx(right, rel=8 * EPS)


@pytest.mark.parametrize(
    "shape, middle", [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus-sqrt", 1 - 0.5**0.5)]
)
def test_wsd_is_constant_until_its_last_part(shape, middle):
    found = [rate(update, wsd_shape=shape, **WSD) for update in (50, 100, 101, 800, 900, 1000, 1700)]
    right = [0.05, 0.1, 0.1, 0.1, 0.01 + 0.09 * middle, 0.01, 0.01]
    assert found == pytest.approx(right, rel=32 * EPS)
    falling = [rate(update, wsd_shape=shape, **WSD) for update in range(800, 1001, 10)]
    assert falling == sorted(falling, reverse=True) and len(set(falling)) == len(falling)


def test_inverse_root_continues_the_warm_up_and_stops_at_the_floor():
    settings_ = {"lr": 0.1, "warmup": 100, "decay": "inverse-sqrt"}
    assert [rate(u, **settings_) for u in (100, 400, 1600)] == pytest.approx([0.1, 0.05, 0.025], rel=4 * EPS)
    assert rate(1600, min_lr=0.03, **settings_) == 0.03
    assert rate(4, lr=0.1, decay="inverse-sqrt") == pytest.approx(0.05, rel=4 * EPS)


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial(power):
    found = rate(325, lr=0.1, min_lr=0.01, warmup=100, decay="polynomial", power=power, decay_length=1000)
    assert found == pytest.approx(0.01 + 0.09 * 0.75**power, rel=8 * EPS)


@given(step=st.integers(1, 100), kind=st.sampled_from(["linear", "cosine", "polynomial", "inverse-sqrt"]))
@settings(max_examples=30, deadline=None)
def test_o03_steps_samples_and_tokens_are_the_same_way(step, kind):
    found = [rate(step, steps=100, lr=1e-3, decay=kind, warmup=20 * size, unit=unit) for unit, size in (("steps", 1), ("samples", 8), ("tokens", 8 * 32))]
    assert found[1:] == pytest.approx(found[:1] * 2, rel=64 * EPS, abs=1e-3 * 8 * EPS)


# ---- the batch grows ----


@given(start=st.integers(1, 9), increment=st.integers(1, 9), stages=st.integers(1, 6), samples=st.integers(1, 300))
@settings(max_examples=100, deadline=None)
def test_the_ramp_is_that_of_a_run_that_counts(start, increment, stages, samples):
    last = start + stages * increment
    train = TrainConfig(global_batch=last, ramp=RampConfig(start=start, increment=increment, samples=samples))
    seen = 0
    for step in range(60):
        reached = min(seen * stages // samples, stages)  # Megatron: increments = consumed // (samples / stages)
        assert (batch_size(train, step), samples_before(train, step)) == (start + reached * increment, seen)
        seen += start + reached * increment
    assert batch_sizes(train) == list(range(start, last + 1, increment))


RAMP = {"start": 2, "increment": 2, "samples": 12}


@pytest.mark.parametrize("data", [1, 2])
def test_samples_come_once_each_in_order_and_noise_counts_within_the_batch(data):
    engine = engine_of(tiny(train={"ramp": RAMP, "micro_batch": 1}), {"data": data, "micro_batch": 1})
    config, seen = engine.config, []
    for step in range(8):
        dealt = [numbers for rank in range(data) for numbers in sample_numbers(config, rank, step)]
        assert len(dealt) == batch_size(config.train, step)
        seen += sorted(sum(dealt, []))
    assert seen == list(range(len(seen)))


def test_a_rate_in_samples_follows_the_smaller_batches():
    train = {"ramp": RAMP}
    before = [samples_before(config_of(train=train).train, step) for step in range(9)]
    rates = [rate(step, train=train, lr=1.0, warmup=1000, unit="samples") for step in range(1, 9)]
    assert rates == pytest.approx([n / 1000 for n in before[1:]], rel=4 * EPS) and before[1:4] == [2, 4, 8]


def test_a_run_with_a_ramp_resumes_exactly_and_in_another_layout(pool, tmp_path):
    config = tiny(
        model={"layers": 1}, train={"ramp": RAMP, "micro_batch": 1, "steps": 6, "eval_batches": 1}, optimizer={"unit": "tokens", "warmup": 200, "decay": "linear"},
        checkpoint={"every": 2},
    )  # fmt: skip
    run(pool, config, {"data": 2}, tmp_path / "whole")
    run(pool, config, {"data": 2}, tmp_path / "cut", stop=3)
    run(pool, config, {"data": 2}, tmp_path / "cut")
    assert same_bits(state_of(tmp_path / "cut", 6), state_of(tmp_path / "whole", 6))
    lines = [line for line in lines_of(tmp_path / "whole") if "loss" in line]
    assert [line["samples"] for line in lines] == [samples_before(config.train, step) for step in range(1, 7)] == [2, 4, 8, 14, 22, 30]
    run(pool, config, {}, tmp_path / "one")
    single = [line for line in lines_of(tmp_path / "one") if "loss" in line]
    assert [line["lr"] for line in single] == [line["lr"] for line in lines] and math.isfinite(single[-1]["loss"])
    assert [line["loss"] for line in single] == pytest.approx([line["loss"] for line in lines], rel=1e3 * 2.0**-23)


def test_numbers_of_tokens_begin_at_0_in_every_step():
    engine = engine_of(tiny(train={"ramp": RAMP, "micro_batch": 1}), {"micro_batch": 1})
    samples = RandomSamples(259, 32, 0)
    for step in (0, 2, 7):
        numbers = [int(n) for batch in micro_batches(engine.config, samples, engine.mesh, step) for n in batch.numbers]
        assert numbers == list(range(32 * batch_size(engine.config.train, step)))
