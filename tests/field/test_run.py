"""Faults of whole runs: what is logged, NaN, sums in 16 bits, rate and clipping as applied, evaluation.

Each test is named after the report of a user of another framework. Schedules themselves are in tests/optim, messages of
the configuration in tests/config, the files of metrics in tests/train.
"""

import contextlib
import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, save
from mtmegatron.config import constraints
from mtmegatron.errors import UserError
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.ops.cross_entropy import cross_entropy
from mtmegatron.parallel.gradient import WeightQueue
from mtmegatron.parallel.tensor import Moves, linear
from mtmegatron.precision.gemm import Gemm
from mtmegatron.verify.protocol import batches
from tests.field.training import (
    engine_of,
    lines_of,
    loop_of,
    make_batch,
    name,
    parts_of,
    run,
    same_bits,
    spread,
    state_of,
)
from tests.tiny import tiny

RUN = {
    "model": {"layers": 2},
    "train": {"steps": 6, "global_batch": 8, "micro_batch": 1, "eval_every": 2, "eval_batches": 1},
    "log": {"tensorboard": False},
}
EPS32, EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


# ---- what is logged ----


def test_t05_every_value_is_on_the_axis_of_updates_also_after_a_resume(pool, tmp_path):
    config = tiny(RUN, checkpoint={"every": 3})
    run(pool, config, {}, tmp_path, stop=4)
    run(pool, config, {}, tmp_path)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["samples"] for line in lines] == [8, 16, 24, 32, 40, 48]
    assert [line["step"] for line in lines if "valid_loss" in line] == [2, 4, 6]


@pytest.mark.parametrize("layout", [{"pipeline": 2, "data": 2}, {"tensor": 2, "data": 2, "zero": 1}], ids=name)
def test_t06_t07_the_logged_loss_and_tokens_are_those_of_the_global_batch(layout, pool, tmp_path):
    config = tiny(RUN, train={"steps": 2, "eval_every": 0})
    run(pool, config, {}, tmp_path / "serial", "fp64")
    run(pool, config, layout, tmp_path / "parallel", "fp64")
    serial, parallel = lines_of(tmp_path / "serial"), lines_of(tmp_path / "parallel")
    engine = engine_of(config, {})
    mine = batches(engine, 0)
    means = [total / tokens for total, tokens in (engine.evaluate([batch]) for batch in mine)]
    counts = [int((batch.labels != -100).sum()) for batch in mine]
    assert max(means) - min(means) > 0.01, "the micro-batches are alike: the last one's loss would not show"
    right = sum(m * n for m, n in zip(means, counts)) / sum(counts)
    for lines in (serial, parallel):
        assert lines[0]["loss"] == pytest.approx(right, rel=4096 * EPS64)
        assert lines[0]["tokens"] == sum(counts) < 8 * 32
    assert [line["tokens"] for line in parallel] == [line["tokens"] for line in serial]
    # the second loss sees one Adam update, which may carry rounding / 1e-8, see test_parallel.tolerance_after
    assert parallel[1]["loss"] == pytest.approx(serial[1]["loss"], rel=64 * EPS64 / 1e-8)


# ---- NaN ----


