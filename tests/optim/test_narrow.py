"""First moments in fp8: codes and their rounding, scales that bound an update, checkpoints of other runs, loss, memory. Layouts and resume are in
test_moments.py, beside those of moments in bf16."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import save
from mtmegatron.config.constraints import faults
from mtmegatron.config.schema import OptimizerConfig
from mtmegatron.models.stages import parameters_of
from mtmegatron.optim.codes import FP8, coded, largest, scale_for
from mtmegatron.optim.elementwise import ELEMENTWISE, Numbers
from mtmegatron.optim.narrow import draws, momentum_limit
from mtmegatron.plan.account import account
from mtmegatron.plan.collectives import record_step
from tests.field.training import contents, engine_of, same_bits, spread
from tests.optim.test_moments import SMALL, after_updates, losses, passed_on
from tests.tiny import tiny

EIGHT = {"moments": "fp8"}
BARE = EIGHT | {"masters": False}
CODES = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(FP8)
HELD = CODES[~CODES.float().isnan()]  # torch's cast is the judge of what a code means


# ---- codes ----


def test_codes_stay_as_they_are():
    for bits in (0, 1, 0x8000, 0xFFFF, -1):
        for x in (HELD.float(), HELD.double()):
            found = coded(x, torch.full((254,), bits))
            assert torch.equal(found.float(), HELD.float())


@pytest.mark.parametrize("x", [1.0 + 0.3 / 8, -417.0, 0.015625 * 0.9 + 0.0019, 0.0078125 * 1.01, -0.00195 / 3, 1e-5, 0.0156249])
def test_a_number_is_rounded_to_its_neighbours_and_right_in_the_mean(x):
    n = 1 << 16
    found = coded(torch.full((n,), x), draws(7, torch.arange(n))).double()
    low, high = sorted(found.unique().tolist())
    held = sorted(set(HELD.double().tolist()))
    assert low < x < high and held.index(high) == held.index(low) + 1
    # 16 bits leave the probability open by half of 2^-16; five standard deviations of a mean of n draws
    p = (x - low) / (high - low)
    assert abs(float(found.mean()) - x) <= (high - low) * (2**-17 + 5 * (p * (1 - p) / n) ** 0.5)


def test_all_65536_draws_round_up_as_often_as_they_should():
    bits = torch.arange(1 << 16)
    for x in (3.3, 0.0041, 250.0, 1 + 16015 * 2.0**-23):  # the last is nearly one of 65536 steps further than they tell
        found = coded(torch.full((1 << 16,), x), bits).double()
        low, high = sorted(found.unique().tolist())
        assert abs(float(found.mean()) - float(torch.tensor(x))) <= (high - low) * 2**-17


def test_no_number_becomes_nan_or_more_than_the_largest_code():
    sizes = torch.cat([torch.logspace(-60, 3, 5000), torch.tensor([448.0, 448.1, 479.9, 480.0, 1e30])])
    for bits in (0, 0xFFFF):
        found = coded(torch.cat([sizes, -sizes]), torch.full((2 * len(sizes),), bits)).float()
        assert (found.abs() <= 448).all() and (found[len(sizes) - 5 : len(sizes)] == 448).all()


@given(st.lists(st.integers(0, 255).filter(lambda code: code & 0x7F != 0x7F), min_size=1, max_size=40))
def test_the_largest_of_codes(codes):
    stored = torch.tensor(codes, dtype=torch.uint8).view(FP8)
    assert largest(stored, torch.float32) == stored.float().abs().max() == largest(stored.float(), torch.float32)


@given(st.floats(2.0**-90, 2.0**100, width=32))
def test_a_scale_is_the_least_power_of_two_that_reaches(most):
    scale = float(scale_for(torch.tensor(most)))
    assert math.frexp(scale)[0] == 0.5 and most / 448 <= scale < most / 224
    assert scale_for(torch.tensor(0.0)) == 1 and scale_for(torch.tensor(2.0**-120)) == 2**-100


@settings(deadline=None)
@given(st.lists(st.integers(0, 253), min_size=1, max_size=30), st.integers(-100, 100))
def test_a_part_of_a_parameter_finds_a_scale_that_holds_its_numbers(codes, power):
    """Stored with any scale, saved in bf16, and held again by a scale of the part's own."""
    numbers = HELD[torch.tensor(codes)].double() * 2.0**power
    saved = numbers.bfloat16()
    scale = scale_for(largest(saved.float(), torch.float32))
    assert torch.equal(saved.double(), numbers) and torch.equal((saved.float() / scale).to(FP8).double() * scale, numbers)


