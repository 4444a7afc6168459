"""Sums between blocks in fp32 beside 16-bit weights: their type everywhere, what they keep, and the same run in every layout."""

from functools import cache

import pytest
import torch
from torch import Tensor

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.config.constraints import faults
from mtmegatron.models.decoder import Block
from mtmegatron.models.generation import Options, generate, generation_config
from mtmegatron.plan.account import account
from mtmegatron.plan.collectives import record_step
from mtmegatron.verify import protocol
from mtmegatron.verify.canonical import canonical, compare_bits
from mtmegatron.verify.generate import changed
from mtmegatron.verify.protocol import batches, serial_reference
from tests.field.training import (
    engine_of,
    lines_of,
    name,
    run,
    same_bits,
    spread,
    state_of,
)
from tests.parity.common import equals_serial
from tests.parity.test_moe import BASE, ROUTERS, Separated
from tests.tiny import GPT2, tiny

WIDE = {"residual": "fp32"}
RUN = {"train": {"steps": 6, "global_batch": 4, "micro_batch": 2, "eval_every": 0} | WIDE, "checkpoint": {"every": 3}, "log": {"tensorboard": False}}
MODELS = {
    "llama": {},
    "gpt2": GPT2["model"] | {"dropout_residual": 0.1, "dropout_embedding": 0.1},
    "experts": {"moe": {"experts": 4, "shared": 1, "aux_loss": 0.01}},
    "latent": {"kv_heads": None, "latent": {"kv_rank": 16, "query_rank": 24, "nope": 8, "rope": 8, "value": 8}},
    "prediction": {"prediction": {"depth": 2}},
}
LAYOUTS = [
    {}, {"tensor": 2}, {"tensor": 2, "sequence": False}, {"pipeline": 2, "schedule": "zb-v"}, {"context": 2}, {"data": 2, "zero": 3},
    {"recompute": "full"}, {"recompute": "selective", "parts": ["norm", "activation", "up", "attention"]},
    {"pipeline": 2, "recompute": "full", "offload": True},
]  # fmt: skip


def wide(model: str, **train):
    return tiny(model=MODELS[model], train=WIDE | train)


# ---- where it is fp32 ----


def seen_by_blocks(config, rank: int, patch: pytest.MonkeyPatch) -> tuple[set[tuple], list]:
    """(types of what a block gets, gives, and of the gradients of both), and the transfers, of a step on the meta device."""
    seen: set[tuple] = set()
    forward = Block.forward

    def noting(self, x: Tensor, where):
        y = forward(self, x, where)
        for which, t in (("in", x), ("out", y)):
            seen.add((which, t.dtype))
            if t.requires_grad:
                t.register_hook(lambda g, which=which: seen.add((f"gradient {which}", g.dtype)))
        return y

    patch.setattr(Block, "forward", noting)
    return seen, record_step(config, rank).transfers


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8-rowwise"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_what_lies_between_blocks_and_stages_is_fp32_and_all_else_stays_in_16_bits(layout, precision, monkeypatch):
    high = {"fp8": {"high_precision": []}} if precision.startswith("fp8") else {}
    for model in MODELS if precision == "bf16" and layout in LAYOUTS[:2] else ("llama",):
        own = engine_of(wide(model, **high), layout, precision=precision).config
        for rank in range(2 if own.parallel.pipeline == 2 else 1):
            seen, transfers = seen_by_blocks(own, rank, monkeypatch)
            monkeypatch.undo()
            assert seen == {(what, torch.float32) for what in ("in", "out", "gradient in", "gradient out")}
            messages = [t for t in transfers if t.operation in ("send", "receive")]
            assert {t.dtype for t in messages} == ({torch.float32} if own.parallel.pipeline == 2 else set())
            tokens, width = own.data.sequence * own.train.micro_batch, own.model.width
            moved = [t for t in transfers if t.axis == "tensor" and t.when in ("forward", "backward") and t.bytes >= tokens * width]
            assert all(t.dtype in (torch.bfloat16, torch.float16, torch.uint8) for t in moved) and bool(moved) == ("tensor" in layout)


@pytest.mark.parametrize("model, stream", [("llama", 2 * 4 + 1), ("gpt2", 2 * 4 + 1)])
def test_the_plan_counts_two_more_bytes_of_each_sum(model, stream):
    """A block keeps two sums for backward, the final norm one."""
    kept = {}
    for residual in ("compute", "fp32"):
        own = engine_of(tiny(model=MODELS[model] | {"norm": "rmsnorm"}, train={"residual": residual}), {}, precision="bf16").config
        kept[residual] = account(own, 0).micro_batch
    assert kept["fp32"] - kept["compute"] == stream * 2 * 64 * (2 * 32)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_it_is_refused_where_it_has_no_effect(precision):
    (line,) = faults(tiny(train=WIDE | {"precision": precision}), 1)
    assert line == f"`train.residual` has no effect with `train.precision: {precision}`: use bf16, fp16 or fp8, or leave it out"
    assert not list(faults(tiny(train=WIDE | {"precision": "bf16"}), 1))


# ---- what it is for ----


def final_sum(residual: str) -> Tensor:
    """Of 64 blocks that each add 2^-10 to ones."""
    engine = engine_of(tiny(model={"layers": 64}, train={"residual": residual}), {}, precision="bf16")
    with torch.no_grad():
        engine.model.embedding.weight.fill_(1.0)
    for block in engine.model.layers.values():
        block.attention.forward = lambda x, where: torch.full_like(x, 2.0**-10)
        block.mlp.forward = torch.zeros_like
    return engine.model(None, batches(engine, 0)[0])


