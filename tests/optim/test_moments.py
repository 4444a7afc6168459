"""Moments and weights that are kept in bf16: how they are rounded, what they cost in loss and save in memory; and that no layout and no resume changes
a draw, in bf16 or fp8. What is particular to fp8 is in test_narrow.py."""

import math
from functools import cache

import pytest
import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, save
from mtmegatron.config.constraints import faults
from mtmegatron.layout import Layout
from mtmegatron.optim.narrow import draws, elements, rounded
from mtmegatron.placement import Init, Placement
from mtmegatron.plan.account import account
from mtmegatron.verify.protocol import batches, compare, serial_reference
from tests.field.training import contents, engine_of, run, same_bits, spread, state_of
from tests.optim.test_optim import gradient
from tests.tiny import tiny

BF16 = {"moments": "bf16"}
BARE = {"moments": "bf16", "masters": False}
KINDS = pytest.mark.parametrize("moments", ["bf16", "fp8"])
SMALL = {"model": {"layers": 2, "bias_qkv": True}}


# ---- rounding ----


def test_a_number_is_rounded_to_its_neighbours_and_right_in_the_mean():
    n = 1 << 16
    for x in (1.0 + 2**-7 * 0.3, -3.0 - 2**-6 * 0.9, 1e-30, 2.0**-130 * 1.1):
        found = rounded(torch.full((n,), x), draws(7, torch.arange(n))).float()
        low, high = sorted(found.unique().tolist())
        step = high - low
        exact = float(torch.tensor(x))
        assert low < exact < high and math.nextafter(low, high) != high
        assert abs(float(found.double().mean()) - exact) <= 5 * 0.5 * step / n**0.5  # five standard deviations of a mean of n draws


def test_what_bf16_holds_stays_as_it_is():
    held = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-133, torch.inf, -torch.inf])
    for bits in (0, 1, 0xFFFF, -1):
        assert torch.equal(rounded(held, torch.full((7,), bits)).float(), held)
        assert rounded(torch.tensor([torch.nan]), torch.tensor([bits])).isnan().all()
        assert torch.equal(rounded(held.double(), torch.full((7,), bits)).float(), held)


def test_the_16_bits_of_weights_and_moments_are_even_and_independent():
    bits = draws(3, torch.arange(1 << 16))
    parts = torch.stack([(bits >> 16 * place & 0xFFFF).double() / 65536 - 0.5 for place in range(3)] + [draws(4, torch.arange(1 << 16)).bitwise_and(0xFFFF) / 65536 - 0.5])
    bound = 5 / 256  # standard deviations of a correlation of 65536 pairs
    assert (torch.corrcoef(parts) - torch.eye(4)).abs().max() <= bound and (parts.mean(1).abs() <= bound * 12**-0.5).all()
    assert abs(float(torch.corrcoef(torch.stack([parts[0, 1:], parts[0, :-1]]))[0, 1])) <= bound


@pytest.mark.parametrize("split", [(), ((0, "tensor"),), ((1, "tensor"),), ((0, "tensor"), (2, "data")), ((2, "tensor"),)], ids=str)
def test_elements_have_the_numbers_that_the_whole_parameter_gives_them(split):
    shape, layout = (6, 5, 4), Layout(2, 1, 2, 1)
    placement, whole = Placement(shape, Init(), True, split), torch.arange(120).view(shape)
    for rank in range(layout.world):
        mine = placement.part(whole, layout, rank).reshape(-1)
        for part in (slice(0, len(mine)), slice(3, len(mine) - 2)):
            assert torch.equal(elements(placement, layout, rank, part), mine[part])


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_a_second_moment_does_not_stall(beta2):
    """v = beta2 v + (1 - beta2) g² from 1, with g = 0.98: rounding to the nearest stays away from 0.96, where rounding at random arrives."""
    n, target, steps = 1 << 12, 0.98**2, round(4 / (1 - beta2))
    nearest, random = torch.ones(1).bfloat16(), torch.ones(n).bfloat16()
    for step in range(steps):
        nearest = (beta2 * nearest.float() + (1 - beta2) * target).bfloat16()
        random = rounded(beta2 * random.float() + (1 - beta2) * target, draws(step, torch.arange(n)))
    exact = target + (1 - target) * beta2**steps
    # a draw has a standard deviation of at most half a step of 2^-8, of which a share of beta2 is left after each update
    deviation = 2**-9 / (1 - beta2**2) ** 0.5 / n**0.5
    assert abs(float(random.float().mean()) - exact) <= 5 * deviation
    assert abs(float(nearest.float()) - exact) > 10 * 5 * deviation


# ---- updates ----


