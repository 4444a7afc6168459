"""Checkpoints and resuming as they failed for users; each test is named after its report.

A run is cut off two updates after a checkpoint and started again. In the same layout what it leaves is compared byte
for byte with a run that was never cut off: whole weights and both moments from the last checkpoint, and every line of
metrics. In another layout the comparison is in fp64, where other orders of the same sums stay far below any fault. The
format itself, pruning and disk faults are in tests/checkpoint (C11, C12, C18, C22), a real kill in test_kill.py.
"""

import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, load_weights, save
from mtmegatron.errors import UserError
from mtmegatron.train.resume import resume
from mtmegatron.verify.protocol import batches
from tests.field.training import (
    contents,
    engine_of,
    lines_of,
    loop_of,
    name,
    run,
    same_bits,
    spread,
    state_of,
)
from tests.tiny import tiny

RUN = {
    "model": {"layers": 2, "tied": True, "bias_qkv": True},
    "train": {"steps": 6, "global_batch": 4, "micro_batch": 1, "eval_every": 2, "eval_batches": 1},
    "optimizer": {"warmup": 2, "min_lr": 1e-4, "decay_embeddings": True},
    "checkpoint": {"every": 3},
    "log": {"tensorboard": False},
}
EPS = torch.finfo(torch.float64).eps


def whole_and_cut(pool, tmp_path, config, first, then, precision):
    """Folders of a run in layout `first`, and of one cut off at step 5 of 6 that went on from 3 in layout `then`."""
    run(pool, config, first, tmp_path / "whole", precision)
    run(pool, config, first, tmp_path / "cut", precision, stop=4)
    assert Folder(tmp_path / "cut" / "checkpoints").steps() == [3]
    run(pool, config, then, tmp_path / "cut", precision)
    return tmp_path / "whole", tmp_path / "cut"


# ---- the same layout: the same bits ----