# ---- bounds ----


@pytest.mark.parametrize("kind, beta1, beta2", [
    ("adamw", 0.9, 0.95), ("adam", 0.9, 0.999), ("lion", 0.9, 0.99), ("sgd", 0.9, 0.95), ("adamw", 0.0, 0.5),
])  # fmt: skip
def test_no_momentum_passes_the_update_of_the_largest_numbers(kind, beta1, beta2):
    """To the bit: in fp32, over numbers of many sizes, the bound is reached and not passed."""
    n = Numbers(OptimizerConfig(kind=kind, beta1=beta1, beta2=beta2), 1e-3, 0.1, 5, single=True)
    draw = torch.Generator().manual_seed(0)
    for size in torch.logspace(-12, 12, 49):
        w, g, m, v = torch.randn(4, 4096, generator=draw) * torch.tensor([1.0, size, 1.0, 1.0])[:, None]
        m[0], g[0], w[0] = m.abs().max(), g.abs().max(), w.abs().max()
        of_largest = [x.abs().max().reshape(1) for x in (w, g, m)] + [torch.ones(1)]
        rest = slice(0, 4 if kind.startswith("adam") else 3)
        ELEMENTWISE[kind](n, *of_largest[rest])
        ELEMENTWISE[kind](n, *[w, g, m, v.abs()][rest])
        assert m.abs().max() == m[0] == of_largest[2]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.0, 0.9), (0.95, 0.98)]))
def test_moments_of_any_gradients_keep_to_the_limit(gradients, betas):
    beta1, beta2 = betas
    m = v = 0.0
    for g in gradients:
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    assert abs(m) <= momentum_limit(OptimizerConfig(beta1=beta1, beta2=beta2)) * v**0.5 * (1 + 1e-12) + 1e-150


def test_the_limit_is_reached_and_there_is_none_where_moments_have_none():
    c, m, v = OptimizerConfig(), 0.0, 0.0
    for k in reversed(range(400)):  # the gradients for which Cauchy-Schwarz is an equation
        g = (c.beta1 / c.beta2) ** k
        m, v = c.beta1 * m + (1 - c.beta1) * g, c.beta2 * v + (1 - c.beta2) * g * g
    assert m / v**0.5 == pytest.approx(momentum_limit(c), rel=1e-9)
    assert momentum_limit(OptimizerConfig(beta1=0.95, beta2=0.9)) == momentum_limit(OptimizerConfig(beta1=0.0, beta2=0.0)) == math.inf


@pytest.mark.parametrize("kind", ["adamw", "adam", "lion", "sgd"])
def test_scales_are_those_of_the_update_to_come(kind):
    """Where all elements of a parameter are alike the bound is their new momentum: codes are in the upper half, and none is cut off."""
    engine, wide = (engine_of(tiny(SMALL, optimizer={"kind": kind, "weight_decay": 3.0} | o), {}, precision="fp32") for o in (EIGHT, {}))
    both = list(zip(engine.optimizer.states, wide.optimizer.states))
    for count in range(3):
        for state in (state for pair in both for state in pair):
            for i, (_, _, own) in enumerate(state.parts()):
                state.gradients[own] = -(10.0 ** (i - 5))
                state.master[own] = -1.7 - count
        for each in (engine, wide):
            each.optimizer.step(1e-3, 2.0**-5)
    for state, other in both:
        name = next(iter(state.moments))
        for item, _, own in state.parts():
            codes, right = state.moments[name][own], other.moments[name][own]
            assert 224 <= largest(codes, torch.float32) <= 448, item.name
            # three roundings, of which a share goes into the next: each by less than a step, 2^-3 of a number at most
            assert ((state.numbers(item, codes).float() - right).abs() <= 3 * 2**-3 * right.abs()).all()
            # a draw has a standard deviation of half a step at most; and five of those of their mean
            assert abs(float(state.numbers(item, codes).double().mean() / right[0]) - 1) <= 5 * 3 * 2**-4 / len(codes) ** 0.5 + 2**-16


