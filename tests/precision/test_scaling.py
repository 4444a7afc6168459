"""The loss scale: when exactly it changes, and that it stops a run which it cannot help."""

import pytest

from mtmegatron.config.schema import LossScaleConfig
from mtmegatron.errors import UserError
from mtmegatron.precision.scaling import LossScale


def scale(**settings):
    return LossScale.of(LossScaleConfig(**settings))


def test_it_grows_after_exactly_so_many_good_steps():
    found = scale(initial=8, interval=3)
    history = []
    for _ in range(7):
        found.succeeded()
        history.append(found.scale)
    assert history == [8, 8, 16, 16, 16, 32, 32]


def test_an_overflow_begins_the_count_anew():
    found = scale(initial=8, interval=3, hysteresis=2)
    for event in (found.succeeded, found.succeeded, found.overflowed, found.succeeded, found.succeeded):
        event()
    assert (found.scale, found.good) == (8, 2)
    found.succeeded()
    assert found.scale == 16


def test_the_overflow_of_the_hysteresis_and_each_after_it_lower_the_scale_until_it_grows():
    found = scale(initial=64, interval=2, hysteresis=3)
    history = []
    for _ in range(5):
        found.overflowed()
        history.append(found.scale)
    assert history == [64, 64, 32, 16, 8]
    found.succeeded()
    found.overflowed()  # good steps that are too few to grow do not forgive
    assert found.scale == 4
    found.succeeded()
    found.succeeded()
    assert (found.scale, found.overflows) == (8, 0)
    found.overflowed()
    assert found.scale == 8


def test_at_the_minimum_an_overflow_stops_the_run():
    """DeepSpeed#697: reducing the scale from 1 to 1 for ever."""
    found = scale(initial=8, minimum=2, hysteresis=1, backoff=0.25)
    found.overflowed()
    assert found.scale == 2  # not below the minimum
    with pytest.raises(UserError, match="minimum: 2.*use train.precision bf16"):
        found.overflowed()


def test_its_state_is_all_of_it():
    """transformers#34053 and others: scale, good steps and used hysteresis come back, in a used object too."""
    found = scale(initial=256, interval=5)
    for event in (found.overflowed, found.succeeded, found.succeeded, found.succeeded):
        event()
    other = scale(initial=256, interval=5)
    for _ in range(4):
        other.overflowed()
    other.load(found.state)
    assert other == found and found.state == {"scale": 256, "good": 3, "overflows": 1}
    for one in (found, other):
        one.succeeded(), one.succeeded()
    assert other == found and other.scale == 512