def poisoned_rank(rank, world, layout, precision, folder, steps, last_bad):
    """A run whose last stage gives NaN in micro-batch 2 of steps 3 to `last_bad`: what it did and said."""
    config = tiny(RUN, model={"layers": 4}, train={"steps": steps, "max_skipped": 2, "eval_every": 0})
    loop = loop_of(config, layout, precision, folder, rank, world)
    engine, original = loop.engine, loop.engine.model.forward
    bad = {batches(engine, step)[2].tokens.numpy().tobytes() for step in range(2, last_bad)}

    def forward(x, batch, **rest):
        out = original(x, batch, **rest)
        return out * math.nan if engine.last and batch.tokens.numpy().tobytes() in bad else out

    engine.model.forward = forward
    weights, updates, faults, said = {}, [], [], io.StringIO()

    def after(step, result):
        weights[step] = parts_of(engine)
        updates.append(engine.optimizer.updates)
        faults.append(result.fault)

    loop.after_step = after
    with contextlib.redirect_stdout(said):
        try:
            loop.run()
            end = ""
        except UserError as error:
            end = str(error)
    same = all((weights[1][n][2] == weights[2][n][2]).all() for n in weights[1]) if 2 in weights else None
    moved = any((weights[1][n][2] != weights[3][n][2]).any() for n in weights[1]) if 3 in weights else None
    return same, moved, updates, faults, said.getvalue(), end


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}, {"pipeline": 2, "data": 2, "zero": 1}], ids=name)
def test_m05_a_nan_is_told_once_and_changes_nothing(layout, precision, pool, tmp_path):
    ranks = spread(pool, poisoned_rank, layout, layout, precision, tmp_path, 5, 3)
    for same, moved, updates, faults, _, end in ranks:
        assert same and moved and end == ""
        assert updates == [1, 2, 2, 3, 4] and [bool(fault) for fault in faults] == [False, False, True, False, False]
    (told,) = [line for line in ranks[0][4].splitlines() if line.startswith("step 3 skipped")]
    assert (
        "not finite" in told
        and "forward pass of micro-batch 2" in told
        and f"stage {layout.get('pipeline', 1) - 1}" in told
    )
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and ["skipped" in line for line in lines] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert lines[2]["grad_norm"] == "NaN" and lines[2]["loss"] == "NaN" and math.isfinite(lines[2]["loss_mean"])
    good = [line["loss"] for line in lines[:2]]
    assert min(good) <= lines[2]["loss_mean"] <= max(good)


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}], ids=name)
def test_m05_m03_a_run_of_nothing_but_nan_stops(layout, pool, tmp_path):
    for *_, updates, faults, _, end in spread(pool, poisoned_rank, layout, layout, "fp32", tmp_path, 9, 9):
        assert len(updates) == 4 and updates[-1] == 2  # 2 good ones; the third bad step in a row ends the run
        assert "step 5 skipped" in end and "3 steps in a row" in end and "max_skipped: 2" in end


# ---- 16 bits ----


@pytest.mark.parametrize("native", [True, False])
def test_m01_gradients_add_up_in_fp32(native):
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    weight.grad_sum = torch.zeros(1, 1)
    moves = Moves(Mesh(Layout())["tensor"], Gemm(native), WeightQueue())
    for gradient in [1.0] * 256 + [2.0**-9] * 256:
        x = torch.ones(1, 1, dtype=torch.bfloat16)
        linear(x, [weight], [], moves).backward(torch.full((1, 1), gradient, dtype=torch.bfloat16))
    assert weight.grad_sum.item() == 256.5 and weight.grad is None


def many_micro_batches_rank(rank, world, layout, micro_batch):
    engine = engine_of(tiny(RUN, train={"global_batch": 64, "micro_batch": micro_batch}), layout, rank, world, "bf16")
    mine = batches(engine, 0)
    return engine.gradients(mine, engine.count_tokens(mine))[2], parts_of(engine, gradients=True)


@pytest.mark.parametrize("layout", [{}, {"data": 2}], ids=name)
def test_m01_many_bf16_micro_batches_give_the_gradient_of_one(layout, pool):
    (norm, gradients), *_ = spread(pool, many_micro_batches_rank, {}, {}, 64)
    for other_norm, other in spread(pool, many_micro_batches_rank, layout, layout, 1):
        # each element is a sum of terms of bf16; were the sum bf16 too, 64 additions would leave up to 64 x 2^-9
        assert other_norm == pytest.approx(norm, rel=2**-9)
        for key, (_, _, value) in gradients.items():
            assert np.linalg.norm(other[key][2] - value) <= 2**-6 * np.linalg.norm(value), key


def test_m10_a_bf16_loss_near_36_has_no_grid():
    draw = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 259, generator=draw) + F.one_hot(torch.arange(64), 259) * 38).bfloat16()
    labels = torch.arange(64) + 100
    loss, _ = cross_entropy(logits, labels)
    right = F.cross_entropy(logits.double(), labels, reduction="none")
    assert 30 < right.mean() < 45 and loss.dtype == torch.float32
    assert (loss.double() - right).abs().max() < 16 * EPS32 * right.max()


# ---- the optimizer in a run ----


def decayed_rank(rank, world, layout, changes, folder=None):
    """How a step with zero gradients, rate 0.1 and decay 0.1 changes each parameter and buffer: the ratio new / old, by name.

    `folder`: the step is made by a run that is resumed from a checkpoint there."""
    config = tiny(changes, optimizer=changes.get("optimizer", {}) | {"weight_decay": 0.1})
    engine = engine_of(config, layout, rank, world, "fp32")
    with torch.no_grad():
        for tensor in (*engine.model.parameters(), *filter(torch.is_floating_point, engine.buckets.buffers.values())):
            tensor.add_(0.25)  # so that zeros show too
    engine.optimizer.refresh_masters()
    if folder is not None:
        save(Folder(folder), 1, engine.optimizer, engine.mesh, {})
        engine = engine_of(config, layout, rank, world, "fp32")
        load(Folder(folder).open(1), engine.optimizer, engine.mesh)
        engine.optimizer.publish()
    buffers = {key: buffer.clone() for key, buffer in engine.buckets.buffers.items()}
    before = parts_of(engine)
    engine.buckets.start()
    engine.buckets.finish()
    engine.optimizer.step(0.1, 1.0)
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in engine.buckets.buffers.items()), "biases of routers are none of it"
    return {key: (value / before[key][2]).ravel() for key, (_, _, value) in parts_of(engine).items()}