def rounded_rank(rank, world, config, layout, folder, precision, steps):
    """Updates with gradients drawn from (step, name), powers of two of a whole; the state goes into a checkpoint."""
    engine = engine_of(config, layout, rank, world, precision)
    for step in range(steps):
        engine.buckets.start()
        for bucket in engine.buckets.buckets:
            bucket.expect_gradients()
        for chunk in engine.chunks:
            for key, param in chunk.named_parameters():
                whole = gradient(key, param.placement.shape, step).float()
                ranks = math.prod(engine.mesh.layout.size(axis) for axis in param.placement.summed)
                param.grad_sum.copy_(param.placement.part(whole, engine.mesh.layout, rank) / ranks)
        engine.buckets.finish()
        engine.optimizer.step(1e-2, 0.5)
    save(Folder(folder), 3, engine.optimizer, engine.mesh, {})
    for state in engine.optimizer.states:
        assert all(not t[sum(own.stop - own.start for *_, own in state.parts()) :].any() for t in state.tensors.values()), "padding"


def after_updates(pool, config, layout, folder, precision, steps=3) -> dict[str, torch.Tensor]:
    spread(pool, rounded_rank, layout, config, layout, folder, precision, steps)
    return contents(Folder(folder).open(3))


LAYOUTS = [{"data": 2, "zero": 1}, {"tensor": 2}, {"tensor": 2, "data": 2, "zero": 3}, {"pipeline": 2, "data": 2, "zero": 0}]
HELD_TWICE = {"model": {"layers": 2, "tied": True, "moe": {"experts": 4, "top_k": 2, "ffn": 40}}}
TWICE = [{"data": 2, "expert": 2, "zero": 1}, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2}, {"pipeline": 2}, {"tensor": 4}]


@KINDS
@pytest.mark.parametrize("model, optimizer, precision, layouts", [
    ({"model": {"layers": 3}}, BARE, "fp8-rowwise", LAYOUTS), (SMALL, BF16, "fp32", LAYOUTS), (SMALL, BARE | {"kind": "adam", "ema": 0.9}, "bf16", LAYOUTS[:2]),
    (SMALL, BARE | {"kind": "lion"}, "bf16", LAYOUTS[:2]), (SMALL, BF16 | {"kind": "sgd"}, "fp64", LAYOUTS[:2]), (HELD_TWICE, BARE, "bf16", TWICE),
], ids=["adamw", "adamw-masters", "adam", "lion", "sgd", "held-twice"])  # fmt: skip
def test_equal_gradients_give_equal_bits_in_every_layout(model, optimizer, precision, layouts, moments, pool, tmp_path):
    """Also of what several ranks hold: a tied table on two stages, key heads under more tensor ranks; and of experts. In fp8: codes times scales."""
    config = tiny(model, optimizer=optimizer | {"moments": moments})
    right = after_updates(pool, config, {}, tmp_path / "serial", precision)
    for number, layout in enumerate(layouts):
        assert same_bits(after_updates(pool, config, layout, tmp_path / str(number), precision), right), layout


def test_the_first_update_is_that_of_wide_state_rounded_once(pool, tmp_path):
    found, right = (after_updates(pool, tiny(SMALL, optimizer=o), {}, tmp_path / str(i), "bf16", 1) for i, o in enumerate((BARE, {})))
    assert {key.split("/")[0] for key in found} == {"weight", "exp_avg", "exp_avg_sq"} and {t.dtype for t in found.values()} == {torch.bfloat16}
    for key, value in found.items():
        # neighbours in bf16 are at most 2^-7 of a number apart; the fused update of wide state is an expression of some ten roundings of fp32
        bound = 2**-7 * right[key].abs() + 16 * 2**-24 * float(right[key].abs().max())
        assert ((value.float() - right[key]).abs() <= bound).all(), key


def test_draws_change_with_the_seed():
    config = tiny(SMALL, optimizer=BF16)
    states = []
    for seed in (1, 2):
        engine = engine_of(config, {}, precision="fp32")
        assert engine.optimizer.narrow.seed == config.train.seed
        engine.optimizer.narrow = type(engine.optimizer.narrow)(seed, engine.mesh, torch.float32)
        for state in engine.optimizer.states:
            state.gradients.fill_(0.3)
        engine.optimizer.step(1e-2, 1.0)
        states.append(engine.optimizer.states[0].moments["exp_avg"].float())
    assert not torch.equal(*states) and (states[0] - states[1]).abs().max() <= 2**-8 * 0.03 * 2


def test_without_masters_small_updates_add_up():
    """A hundred updates of a twentieth of what rounding to the nearest would see."""
    engine = engine_of(tiny(SMALL, optimizer=BARE | {"kind": "sgd", "momentum": 0.0, "moments": "fp32", "weight_decay": 0.0}), {}, precision="bf16")
    state = max(engine.optimizer.states, key=lambda state: len(state.values))
    used = slice(0, state.bucket.items[-1].stop)
    state.values[used] = 1.0
    for _ in range(100):
        state.gradients.fill_(1.0)
        engine.optimizer.step(2**-8 / 20, 1.0)
    moved = 1.0 - state.values[used].double().mean()
    deviation = 2**-9 * 100**0.5 / (used.stop**0.5)  # a hundred draws of at most half a step
    assert abs(moved - 100 * 2**-8 / 20) <= 5 * deviation


@cache
def reference(moments: str):
    return serial_reference(tiny(SMALL, optimizer=BARE | {"moments": moments}), ("fp32", "bf16"))


