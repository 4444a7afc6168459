"""1-bit Adam: its warm-up is Adam, its compressed stage follows Adam, in all layouts, and goes on from checkpoints.

Cases O06, O07 and O09 of the field: hangs with tensor and pipeline parallel, ZeRO and a clip of the norm, counts of updates.
"""

import numpy as np
import pytest
import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, save
from mtmegatron.data.gpt import Sample
from mtmegatron.data.loader import micro_batches
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
from tests.tiny import tiny

EPS = torch.finfo(torch.float64).eps
SPREAD = [
    {"data": 4, "expert": 2, "zero": 1}, {"data": 2}, {"data": 2, "zero": 1}, {"tensor": 2, "data": 2}, {"pipeline": 2, "data": 2, "zero": 1}, {"context": 2, "data": 2},
]  # fmt: skip

RESUMED = [({"data": 2}, "fp32"), ({"data": 2, "zero": 1}, "bf16"), ({"tensor": 2, "data": 2, "zero": 1}, "fp16")]


def config(kind: str = "onebit-adam", freeze: int = 3, **optimizer):
    return tiny(model={"layers": 2, "tied": True}, optimizer={"kind": kind, "onebit": {"freeze": freeze}, "lr": 1e-3} | optimizer)


def train(engine, first: int, last: int) -> list:
    return [engine.step(batches(engine, step), step) for step in range(first, last)]


def trained_rank(rank, world, config_, layout, precision, steps):
    """Weights and results after some steps."""
    engine = engine_of(config_, layout, rank, world, precision)
    results = train(engine, 0, steps)
    return parts_of(engine), [(r.loss, r.grad_norm, r.fault) for r in results]


@pytest.mark.parametrize("layout", [{}, *SPREAD], ids=name)
def test_o06_the_warm_up_is_adam_bit_for_bit_and_the_compressed_stage_ends_with_equal_replicas(layout, pool):
    model = {"layers": 2, "tied": True} | ({"moe": {"experts": 4, "top_k": 2, "ffn": 40}} if "expert" in layout else {})
    own, plain = tiny(config().model_dump(include={"optimizer"}), model=model), tiny(model=model, optimizer={"lr": 1e-3})
    warm, adam = (spread(pool, trained_rank, layout, c, layout, "fp32", 3) for c in (own, plain))
    assert warm[0][1] == adam[0][1] and same_bits(joined([parts for parts, _ in warm]), joined([parts for parts, _ in adam]))
    ranks = spread(pool, trained_rank, layout, own, layout, "fp32", 8)
    assert all(results == ranks[0][1] for _, results in ranks) and not any(fault for _, _, fault in ranks[0][1])
    joined([parts for parts, _ in ranks])  # asserts that copies are equal


@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"tensor": 2, "sequence": False}], ids=name)
def test_where_nobody_shares_a_gradient_the_compressed_stage_too_is_that_of_one_process(layout, pool):
    own = tiny(model={"layers": 2}, optimizer={"kind": "onebit-adam", "onebit": {"freeze": 1}})
    failed = [c for c in compare(own, layout, "fp64", serial_reference(own, ("fp32",)), pool) if not c.passed]
    assert not failed, failed


def test_the_frozen_update_is_the_equation_within_adams_bound_and_what_had_no_gradient_rests():
    engine = engine_of(config(freeze=1, beta2=0.999, weight_decay=0.5), {})
    beta1, beta2, eps, lr = 0.9, 0.999, 1e-8, 1e-2
    (bucket, *_), (state, *_) = engine.buckets.buckets, engine.optimizer.states
    first, second = torch.linspace(1.0, 2.0, bucket.gradients.numel(), dtype=torch.float64), torch.ones(bucket.gradients.numel(), dtype=torch.float64)
    first[:8], second[8:16] = 0.0, 1e6  # no gradient in the warm-up, a leap after it
    for gradient in (first, second):
        engine.buckets.start(engine.optimizer.reduces)
        bucket.gradients.copy_(gradient)
        before = state.master.clone()
        engine.optimizer.step(lr, 1.0)
    assert not engine.buckets.reduces and engine.optimizer.updates == 2
    m, v = (1 - beta1) * (beta1 * first + second), (1 - beta2) * first.square()
    u = (m / (1 - beta1**2) / ((v / (1 - beta2)).sqrt() + eps)).clamp(max=(1 - beta1) / (1 - beta2) ** 0.5)
    u[:8] = 0.0
    used = bucket.items[-1].stop
    decay = torch.cat([torch.full((item.stop - item.start,), 0.5 * item.placement.decay, dtype=torch.float64) for item in bucket.items])
    right = before[:used] * (1 - lr * decay) - lr * u[:used]
    assert (state.master[:used] - right).abs().max() <= 16 * EPS * max(1.0, float(right.abs().max()))


def overflow_rank(rank, world, layout):
    """An infinite gradient on one rank in the compressed stage: faults, and whether weights and errors stayed."""
    engine = engine_of(config(freeze=1), layout, rank, world, "fp32")
    train(engine, 0, 3)
    kept = [t.clone() for t in everything(engine)]
    mine = batches(engine, 3)
    finish = engine.buckets.finish
    engine.buckets.finish = lambda: (finish(), engine.buckets.buckets[0].gradients[rank].fill_(float("inf") if rank == 1 else 0.0))
    result = engine.step(mine, 3)
    return result.fault, engine.optimizer.updates, all(torch.equal(a, b) for a, b in zip(kept, everything(engine)))