FAMILIES = {
    "llama": {},
    "qwen": {"model": {"bias_qkv": True, "tied": True}},
    "gpt2": {
        "model": {
            "norm": "layernorm",
            "positions": "learned",
            "bias_qkv": True,
            "bias_attention_out": True,
            "bias_mlp": True,
        }
    },
    "qwen3": {"model": {"qk_norm": True}},
    "mixtral": {"model": {"moe": {"experts": 4}}},
    "deepseek": {
        "model": {
            "kv_heads": None, "latent": {"kv_rank": 16, "query_rank": 24, "nope": 8, "rope": 8, "value": 8}, "prediction": {},
            "moe": {"experts": 4, "shared": 1, "bias_rate": 0.001, "score": "sigmoid", "first_dense": 1},
        }
    },
    "embeddings": {"optimizer": {"decay_embeddings": True}, "model": {"positions": "learned"}},
}


@pytest.mark.parametrize(
    "layout", [{}, {"data": 2, "zero": 1}, {"data": 2, "zero": 2}, {"tensor": 2}, {"pipeline": 2, "data": 2, "zero": 1}], ids=name
)
@pytest.mark.parametrize("family", FAMILIES)
def test_o02_matrices_decay_and_norms_biases_and_tables_do_not(family, layout, pool):
    check_decay(family, spread(pool, decayed_rank, layout, layout, FAMILIES[family]))


@pytest.mark.parametrize("family", ["gpt2", "deepseek"])
def test_o02_after_a_resume_too(family, pool, tmp_path):
    layout = {"data": 2, "zero": 1}
    check_decay(family, spread(pool, decayed_rank, layout, layout, FAMILIES[family], tmp_path))


def check_decay(family, ranks):
    seen = set()
    for ratios in ranks:
        for key, ratio in ratios.items():
            table = key.startswith(("embedding", "positions"))
            decays = family == "embeddings" if table else not key.endswith("bias") and "norm" not in key
            assert ratio == pytest.approx(0.99 if decays else 1.0, rel=4 * EPS32 if decays else 0), key
            seen.add(decays)
    assert seen == {True, False}


def rates_rank(rank, world, layout, micro_batch, unit):
    schedule = {"warmup": 4 * (16 if unit == "samples" else 1), "unit": unit}
    config = tiny(RUN, train={"steps": 8, "global_batch": 16, "micro_batch": micro_batch}, optimizer=schedule)
    engine = engine_of(config, layout, rank, world, "fp32")
    return [engine.step(batches(engine, step), step).lr for step in range(8)]


@pytest.mark.parametrize("unit", ["steps", "samples"])
def test_o03_o04_the_rate_counts_updates_whatever_data_ranks_and_micro_batches(unit, pool):
    right = [2.5e-3, 5e-3, 7.5e-3, 1e-2, *(1e-2 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3, 4))]
    for data in (1, 2, 4):
        for micro_batch in (1, 4):
            layout = {"data": data}
            assert (
                spread(pool, rates_rank, layout, layout, micro_batch, unit)
                == [pytest.approx(right, abs=1e-2 * 8 * EPS64)] * data
            )


def test_o01_o09_the_first_update_is_the_logged_rate_times_the_sign_of_the_gradient():
    config = tiny(RUN, optimizer={"lr": 1e-3, "warmup": 10, "weight_decay": 0.0, "clip": 0.0}, train={"steps": 20})
    engine = engine_of(config, {})
    empty = make_batch(259, [32], 0, valid=[0])
    assert engine.step([empty], 0).fault and engine.optimizer.updates == 0, "a skipped step is no update"
    before = parts_of(engine)
    mine = batches(engine, 0)
    engine.gradients(mine, engine.count_tokens(mine))
    gradients = parts_of(engine, gradients=True)
    result = engine.step(mine, 0)
    assert result.lr == pytest.approx(1e-4, rel=EPS64) and engine.optimizer.updates == 1
    for key, (_, _, value) in parts_of(engine).items():
        g = gradients[key][2]
        moved = value - before[key][2]
        assert moved == pytest.approx(
            -result.lr * g / (abs(g) + 1e-8), abs=64 * EPS64 * abs(before[key][2]).max() + 1e-4 * 64 * EPS64
        ), key