@KINDS
@pytest.mark.parametrize("layout", [{"data": 2, "zero": 1}, {"tensor": 2}], ids=str)
def test_layouts_keep_parity(layout, moments, pool):
    """In fp64, where weights have masters, no draw turns on a rounding error; in bf16 all draw."""
    for precision in ("fp64", "bf16"):
        failed = [c for c in compare(tiny(SMALL, optimizer=BARE | {"moments": moments}), layout, precision, reference(moments), pool) if not c.passed]
        assert not failed, failed


def losses(optimizer: dict, precision: str) -> list[float]:
    config = tiny(model={"layers": 1}, optimizer={"lr": 3e-3} | optimizer, train={"steps": 60, "global_batch": 4, "micro_batch": 4})
    engine = engine_of(config, {"micro_batch": 4}, precision=precision)
    return [engine.step(batches(engine, step % 2), step).loss for step in range(60)]


def test_training_is_as_good_as_with_wide_state():
    right = losses({}, "bf16")
    assert right[-1] < 0.9 * right[0], "it learns"
    for optimizer in (BF16, BARE):
        assert losses(optimizer, "bf16")[-1] == pytest.approx(right[-1], rel=0.01), optimizer


# ---- checkpoints ----

RUN = {"train": {"steps": 4, "micro_batch": 1, "eval_batches": 1}, "checkpoint": {"every": 2}}


@KINDS
def test_a_run_that_was_cut_off_repeats_its_draws(moments, pool, tmp_path):
    config, layout = tiny(SMALL, RUN, optimizer=BARE | {"moments": moments, "ema": 0.5}), {"tensor": 2, "data": 2, "zero": 1}
    run(pool, config, layout, tmp_path / "whole", "bf16")
    run(pool, config, layout, tmp_path / "cut", "bf16", stop=2)
    run(pool, config, layout, tmp_path / "cut", "bf16")
    assert same_bits(state_of(tmp_path / "cut", 4), state_of(tmp_path / "whole", 4))


def passed_on(rank, world, config, layout, source, target):
    engine = engine_of(config, layout, rank, world, "bf16")
    load(Folder(source).open(3), engine.optimizer, engine.mesh)
    engine.optimizer.publish()
    save(Folder(target), 3, engine.optimizer, engine.mesh, {})


def test_state_passes_through_other_layouts_and_from_a_wide_run(pool, tmp_path):
    config = tiny(SMALL, optimizer=BARE)
    right = after_updates(pool, config, {}, tmp_path / "narrow", "bf16")
    spread(pool, passed_on, {"tensor": 2, "data": 2, "zero": 2}, config, {"tensor": 2, "data": 2, "zero": 2}, tmp_path / "narrow", tmp_path / "other")
    assert same_bits(contents(Folder(tmp_path / "other").open(3)), right)
    wide = after_updates(pool, tiny(SMALL), {}, tmp_path / "wide", "bf16")
    passed_on(0, 1, config, {}, tmp_path / "wide", tmp_path / "rounded")
    assert same_bits(contents(Folder(tmp_path / "rounded").open(3)), {name: t.bfloat16() for name, t in wide.items()})


# ---- memory, and what is refused ----


@pytest.mark.parametrize("layout", [{}, {"data": 2, "zero": 1}, {"tensor": 2}], ids=str)
def test_memory_is_counted(layout):
    engines = [engine_of(tiny(SMALL, optimizer=o), layout, precision="bf16") for o in ({}, BF16, {"masters": False}, BARE)]
    count = sum(len(state.values) for state in engines[0].optimizer.states)
    assert [account(engine.config, 0).state.optimizer for engine in engines] == [count * size for size in (12, 8, 8, 4)]


@pytest.mark.parametrize("changes, words", [
    ({"optimizer": BARE | {"kind": "lamb"}, "train": {"precision": "bf16"}}, "`optimizer.moments: bf16` with `optimizer.kind: lamb`"),
    ({"optimizer": {"masters": False, "kind": "onebit-adam", "onebit": {"freeze": 3}}, "train": {"precision": "bf16"}}, "`optimizer.masters: false` with"),
    ({"optimizer": BF16 | {"groups": [{"match": "layers.0.*", "kind": "muon"}]}}, "`optimizer.moments: bf16` with `optimizer.kind: muon`"),
    ({"optimizer": {"masters": False}}, "`optimizer.masters: false` has no effect without weights in bf16"),
    ({"optimizer": {"masters": False}, "train": {"precision": "fp16"}}, "`optimizer.masters: false` has no effect without weights in bf16"),
    ({"optimizer": {"moments": "bf16", "kind": "sgd", "momentum": 0.0}}, "`optimizer.moments: bf16` has no effect without an optimizer that has some"),
    ({"optimizer": BF16, "train": {"numerics": "canonical"}}, "`train.numerics: canonical` is not there for `optimizer.moments: bf16`"),
], ids=lambda value: value[:50] if isinstance(value, str) else "")  # fmt: skip
def test_what_does_not_fit_is_refused(changes, words):
    (line,) = faults(tiny(changes), 1)
    assert words in line