SAME = [
    {},
    {"tensor": 2},
    {"pipeline": 2},
    {"pipeline": 4},
    {"data": 2, "zero": 1},
    {"tensor": 2, "pipeline": 2, "data": 2, "zero": 1},
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", SAME, ids=name)
def test_c01_c13_c19_a_resumed_run_is_the_uninterrupted_one(layout, precision, pool, tmp_path):
    whole, cut = whole_and_cut(pool, tmp_path, tiny(RUN), layout, layout, precision)
    assert same_bits(state_of(cut, 6), state_of(whole, 6))
    assert lines_of(cut) == lines_of(whole)
    assert [line["step"] for line in lines_of(whole)] == [1, 2, 3, 4, 5, 6]
    if precision == "bf16":
        assert {t.dtype for t in state_of(cut, 6).values()} == {torch.float32}


@pytest.mark.parametrize(
    "optimizer",
    [{"decay": "linear"}, {"decay": "constant", "min_lr": 0.0}, {"unit": "samples", "warmup": 10}],
    ids=name,
)
def test_c01_every_schedule_goes_on_where_it_was(optimizer, pool, tmp_path):
    whole, cut = whole_and_cut(pool, tmp_path, tiny(RUN, optimizer=optimizer), {}, {}, "fp32")
    rates = [line["lr"] for line in lines_of(whole)]
    assert [line["lr"] for line in lines_of(cut)] == rates and len(set(rates)) > 1


# ---- another layout: the same run to rounding ----

# Adam divides by the root of the second moment plus 1e-8: rounding of gradients (64 units, of size 1) may move an
# element whose gradient is near zero by lr x 64 eps / 1e-8 a step; later gradients, and so the moments, follow.
MOVED = 6 * 1e-2 * 64 * EPS / 1e-8
PAIRS = [
    ({"data": 4, "zero": 1}, {}),
    ({"data": 4, "zero": 1}, {"data": 2, "zero": 1}),
    ({"data": 4, "zero": 1}, {"data": 2, "zero": 0}),
    ({"tensor": 2, "pipeline": 2}, {}),
    ({"tensor": 2, "pipeline": 2}, {"tensor": 4}),
    ({"tensor": 4}, {"pipeline": 4}),
    ({}, {"tensor": 2, "data": 2, "zero": 1, "pipeline": 2}),
    ({"pipeline": 2, "data": 2, "zero": 1}, {"tensor": 2, "sequence": False}),
]


@pytest.mark.parametrize("first, then", PAIRS, ids=name)
def test_c07_c16_another_layout_goes_on_with_the_same_run(first, then, pool, tmp_path):
    whole, cut = whole_and_cut(pool, tmp_path, tiny(RUN), first, then, "fp64")
    a, b = state_of(cut, 6), state_of(whole, 6)
    assert a.keys() == b.keys()
    for key in b:
        assert (a[key] - b[key]).abs().max() <= MOVED * max(1.0, float(b[key].abs().max())), key
        if "exp_avg" in key:
            assert float((a[key] - b[key]).norm()) <= 1e3 * MOVED * float(b[key].norm()), key
    for mine, right in zip(lines_of(cut), lines_of(whole), strict=True):
        assert mine == pytest.approx(right, rel=MOVED)
    extras = [Folder(f / "checkpoints").open(6).extra for f in (whole, cut)]
    assert [extra["updates"] for extra in extras] == [6, 6]


def load_and_save_rank(rank, world, config, layout, source, target):
    engine = engine_of(config, layout, rank, world, "fp32")
    store = Folder(source).open(6)
    load(store, engine.optimizer, engine.mesh)
    engine.optimizer.publish()
    save(Folder(target), 6, engine.optimizer, engine.mesh, {})


def test_c09_state_passes_through_other_layouts_bit_for_bit(pool, tmp_path):
    run(pool, tiny(RUN), {"tensor": 2}, tmp_path)
    right, source = state_of(tmp_path, 6), tmp_path / "checkpoints"
    assert {key.split("/")[0] for key in right} == {"weight", "exp_avg", "exp_avg_sq"}
    chain = [
        {"tensor": 1},
        {"tensor": 4},
        {"data": 3, "zero": 1},
        {"pipeline": 2, "tensor": 2},
        {"data": 4, "zero": 1, "pipeline": 2},
        {"tensor": 2},
    ]
    for number, layout in enumerate(chain):
        target = tmp_path / str(number)
        config = tiny(RUN, train={"global_batch": 12})
        spread(pool, load_and_save_rank, layout, config, layout, source, target)
        assert same_bits(contents(Folder(target).open(6)), right), layout
        source = target


# ---- what changed ----


@pytest.fixture(scope="module")
def finished(pool, tmp_path_factory):
    """The folder of a serial run of 6 steps, with checkpoints of 3 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    run(pool, tiny(RUN), {}, folder)
    return folder


def resumed(config, folder, say=lambda text: None):
    """An engine after `resume` from a folder, and the step."""
    engine = engine_of(config, {}, precision="fp32")
    return engine, resume(engine, Folder(folder / "checkpoints"), {}, say)


def test_c02_the_step_decides_the_learning_rate_with_and_without_moments(finished):
    rates = [line["lr"] for line in lines_of(finished)]
    for moments in (True, False):
        engine = engine_of(tiny(RUN), {}, precision="fp32")
        load(Folder(finished / "checkpoints").open(3), engine.optimizer, engine.mesh, moments=moments)
        assert engine.optimizer.updates == (3 if moments else 0)
        assert any(state.tensors["exp_avg"].any() for state in engine.optimizer.states) == moments
        assert engine.step(batches(engine, 3), 3).lr == rates[3]
        assert engine.optimizer.updates == (4 if moments else 1)


@pytest.mark.parametrize(
    "key, section, changes, words",
    [
        ("optimizer.lr", "optimizer", {"lr": 6e-4}, "optimizer.lr: 0.01 in the checkpoint, 0.0006 now"),
        ("optimizer.decay", "optimizer", {"decay": "linear"}, "optimizer.decay: cosine in the checkpoint, linear now"),
        ("train.global_batch", "train", {"global_batch": 8}, "train.global_batch: 4 in the checkpoint, 8 now"),
        ("train.seed", "train", {"seed": 7}, "train.seed: 1234 in the checkpoint, 7 now"),
        ("train.steps", "train", {"steps": 9}, "train.steps: 6 in the checkpoint, 9 now"),
        ("model.rope_base", "model", {"rope_base": 5e5}, "model.rope_base: 10000.0 in the checkpoint, 500000.0 now"),
    ],
)
def test_c03_a_changed_value_is_refused_with_both_values_until_it_is_accepted(key, section, changes, words, finished):
    changed = {section: changes}
    with pytest.raises(UserError) as caught:
        resumed(tiny(RUN, changed), finished)
    assert words in str(caught.value) and "train.accept_changes" in str(caught.value)
    engine, step = resumed(tiny(RUN, changed, train={"accept_changes": [key]}), finished)
    assert step == 6 and engine.step(batches(engine, 6), 6).fault == ""


def test_c03_an_accepted_schedule_is_the_one_that_runs(pool, tmp_path):
    config = tiny(RUN, optimizer={"lr": 6e-4, "decay": "constant", "min_lr": 0.0})
    run(pool, config, {}, tmp_path, stop=4)
    changed = tiny(
        RUN, optimizer={"lr": 6e-4, "min_lr": 6e-5}, train={"accept_changes": ["optimizer.decay", "optimizer.min_lr"]}
    )
    run(pool, changed, {}, tmp_path)
    rates = [line["lr"] for line in lines_of(tmp_path)]
    assert rates[2] == 6e-4 and rates[3] < 6e-4 and rates[-1] == pytest.approx(6e-5, rel=8 * EPS)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"zero": 1, "bucket_mb": 7.0}},
        {"log": {"every": 3}},
        {"checkpoint": {"keep": 9}},
        {"train": {"micro_batch": 4, "eval_every": 5}},
    ],
)
def test_c03_how_a_run_executes_may_change_freely(changes, finished):
    assert resumed(tiny(RUN, changes), finished)[1] == 6


@pytest.mark.parametrize(
    "model, words",
    [
        ({"width": 32}, ["layers.0.attention.query.weight", "(64, 64) in the checkpoint", "(64, 32) in this model"]),
        ({"layers": 3}, ["layers.2.attention.query.weight: not in the checkpoint"]),
        ({"tied": False}, ["head.weight: not in the checkpoint"]),
        ({"vocab": 300}, ["embedding.weight", "(259, 64)", "(300, 64)"]),
    ],
)
def test_a_checkpoint_of_another_architecture_names_keys_and_shapes(model, words, finished):
    with pytest.raises(UserError) as caught:
        resumed(tiny(RUN, model={"head_size": 16} | model), finished)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_run_that_must_resume_refuses_to_begin(tmp_path):
    with pytest.raises(UserError, match="resume: must.*holds no good checkpoint"):
        loop_of(tiny(RUN, train={"resume": "must"}), {}, "fp32", tmp_path).run()


# ---- randomness ----


def test_c05_neither_steps_nor_resuming_draw_from_the_global_generators(finished):
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    engine, step = resumed(tiny(RUN), finished)
    mine = batches(engine, step)
    engine.step(mine, step)
    engine.evaluate(mine)
    assert torch.equal(torch.get_rng_state(), states[0]) and (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


# ---- damage ----


def copied(finished, tmp_path) -> Path:
    """A copy of the checkpoints that may be damaged; returns the shard of step 6."""
    subprocess.run(["cp", "-r", str(finished / "checkpoints"), str(tmp_path / "checkpoints")], check=True)
    return Folder(tmp_path / "checkpoints").path(6) / "rank-00000.safetensors"


def flip(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-100] ^= 4
    shard.write_bytes(data)


def shorten(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


def empty_manifest(shard: Path) -> None:
    (shard.parent / "manifest.json").write_bytes(b"")


@pytest.mark.parametrize(
    "damage, words",
    [(flip, "CRC32"), (shorten, "bytes instead of"), (empty_manifest, "checksum"), (Path.unlink, "cannot be found")],
)
def test_c12_a_damaged_newest_is_passed_over_aloud_for_the_one_before(damage, words, finished, tmp_path):
    shard, said = copied(finished, tmp_path), []
    damage(shard)
    engine, step = resumed(tiny(RUN), tmp_path, said.append)
    assert step == 3 and engine.optimizer.updates == 3
    assert any("step 6" in line and words in line and str(shard.parent) in line for line in said), said
    assert "resumed from step 3" in said[-1]
    right = engine_of(tiny(RUN), {}, precision="fp32")
    load(Folder(tmp_path / "checkpoints").open(3), right.optimizer, right.mesh)
    for mine, other in zip(engine.optimizer.states, right.optimizer.states, strict=True):
        assert same_bits(mine.tensors, other.tensors)


@pytest.mark.parametrize("damage", [flip, shorten])
def test_c12_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(damage, finished, tmp_path):
    damage(copied(finished, tmp_path))
    damage(Folder(tmp_path / "checkpoints").path(3) / "rank-00000.safetensors")
    with pytest.raises(UserError, match="no checkpoint in .* is good"):
        resumed(tiny(RUN), tmp_path)


def resume_rank(rank, world, config, layout, folder):
    said = []
    engine = engine_of(config, layout, rank, world, "fp32")
    return resume(engine, Folder(folder / "checkpoints"), {}, said.append), said


def test_c12_a_byte_that_one_rank_alone_reads_sends_all_ranks_to_the_one_before(pool, tmp_path):
    layout = {"pipeline": 2}
    run(pool, tiny(RUN), layout, tmp_path)
    flip(Folder(tmp_path / "checkpoints").path(6) / "rank-00001.safetensors")
    (first, said), (second, _) = spread(pool, resume_rank, layout, tiny(RUN), layout, tmp_path)
    assert first == second == 3 and any("step 6" in line for line in said)


def test_c12_the_run_says_what_it_passed_over(finished, tmp_path, capsys):
    flip(copied(finished, tmp_path))
    loop_of(tiny(RUN), {}, "fp32", tmp_path).run()
    out = capsys.readouterr().out
    assert "passing over the checkpoint of step 6" in out and "resumed from step 3" in out
    assert same_bits(state_of(tmp_path, 6), state_of(finished, 6)), "and what it computes again is the same"


# ---- masters, copies, memory ----


def copies_rank(rank, world, config, layout, folder, precision):
    """After a load: whether working weights are the rounded masters of whoever owns them, on every rank."""
    engine = engine_of(config, layout, rank, world, precision)
    step = resume(engine, Folder(folder / "checkpoints"), {}, lambda text: None)
    store = Folder(folder / "checkpoints").open(step)
    for key, param in engine.model.named_parameters():
        offset, size = param.placement.offset_and_size(engine.mesh.layout, rank)
        assert torch.equal(param, store.read(f"weight/{key}", offset, size).to(param.dtype)), key
    for state in engine.optimizer.states:
        assert torch.equal(state.bucket.values[state.owned], state.master.to(state.bucket.values.dtype))
        state.tensors["exp_avg"].add_(1.0)  # C20: a moment is no other tensor's memory
        assert torch.equal(state.bucket.values[state.owned], state.master.to(state.bucket.values.dtype))
        assert not torch.equal(state.tensors["exp_avg"], state.tensors["exp_avg_sq"]) and state.tensors["exp_avg_sq"].abs().max() < 1.0
    return step


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_c14_c20_after_a_load_every_rank_works_with_the_weights_that_were_saved(precision, pool, tmp_path):
    layout = {"data": 2, "zero": 1}
    run(pool, tiny(RUN), layout, tmp_path, precision)
    assert spread(pool, copies_rank, layout, tiny(RUN), layout, tmp_path, precision) == [6, 6]


def test_c13_weights_alone_make_the_masters_anew(finished):
    engine = engine_of(tiny(RUN), {}, precision="bf16")
    store = Folder(finished / "checkpoints").open(6)
    load_weights(store, engine.model, engine.mesh)
    engine.optimizer.refresh_masters()
    for state in engine.optimizer.states:
        for item in state.bucket.items:
            saved = store.read(f"weight/{item.name}").to(torch.bfloat16)
            assert torch.equal(state.master[item.start : item.stop].view_as(item.param), saved.float()), item.name


def test_p40_the_loss_after_a_load_is_that_before_the_save(finished, tmp_path):
    engine, step = resumed(tiny(RUN), finished)
    save(Folder(tmp_path), step, engine.optimizer, engine.mesh, {"config": engine.config.model_dump(mode="json")})
    before = engine.evaluate(batches(engine, step))
    other = engine_of(tiny(RUN), {}, precision="fp32")
    assert resume(other, Folder(tmp_path), {}, lambda text: None) == step
    assert other.evaluate(batches(other, step)) == before


# ---- early saves ----


def save_as(engine, step, folder):
    """The engine's state as the checkpoint of a step."""
    save(Folder(folder / "checkpoints"), step, engine.optimizer, engine.mesh, {"config": engine.config.model_dump(mode="json")})


def test_c17_a_checkpoint_of_step_zero_is_loaded(tmp_path):
    config = tiny(RUN)
    engine = engine_of(config, {}, precision="fp32")
    with torch.no_grad():
        engine.model.norm.weight.fill_(1.5)  # as weights that came from elsewhere
    save_as(engine, 0, tmp_path)
    other, step = resumed(config, tmp_path)
    assert step == 0 and other.optimizer.updates == 0 and (other.model.norm.weight == 1.5).all()
    assert other.step(batches(other, 0), 0) == engine.step(batches(engine, 0), 0)


def test_c17_a_checkpoint_before_the_first_good_step_is_loaded(tmp_path):
    config = tiny(RUN)
    engine = engine_of(config, {}, precision="fp32")
    mine = batches(engine, 0)
    for batch in mine:
        batch.labels.fill_(-100)
    assert engine.step(mine, 0).fault and engine.optimizer.updates == 0
    save_as(engine, 1, tmp_path)
    other, step = resumed(config, tmp_path)
    assert step == 1 and other.optimizer.updates == 0
    assert other.step(batches(other, 1), 1) == engine.step(batches(engine, 1), 1)