def test_o09_a_parameter_without_gradient_at_first_is_corrected_by_the_updates_made():
    engine = engine_of(tiny(RUN, optimizer={"weight_decay": 0.0, "clip": 0.0}), {})
    weight = engine.model.norm.weight
    for update, gradient in enumerate((0.0, 0.5), start=1):
        engine.buckets.start()
        weight.grad_sum.fill_(gradient)
        engine.buckets.finish()
        before = weight.detach().clone()
        engine.optimizer.step(1e-2, 1.0)
        m, v = 0.1 * gradient / (1 - 0.9**update), 0.05 * gradient**2 / (1 - 0.95**update)
        assert (weight.detach() - before).numpy() == pytest.approx(
            -1e-2 * m / (math.sqrt(v) + 1e-8), rel=64 * EPS64, abs=EPS64
        )


ONE_BIT = {"model": {"layers": 2}, "optimizer": {"kind": "onebit-adam", "onebit": {"freeze": 2}, "clip": 0.1}}


def one_bit_rank(rank, world, layout):
    engine = engine_of(tiny(ONE_BIT), layout, rank, world, "fp32")
    results = [engine.step(batches(engine, step), step) for step in range(4)]
    return [(r.fault, r.grad_norm) for r in results], engine.buckets.reduces


@pytest.mark.parametrize("layout", [{"data": 2, "zero": 1}, {"tensor": 2, "data": 2, "zero": 1}], ids=name)
def test_o07_one_bit_adam_runs_with_zero_1_and_a_clip(layout, pool):
    """DeepSpeed#5046, #742. The clip takes part in both stages."""
    for results, reduces in spread(pool, one_bit_rank, layout, layout):
        assert not reduces and all(not fault and norm > 0.1 for fault, norm in results)


@pytest.mark.parametrize("zero", [2, 3])
def test_o07_with_zero_2_and_3_the_pair_is_refused_by_name(zero):
    (line,) = constraints.faults(tiny(ONE_BIT, parallel={"zero": zero}), 2)
    assert line.startswith(f"`parallel.zero: {zero}` with `optimizer.kind: onebit-adam`: ") and "remove that, or use another kind" in line


@pytest.mark.parametrize("clip", [0.1, 0.0, 1e6])
def test_o11_the_norm_is_told_before_clipping_and_what_is_applied_is_clipped(clip):
    config = tiny(RUN, optimizer={"clip": clip})
    engine = engine_of(config, {})
    mine = batches(engine, 0)
    *_, norm = engine.gradients(mine, engine.count_tokens(mine))
    result = engine.step(mine, 0)
    assert result.grad_norm == norm > 0.5
    applied = math.sqrt(sum(float((state.tensors["exp_avg"] / 0.1).square().sum()) for state in engine.optimizer.states))
    # the fused update takes the factor in fp32
    assert applied == pytest.approx(0.1 if clip == 0.1 else norm, rel=EPS32 if clip == 0.1 else 64 * EPS64)


# ---- evaluation ----


def evaluated_rank(rank, world, layout, evaluate):
    engine = engine_of(tiny(RUN), layout, rank, world, "fp32")
    results = []
    for step in range(4):
        mine = batches(engine, step)
        if evaluate:
            sums = [bucket.gradients.clone() for bucket in engine.buckets.buckets]
            engine.evaluate([make_batch(259, [32], 7), make_batch(259, [11], 8)])
            assert all(torch.equal(b.gradients, before) for b, before in zip(engine.buckets.buckets, sums))
        results.append(engine.step(mine, step))
    assert engine.model.training
    return results, parts_of(engine)


@pytest.mark.parametrize(
    "layout", [{}, {"pipeline": 2, "data": 2, "zero": 1}, {"tensor": 2, "sequence": False}], ids=name
)
def test_g07_evaluation_between_steps_changes_no_bit(layout, pool):
    plain, evaluated = (spread(pool, evaluated_rank, layout, layout, flag) for flag in (False, True))
    for (results, weights), (others, other_weights) in zip(plain, evaluated):
        assert results == others and all((weights[key][2] == other_weights[key][2]).all() for key in weights)


def test_g07_a_run_that_evaluates_leaves_the_weights_of_one_that_does_not(pool, tmp_path):
    for folder, every in (("often", 1), ("never", 0)):
        run(pool, tiny(RUN, train={"eval_every": every}), {}, tmp_path / folder)
    assert same_bits(state_of(tmp_path / "often", 6), state_of(tmp_path / "never", 6))
