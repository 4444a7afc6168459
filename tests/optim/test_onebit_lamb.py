"""1-bit LAMB: its warm-up is LAMB, its compressed stage the published one, in all layouts, and it goes on from checkpoints."""

import pytest
import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, save
from mtmegatron.config.constraints import faults
from mtmegatron.data.loader import micro_batches
from mtmegatron.errors import UserError
from mtmegatron.optim.onebit_lamb import FRESH
from mtmegatron.verify.protocol import batches, compare, serial_reference
from tests.field.training import (
    contents,
    engine_of,
    joined,
    name,
    parts_of,
    same_bits,
    spread,
)
from tests.optim.test_onebit import Chain, train, trained_rank
from tests.tiny import tiny

EPS = torch.finfo(torch.float64).eps
MODEL = {"layers": 2, "tied": True}
SPREAD = [{"pipeline": 2, "data": 2, "zero": 1}, {"tensor": 2, "data": 2}]
RESUMED = [({"data": 2}, "fp32", 4), ({"pipeline": 2, "data": 2, "zero": 1}, "bf16", 4), ({"data": 2, "zero": 1}, "fp32", 2)]


def config(freeze: int = 3, **optimizer):
    return tiny(model=MODEL, optimizer={"kind": "onebit-lamb", "onebit": {"freeze": freeze}, "lr": 1e-3} | optimizer)


@pytest.mark.parametrize("layout", [{}, *SPREAD], ids=name)
def test_the_warm_up_is_lamb_bit_for_bit_and_the_compressed_stage_ends_with_equal_replicas(layout, pool):
    own, plain = config(), tiny(model=MODEL, optimizer={"kind": "lamb", "lr": 1e-3})
    warm, lamb = (spread(pool, trained_rank, layout, c, layout, "fp32", 3) for c in (own, plain))
    assert warm[0][1] == lamb[0][1] and same_bits(joined([parts for parts, _ in warm]), joined([parts for parts, _ in lamb]))
    ranks = spread(pool, trained_rank, layout, own, layout, "fp32", 6)
    assert all(results == ranks[0][1] for _, results in ranks) and not any(fault for _, _, fault in ranks[0][1])
    joined([parts for parts, _ in ranks])  # asserts that copies are equal


@pytest.mark.parametrize("layout", [{"pipeline": 2}], ids=name)
def test_where_nobody_shares_a_gradient_the_compressed_stage_too_is_that_of_one_process(layout, pool):
    own = tiny(model={"layers": 2}, optimizer={"kind": "onebit-lamb", "onebit": {"freeze": 1}})
    failed = [c for c in compare(own, layout, "fp64", serial_reference(own, ("fp32",)), pool) if not c.passed]
    assert not failed, failed


def test_the_compressed_update_is_the_equation():
    engine = engine_of(config(freeze=2, weight_decay=0.5), {})
    (state, *_), (bucket, *_) = engine.optimizer.states, engine.buckets.buckets
    beta1, beta2, eps, lr = 0.9, 0.95, 1e-8, 1e-2
    m, v, fresh, c, f = 0.0, 0.0, 0.0, {}, {item.name: 1.0 for item in bucket.items}
    generator = torch.Generator().manual_seed(3)
    for count in range(1, 7):
        gradient = torch.randn(bucket.gradients.numel(), dtype=torch.float64, generator=generator) * (1.0 if count < 3 else 0.3)
        engine.buckets.start(engine.optimizer.reduces)
        bucket.gradients.copy_(gradient)
        before = state.master.clone()
        engine.optimizer.step(lr, 1.0)
        m = beta1 * m + (1 - beta1) * gradient
        fresh = beta2 * (v if count <= 3 else fresh) + (1 - beta2) * gradient.square()
        v = fresh if count <= 2 else v
        root = (v / (1 - beta2 ** min(count, 2))).sqrt() + eps
        u = m / (1 - beta1**count) / root
        grown = root / ((fresh / (1 - beta2**count)).sqrt() + eps)
        for item in bucket.items:
            own = slice(item.start, item.stop)
            whole = u[own].clamp(-1, 1) if count > 2 else u[own]
            whole = whole + 0.5 * item.placement.decay * before[own]
            ratio = float(before[own].norm() / whole.norm()) or 1.0
            if count <= 2:
                c[item.name] = ratio if count == 1 else 0.9 * c[item.name] + 0.1 * ratio
            else:
                last = f[item.name]
                f[item.name] = min(max(min(max(float(grown[own].max()), 0.5), 4.0), 0.9 * last), 1.1 * last)
                ratio = c[item.name] * f[item.name]
            right = before[own] - lr * ratio * whole
            assert (state.master[own] - right).abs().max() <= 64 * EPS * max(1.0, float(right.abs().max())), (count, item.name)
    assert max(f.values()) == pytest.approx(1.1**4)  # gradients shrank: factors grow, as fast as they may