def everything(engine) -> list[torch.Tensor]:
    return [t for s in engine.optimizer.states for t in s.tensors.values()] + [r.values for r in engine.optimizer.residuals()]


def test_o09_a_number_that_is_not_finite_on_one_rank_skips_the_step_on_all_and_leaves_errors_alone(pool):
    ranks = pool.run(overflow_rank, 2, {"data": 2, "zero": 1})
    assert ranks == [("the gradient is not finite", 3, True)] * 2


# ---- checkpoints ----


def saving_rank(rank, world, layout, precision, folder):
    """Weights after 5 steps, saved, and after 3 more."""
    engine = engine_of(config(freeze=2), layout, rank, world, precision)
    train(engine, 0, 5)
    save(Folder(folder), 5, engine.optimizer, engine.mesh, {})
    train(engine, 5, 8)
    return parts_of(engine)


def resuming_rank(rank, world, layout, precision, folder, again):
    """The same 3 steps from the checkpoint, which is saved again first."""
    engine = engine_of(config(freeze=2), layout, rank, world, precision)
    load(Folder(folder).open(5), engine.optimizer, engine.mesh)
    engine.optimizer.publish()
    save(Folder(again), 5, engine.optimizer, engine.mesh, {})
    train(engine, 5, 8)
    return parts_of(engine)


@pytest.mark.parametrize("layout, precision", RESUMED, ids=name)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(layout, precision, pool, tmp_path):
    whole = spread(pool, saving_rank, layout, layout, precision, tmp_path / "a")
    resumed = spread(pool, resuming_rank, layout, layout, precision, tmp_path / "a", tmp_path / "b")
    assert same_bits(joined(whole), joined(resumed))
    assert same_bits(contents(Folder(tmp_path / "a").open(5)), contents(Folder(tmp_path / "b").open(5)))


@pytest.mark.parametrize("other", [{"data": 4, "zero": 1}, {"tensor": 2, "data": 2}, {"pipeline": 2, "data": 2}, {}], ids=name)
def test_another_layout_begins_with_the_mean_of_the_errors(other, pool, tmp_path):
    spread(pool, saving_rank, {"data": 2}, {"data": 2}, "fp32", tmp_path / "a")
    spread(pool, resuming_rank, other, other, "fp32", tmp_path / "a", tmp_path / "b")
    before, after = (contents(Folder(tmp_path / name_).open(5)) for name_ in "ab")
    for key, tensor in before.items():
        kind, parameter = key.split("/", 1)
        if kind == "server_error" and f"worker_error.0/{parameter}" in after:
            assert torch.equal(after[key], tensor), key
        elif kind == "worker_error.0":
            workers = sum(key.startswith("worker_error.") and key.endswith(f"/{parameter}") for key in after)
            more = 2 if "norm" in parameter and "tensor" in other or "embedding" in parameter and "pipeline" in other else 1
            assert workers == other.get("data", 0) * more, key  # tensor ranks share the gradients of norms, both ends that of the tied table
            means = [mean_error(found, parameter) for found in (before, after) if workers]
            assert not workers or (means[1] - means[0]).abs().max() <= 4 * torch.finfo(torch.float32).eps * means[0].abs().max() + 1e-12, key
        elif "error" not in kind:
            assert torch.equal(after[key], tensor), key
    assert any(tensor.any() for key, tensor in before.items() if "error" in key)


def mean_error(found: dict[str, torch.Tensor], parameter: str) -> torch.Tensor:
    return torch.stack([t for key, t in found.items() if key.startswith("worker_error.") and key.endswith(f"/{parameter}")]).mean(0)


# ---- training ----


class Chain:
    """Sequences in which a token mostly follows from the one before: something to learn."""

    def __getitem__(self, i: int) -> Sample:
        draw = np.random.default_rng((7, i))
        tokens = [int(draw.integers(61))]
        for _ in range(32):
            tokens.append(int(draw.integers(61)) if draw.random() < 0.2 else (5 * tokens[-1] + 3) % 61)
        return Sample(np.array(tokens), np.array([0]))


def learning_rank(rank, world, kind):
    """Losses of a run on chains."""
    optimizer = {"lr": 3e-3, "warmup": 10, "beta2": 0.99} | ({"kind": kind, "onebit": {"freeze": 40}} if kind != "adamw" else {})
    small = {"layers": 1, "width": 32, "ffn": 64, "vocab": 61}
    own = tiny(model=small, optimizer=optimizer, train={"steps": 160, "global_batch": 16, "micro_batch": 8})
    engine = engine_of(own, {"data": 2, "zero": 1}, rank, world, "fp32")
    return [engine.step(micro_batches(engine.config, Chain(), engine.mesh, step), step).loss for step in range(160)]


def test_it_reaches_the_loss_of_adam_within_one_percent(pool):
    (adam, _), (compressed, _) = (pool.run(learning_rank, 2, kind) for kind in ("adamw", "onebit-adam"))
    assert compressed[:40] == adam[:40] and compressed[41:] != adam[41:]
    last = [sum(losses[-20:]) / 20 for losses in (adam, compressed)]
    assert last[0] < 0.75 * adam[0] and last[1] <= 1.01 * last[0], last
