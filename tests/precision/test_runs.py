"""fp16 and fp8 in runs: overflow, saving and resuming; cases from the field are named after their number."""

import json
import math

import pytest
import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, save
from mtmegatron.config.constraints import check
from mtmegatron.errors import UserError
from mtmegatron.plan.collectives import step_counts, with_micro_batches
from mtmegatron.verify.protocol import batches, laid_out
from tests.field.training import engine_of, lines_of, loop_of, run, same_bits, state_of
from tests.tiny import tiny

RUN = {
    "train": {"steps": 6, "global_batch": 4, "micro_batch": 2, "eval_every": 2, "eval_batches": 1}, "optimizer": {"warmup": 2},
    "checkpoint": {"every": 3}, "log": {"tensorboard": False},
}  # fmt: skip


def config_of(precision: str, **settings):
    section = "loss_scale" if precision == "fp16" else "fp8"
    return tiny(RUN, train=RUN["train"] | {"precision": precision, section: settings})


def step(engine, number: int):
    return engine.step(batches(engine, number), number)


def losses_after_overflow(rank: int, world: int, config, layout: dict) -> list:
    """Three steps, in the second of which the gradient of one rank is infinite: (fault, scale, updates, whether weights moved) of each."""
    engine, seen = engine_of(config, layout, rank, world, "fp16"), []
    finish = engine.buckets.finish
    for number in range(3):
        if number == 1 and rank == world - 1:
            engine.buckets.finish = lambda: (finish(), engine.buckets.buckets[0].own_gradients.view(-1)[0].fill_(math.inf))
        else:
            engine.buckets.finish = finish
        before = [b.own_values.clone() for b in engine.buckets.buckets]
        result = step(engine, number)
        moved = any(not torch.equal(a, b.own_values) for a, b in zip(before, engine.buckets.buckets))
        seen.append((result.fault, result.overflow, engine.loss_scale.scale, engine.optimizer.updates, moved))
    return seen


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data": 2, "zero": 1}, {"pipeline": 2}], ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout, pool):
    first, second = pool.run(losses_after_overflow, 2, config_of("fp16", hysteresis=1), layout)
    assert first == second
    assert [s[1:] for s in first] == [(False, 65536, 1, True), (True, 32768, 1, False), (False, 32768, 2, True)]
    assert first[1][0] == "the gradient overflowed at a loss scale of 65536, the next is 32768"


def test_m12_the_norm_is_that_of_gradients_without_the_scale():
    """transformers#40799: clipping gradients that still had the scale in them."""
    results = {p: step(engine_of(config_of(p), {}, precision=p), 0) for p in ("fp32", "fp16")}
    assert results["fp16"].grad_norm == pytest.approx(results["fp32"].grad_norm, rel=0.01)
    assert results["fp16"].loss == pytest.approx(results["fp32"].loss, rel=1e-3)


def test_small_gradients_survive_by_the_scale():
    """Without it, what a token adds to a gradient is below 6e-8, the smallest number of fp16."""
    counts = {}
    for initial in (1.0, 65536.0):
        config = tiny(RUN, train=RUN["train"] | {"precision": "fp16", "loss_scale": {"initial": initial}}, model={"init_std": 1e-3})
        engine = engine_of(config, {}, precision="fp16")
        mine = batches(engine, 0)
        engine.gradients(mine, engine.count_tokens(mine))
        counts[initial] = int(engine.buckets.zero_gradients(0.0))
    assert counts[65536.0] < counts[1.0]


def test_m03_a_run_that_no_scale_can_help_stops_and_says_so(tmp_path):
    """DeepSpeed#697: an infinite gradient at every step."""
    loop = loop_of(config_of("fp16", initial=8, minimum=2, hysteresis=1), {}, "fp16", tmp_path)
    finish = loop.engine.buckets.finish
    loop.engine.buckets.finish = lambda: (finish(), loop.engine.buckets.buckets[0].own_gradients.view(-1)[0].fill_(math.inf))
    with pytest.raises(UserError, match="`train.loss_scale.minimum: 2`"):
        loop.run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "skipped" in line] == [1, 2]  # 8 -> 4 -> 2, and the third stops


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale():
    engine = engine_of(config_of("fp16"), {}, precision="fp16")
    with torch.no_grad():
        engine.model.norm.weight.fill_(math.inf)
    result = step(engine, 0)
    assert result.fault and not result.overflow and engine.loss_scale.scale == 65536


def test_m04_scale_counts_and_hysteresis_come_back(tmp_path):
    """transformers#34053 and others: 65536 instead of 256 after resuming; into a used process too. Before any good step as well."""
    config = config_of("fp16", initial=256, interval=5)
    for name, good in (("none", 0), ("some", 3)):
        first = loop_of(config, {}, "fp16", tmp_path / name)
        first.engine.loss_scale.overflowed()
        for number in range(good):
            step(first.engine, number)
        folder = Folder(tmp_path / name / "checkpoints")
        save(folder, good + 1, first.engine.optimizer, first.mesh, first._extra())
        second = loop_of(config, {}, "fp16", tmp_path / name)
        for _ in range(2):
            second.engine.loss_scale.overflowed()
        losses = []
        second.after_step = lambda number, result: losses.append((number, result.loss, second.engine.loss_scale.state))
        second.run()
        right = [(n, step(first.engine, n).loss, first.engine.loss_scale.state) for n in range(good + 1, 6)]
        assert losses[0][2]["overflows"] == 1 and losses == right