def test_what_onebit_adam_refuses_it_refuses():
    (line,) = faults(tiny(optimizer={"kind": "onebit-lamb", "onebit": {"freeze": 3}}, parallel={"zero": 2}), 2)
    assert "`parallel.zero: 2` with `optimizer.kind: onebit-lamb`" in line


# ---- checkpoints ----


def saving_rank(rank, world, layout, precision, folder, freeze):
    """Weights after 3 steps, saved, and after 3 more."""
    engine = engine_of(config(freeze), layout, rank, world, precision)
    train(engine, 0, 3)
    save(Folder(folder), 3, engine.optimizer, engine.mesh, {})
    train(engine, 3, 6)
    return parts_of(engine)


def resuming_rank(rank, world, layout, precision, folder, again, freeze):
    """The same 3 steps from the checkpoint, which is saved again first."""
    engine = engine_of(config(freeze), layout, rank, world, precision)
    load(Folder(folder).open(3), engine.optimizer, engine.mesh)
    engine.optimizer.publish()
    save(Folder(again), 3, engine.optimizer, engine.mesh, {})
    train(engine, 3, 6)
    return parts_of(engine)


@pytest.mark.parametrize("layout, precision, freeze", RESUMED, ids=name)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(layout, precision, freeze, pool, tmp_path):
    whole = spread(pool, saving_rank, layout, layout, precision, tmp_path / "a", freeze)
    resumed = spread(pool, resuming_rank, layout, layout, precision, tmp_path / "a", tmp_path / "b", freeze)
    assert same_bits(joined(whole), joined(resumed))
    assert same_bits(contents(Folder(tmp_path / "a").open(3)), contents(Folder(tmp_path / "b").open(3)))


def test_another_layout_takes_over_ratios_and_variances(pool, tmp_path):
    spread(pool, saving_rank, {"pipeline": 2, "data": 2}, {"pipeline": 2, "data": 2}, "fp32", tmp_path / "a", 2)
    spread(pool, resuming_rank, {"data": 2, "zero": 1}, {"data": 2, "zero": 1}, "fp32", tmp_path / "a", tmp_path / "b", 2)
    before, after = (contents(Folder(tmp_path / name_).open(3)) for name_ in "ab")
    kept = {key for key in before if "error" not in key}
    assert kept == {key for key in after if "error" not in key} and all(torch.equal(before[key], after[key]) for key in kept)
    layers = [before[key] for key in kept if key.startswith("buffer/lamb/")]
    assert all(ratio > 0 and factor != 1 for ratio, factor in layers) and any(before[key].any() for key in kept if key.startswith(FRESH))


def test_a_checkpoint_of_another_kind_past_the_warm_up_is_refused_with_a_repair(tmp_path):
    plain = engine_of(tiny(model=MODEL, optimizer={"kind": "lamb", "lr": 1e-3}), {})
    train(plain, 0, 3)
    save(Folder(tmp_path), 3, plain.optimizer, plain.mesh, {})
    late, early = (engine_of(config(freeze), {}) for freeze in (3, 4))
    for engine in (late, early):
        load(Folder(tmp_path).open(3), engine.optimizer, engine.mesh)
    with pytest.raises(UserError, match="use a freeze above the updates"):
        late.step(batches(late, 3), 3)
    assert not [result for result in train(early, 3, 6) if result.fault]


# ---- training ----


def learning_rank(rank, world, kind):
    """Losses of a run on chains."""
    optimizer = {"kind": kind, "lr": 3e-2, "warmup": 10, "beta2": 0.99} | ({"onebit": {"freeze": 40}} if kind == "onebit-lamb" else {})
    small = {"layers": 1, "width": 32, "ffn": 64, "vocab": 61}
    own = tiny(model=small, optimizer=optimizer, train={"steps": 120, "global_batch": 16, "micro_batch": 8})
    engine = engine_of(own, {"data": 2, "zero": 1}, rank, world, "fp32")
    return [engine.step(micro_batches(engine.config, Chain(), engine.mesh, step), step).loss for step in range(120)]


def test_it_learns_as_lamb_does(pool):
    (lamb, _), (compressed, _) = (pool.run(learning_rank, 2, kind) for kind in ("lamb", "onebit-lamb"))
    assert compressed[:40] == lamb[:40] and compressed[41:] != lamb[41:]
    last = [sum(losses[-20:]) / 20 for losses in (lamb, compressed)]
    assert last[0] < 0.75 * lamb[0] and last[1] <= 1.02 * last[0], (last, lamb[0])