def test_64_small_contributions_add_up():
    assert final_sum("fp32").unique().tolist() == [1 + 64 * 2**-10]
    assert final_sum("compute").unique().tolist() == [1.0]


def test_a_deep_model_is_nearer_to_its_run_in_fp64():
    """64 roundings of the sum, and of its gradient, are gone; those inside of blocks stay."""
    deep = {"model": {"layers": 64, "init_std": 0.05}, "train": {"global_batch": 2}}
    exact = engine_of(tiny(deep), {})
    mine, off = batches(exact, 0), {}
    right = exact.model(None, mine[0]).detach()
    exact.gradients(mine, exact.count_tokens(mine))
    for residual in ("compute", "fp32"):
        engine = engine_of(tiny(deep, train=deep["train"] | {"residual": residual}), {}, precision="bf16")
        hidden = engine.model(None, mine[0]).detach()
        engine.gradients(mine, engine.count_tokens(mine))
        pairs = zip(engine.model.embedding.parameters(), exact.model.embedding.parameters())
        off[residual] = [float((hidden - right).norm()), *(float((p.grad_sum - q.grad_sum).norm()) for p, q in pairs)]
    assert all(2 * a < b for a, b in zip(off["fp32"], off["compute"])), off


# ---- the same run everywhere ----


@cache
def reference(model: str):
    return serial_reference(wide(model), ("bf16",))


PARITY = [
    ("llama", {"tensor": 2}), ("llama", {"pipeline": 2, "schedule": "zb-v"}), ("llama", {"context": 2}), ("llama", {"data": 2, "zero": 3}),
    ("gpt2", {"tensor": 2, "sequence": False}), ("gpt2", {"tensor": 2, "pipeline": 2, "zero": 1, "recompute": "full"}),
    ("prediction", {"pipeline": 2, "tensor": 2}), ("latent", {"tensor": 2, "data": 2, "zero": 2}),
]  # fmt: skip


@pytest.mark.parametrize("model, layout", PARITY, ids=name)
def test_a_layout_is_the_run_of_one_process(model, layout, pool):
    equals_serial(wide(model), layout, "bf16", reference(model), pool)


@pytest.mark.parametrize(
    "router, layout", [("mixtral", {"tensor": 2, "expert": 2}), ("deepseek", {"pipeline": 2, "schedule": "zb-v", "data": 2, "expert": 2, "zero": 2})],
    ids=name,
)  # fmt: skip
def test_experts_too_where_choices_stand_apart(router, layout, pool, monkeypatch):
    """The model of tests/parity/test_moe.py, whose choices rounding cannot turn."""
    config = changed(BASE, {"model.moe": ROUTERS[router], "train.residual": "fp32"})
    monkeypatch.setattr(protocol, "Engine", Separated)
    right = serial_reference(config, ("bf16",))
    monkeypatch.undo()
    equals_serial(config, layout, "bf16", right, pool)


@pytest.mark.parametrize("layout", [{"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}, {"context": 2, "data": 2, "zero": 3}], ids=name)
def test_canonical_numerics_have_the_bits_of_one_process(layout, pool):
    failed = [c for c in compare_bits(canonical(wide("llama")), [layout], ["bf16"], pool, 2) if not c.passed]
    assert not failed, failed


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp8-blockwise"])
def test_models_train(model, precision):
    engine = engine_of(wide(model), {}, precision=precision)
    results = [engine.step(batches(engine, 0), number) for number in range(4)]
    assert results[-1].loss < results[0].loss and not any(r.fault for r in results)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2, "data": 2, "zero": 1}], ids=name)
def test_a_resumed_run_is_the_uninterrupted_one(layout, pool, tmp_path):
    config = tiny(RUN, model=MODELS["gpt2"])
    run(pool, config, layout, tmp_path / "whole", "bf16")
    run(pool, config, layout, tmp_path / "cut", "bf16", stop=4)
    run(pool, config, layout, tmp_path / "cut", "bf16")
    assert same_bits(state_of(tmp_path / "cut", 6), state_of(tmp_path / "whole", 6))
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")
    store = Folder(tmp_path / "cut" / "checkpoints").open(6)
    # a model is generated from in another precision too, where the setting has no effect
    assert [generation_config(store, {}, other).train.residual for other in (None, "fp32")] == ["fp32", "compute"]


@pytest.mark.parametrize("recompute", [{"recompute": "full"}, {"recompute": "selective", "parts": ["norm", "activation", "up"]}], ids=name)
def test_recomputation_changes_no_bit(recompute):
    engines = [engine_of(wide("prediction"), layout, precision="bf16") for layout in ({}, recompute)]
    for engine in engines:
        engine.step(batches(engine, 0), 0)
    assert all(torch.equal(a, b) for a, b in zip(*(engine.model.parameters() for engine in engines)))


def generated_rank(rank: int, world: int, layout: dict) -> list[list[int]]:
    model = engine_of(tiny(model={"init_std": 0.4}, train=WIDE), layout, rank, world, "bf16").model
    return generate(model, [[5, 6, 7, 8], [200, 3]], Options(max_new_tokens=4))


@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"tensor": 2}], ids=name)
def test_generation_passes_it_from_stage_to_stage(layout, pool):
    assert spread(pool, generated_rank, layout, layout) == [generated_rank(0, 1, {})] * 2