def test_small_elements_beside_large_ones_do_not_leap():
    """Half of a parameter has gradients 10^7 times those of the rest, which 0 and the smallest code stand for in turn."""
    engine = engine_of(tiny(SMALL, optimizer=EIGHT | {"weight_decay": 0.0}), {}, precision="fp32")
    state = max(engine.optimizer.states, key=lambda state: len(state.master))
    (item, _, own) = next(iter(state.parts()))
    half, lr, many = own.start + (own.stop - own.start) // 2, 1e-3, 0
    for count in range(1, 31):
        numbers = Numbers(engine.config.optimizer, lr, 0.0, count)
        for other in engine.optimizer.states:
            other.gradients.fill_(0.0)
        state.gradients[own.start : half], state.gradients[half : own.stop] = 1e-7, 1.0
        before = state.master[own.start : half].clone()
        engine.optimizer.step(lr, 1.0)
        many += int((state.numbers(item, state.moments["exp_avg"][own.start : half]) > 1e-7 * 10).sum())
        step = (state.master[own.start : half] - before).abs().max()
        # to some ten roundings of fp32, and that of the weight itself
        bound = lr * 2 * momentum_limit(numbers.config) * numbers.second / numbers.first
        assert step <= bound * (1 + 10 * 2**-23) + 2**-24 * before.abs().max()
    assert many > 100, "codes that are far too large were there"


def test_the_first_update_is_that_of_wide_state_rounded_once(pool, tmp_path):
    found, right = (after_updates(pool, tiny(SMALL, optimizer=o), {}, tmp_path / str(i), "bf16", 1) for i, o in enumerate((EIGHT, {})))
    for key, value in found.items():
        step = {"exp_avg": 2.0**-3, "exp_avg_sq": 2.0**-7}.get(key.split("/")[0], 0.0)  # neighbours are at most so much of a number apart
        smallest = 2.0**-9 / 224 * float(right[key].abs().max()) * (step == 2.0**-3)
        bound = step * right[key].abs() + smallest + 16 * 2**-24 * float(right[key].abs().max())
        assert ((value.float() - right[key]).abs() <= bound).all(), key


@pytest.mark.parametrize("kind, lr", [("adamw", 3e-3), ("lion", 1e-3), ("sgd", 0.3)])
def test_training_is_as_good_as_with_wide_state(kind, lr):
    given = {"kind": kind, "lr": lr}
    right = losses(given, "bf16")
    assert right[-1] < 0.9 * right[0], "it learns"
    for optimizer in (EIGHT, BARE):
        assert losses(given | optimizer, "bf16")[-1] == pytest.approx(right[-1], rel=0.01), optimizer


# ---- checkpoints ----


@pytest.mark.parametrize("layout", [{"tensor": 2, "data": 2, "zero": 2}, {"pipeline": 2, "data": 2, "zero": 3}], ids=str)
def test_state_passes_through_other_layouts(layout, pool, tmp_path):
    """Each rank finds a scale for its own part of a parameter; the numbers stay, and are held by runs with wider moments, too."""
    config = tiny(SMALL, optimizer=BARE)
    right = after_updates(pool, config, {}, tmp_path / "one", "bf16")
    assert {key.split("/")[0]: t.dtype for key, t in right.items()} == dict.fromkeys(("exp_avg", "exp_avg_sq", "weight"), torch.bfloat16)
    spread(pool, passed_on, layout, config, layout, tmp_path / "one", tmp_path / "other")
    assert same_bits(contents(Folder(tmp_path / "other").open(3)), right)
    passed_on(0, 1, tiny(SMALL), {}, tmp_path / "other", tmp_path / "wide")
    wide = contents(Folder(tmp_path / "wide").open(3))
    assert all(torch.equal(wide[key].bfloat16(), t) and torch.equal(wide[key], t.float()) for key, t in right.items())