RESUMED = [("fp16", {"data": 2, "zero": 1}), ("fp8-delayed", {"tensor": 2}), ("fp8-blockwise", {"data": 2, "zero": 3})]


@pytest.mark.parametrize("precision, layout", RESUMED, ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(precision, layout, pool, tmp_path):
    config = config_of(precision, **({"interval": 2} if precision == "fp16" else {}))
    run(pool, config, layout, tmp_path / "whole", precision)
    run(pool, config, layout, tmp_path / "cut", precision, stop=4)
    run(pool, config, layout, tmp_path / "cut", precision)
    assert same_bits(state_of(tmp_path / "cut", 6), state_of(tmp_path / "whole", 6))
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")


def test_m09_a_history_of_another_length_is_cut_or_filled(tmp_path):
    """TransformerEngine#112, #63; and files do not grow from save to save."""
    engine = engine_of(config_of("fp8-delayed", history=16), {}, precision="fp8-delayed")
    folder, sizes = Folder(tmp_path), []
    for number in range(5):
        step(engine, number)
        save(folder, number + 1, engine.optimizer, engine.mesh, {})
        sizes.append(sum(f.stat().st_size for f in folder.path(number + 1).glob("*.safetensors")))
    assert len(set(sizes)) == 1
    key = "layers.1.mlp.down.amax_history"
    right = engine.buckets.buffers[key]
    assert right[:, :5].all() and not right[:, 5:].any()
    for length in (4, 1024):
        other = engine_of(config_of("fp8-delayed", history=length), {}, precision="fp8-delayed")
        load(folder.open(5), other.optimizer, other.mesh)
        found = other.buckets.buffers[key]
        assert torch.equal(found[:, :4], right[:, :4]) and found.shape == (3, length) and not found[:, 5:].any()


@pytest.mark.parametrize("precision", ["fp8-tensorwise", "fp8-rowwise", "fp8-delayed"])
def test_an_infinity_inside_a_layer_is_a_fault_of_the_step(precision):
    """e4m3 would make 448 of it and the step would go on as if nothing had happened."""
    engine = engine_of(config_of(precision), {}, precision=precision)
    assert not step(engine, 0).fault
    with torch.no_grad():
        dict(engine.model.named_parameters())["layers.1.mlp_norm.weight"][3] = math.inf
    updates = engine.optimizer.updates
    assert step(engine, 1).fault == "the loss is not finite" and engine.optimizer.updates == updates


def test_first_and_last_block_and_what_is_named_stay_high():
    def in_fp8(**settings) -> set[str]:
        engine = engine_of(config_of("fp8-rowwise", **settings), {}, precision="fp8-rowwise")
        step(engine, 0)
        return {engine.names[w].removesuffix(".weight") for w, _ in engine.fp8.weights}

    parts = {"attention.query", "attention.key", "attention.value", "attention.out", "mlp.gate", "mlp.up", "mlp.down"}
    assert in_fp8() == {f"layers.{i}.{part}" for i in (1, 2) for part in parts}
    named = in_fp8(high_precision=["*.mlp.*", "layers.3.attention.key"])
    assert named == {f"layers.{i}.{part}" for i in range(4) for part in parts if "mlp" not in part} - {"layers.3.attention.key"}


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_step_can_be_described_without_memory(recipe):
    """Weights agree on their scales once a step, whatever the micro-batches: so does the planner's log."""
    own = check(laid_out(config_of(f"fp8-{recipe}"), {"tensor": 2, "context": 2}, f"fp8-{recipe}"), 4)
    totals = [sum(step_counts(with_micro_batches(own, m), 0).values()) for m in (1, 2, 3)]
    assert totals[2] - totals[1] == totals[1] - totals[0] > 0


BLOCKS = {
    "experts": {"moe": {"experts": 4, "shared": 1, "shared_gate": True}},
    "latent": {"kv_heads": None, "latent": {"kv_rank": 16, "nope": 8, "rope": 8, "value": 8}},
}


@pytest.mark.parametrize("model", BLOCKS.values(), ids=BLOCKS)
def test_other_blocks_train_in_fp8(model):
    """What decides about experts stays in bf16."""
    config = tiny(RUN, model=model, train=RUN["train"] | {"precision": "fp8-mxfp8"})
    engine = engine_of(config, {}, precision="fp8-mxfp8")
    losses = [engine.step(batches(engine, 0), number).loss for number in range(4)]
    names = {engine.names[w] for w, _ in engine.fp8.weights}
    assert losses[-1] < losses[0] and not any("shared_gate" in n or "router" in n for n in names)
    assert any("shared.up" in n for n in names) and any("experts.up" in n for n in names) or any("kv_up" in n for n in names)