def test_moments_of_a_wide_run_are_rounded_to_the_nearest(pool, tmp_path):
    wide = after_updates(pool, tiny(SMALL), {}, tmp_path / "wide", "bf16")
    passed_on(0, 1, tiny(SMALL, optimizer=EIGHT), {}, tmp_path / "wide", tmp_path / "codes")
    for key, found in contents(Folder(tmp_path / "codes").open(3)).items():
        x = wide[key]
        scale = scale_for(x.abs().max())
        right = {"exp_avg": (x / scale).to(FP8).float() * scale, "exp_avg_sq": x.bfloat16().float()}.get(key.split("/")[0], x)
        assert torch.equal(found.float(), right), key


def test_a_run_that_has_not_begun_can_be_saved(tmp_path):
    engine = engine_of(tiny(SMALL, optimizer=EIGHT), {}, precision="fp32")
    save(Folder(tmp_path), 0, engine.optimizer, engine.mesh, {})
    assert not any(t.any() for key, t in contents(Folder(tmp_path).open(0)).items() if key.startswith("exp_avg/"))


# ---- memory, and what is refused ----


@pytest.mark.parametrize("kind, layout, sizes", [
    ("adamw", {}, (12, 7, 3)), ("adamw", {"data": 2, "zero": 1}, (12, 7, 3)), ("lion", {"tensor": 2}, (8, 5, 1)), ("sgd", {}, (8, 5, 1)),
], ids=str)  # fmt: skip
def test_memory_is_counted(kind, layout, sizes):
    engines = [engine_of(tiny(SMALL, optimizer={"kind": kind} | o), layout, precision="bf16") for o in ({}, EIGHT, BARE)]
    count = sum(len(state.values) for state in engines[0].optimizer.states)
    assert [account(engine.config, 0).state.optimizer for engine in engines] == [count * size for size in sizes]


def test_scales_are_one_small_maximum_over_the_world():
    engines = [engine_of(tiny(SMALL, optimizer=o), {"tensor": 2, "data": 2, "zero": 1}, 0, 1, "bf16") for o in ({}, EIGHT)]
    plain, own = (Counter((t.when, t.operation, t.bytes) for t in record_step(engine.config, 0).transfers) for engine in engines)
    assert own - plain == Counter({("update", "all_reduce max", 3 * 4 * len(parameters_of(engines[0].config))): 1}) and not plain - own


@pytest.mark.parametrize("changes, words", [
    ({"optimizer": EIGHT | {"kind": "lamb"}}, "`optimizer.moments: fp8` with `optimizer.kind: lamb`"),
    ({"optimizer": EIGHT | {"kind": "onebit-adam", "onebit": {"freeze": 3}}}, "`optimizer.moments: fp8` with `optimizer.kind: onebit-adam`"),
    ({"optimizer": EIGHT | {"groups": [{"match": "layers.0.*", "kind": "muon"}]}}, "`optimizer.moments: fp8` with `optimizer.kind: muon`"),
    ({"optimizer": EIGHT | {"kind": "sgd", "momentum": 0.0}}, "`optimizer.moments: fp8` has no effect without an optimizer that has some"),
    ({"optimizer": EIGHT | {"compiled": True}}, "`optimizer.compiled: true` with `optimizer.moments: fp8`"),
    ({"optimizer": EIGHT, "train": {"numerics": "canonical"}}, "`train.numerics: canonical` is not there for `optimizer.moments: fp8`"),
], ids=lambda value: value[:50] if isinstance(value, str) else "")  # fmt: skip
def test_what_does_not_fit_is_refused(changes, words):
    (line,) = faults(tiny(changes), 1)
    assert words in line
