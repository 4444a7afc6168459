"""Multi-token prediction in every kind of layout is that of one process: loss, norm, each gradient, each weight after 3 steps; and the loss of each
depth. The documents of the samples begin anywhere, so labels of the depths are ignored at other places than those of the main loss."""

from functools import cache

import pytest

from mtmegatron.verify.protocol import batches, describe, serial_reference
from tests.field.training import engine_of, spread
from tests.parity.common import equals_serial, name
from tests.tiny import GPT2, tiny

CHAIN = {"width": 32, "ffn": 88, "vocab": 131, "prediction": {"depth": 2}}
SMALL = {"data": {"sequence": 16}, "train": {"global_batch": 4, "micro_batch": 1}, "parallel": {"bucket_mb": 0.02}}
MODELS = {
    "untied": {"model": CHAIN},
    "tied": {"model": CHAIN | {"tied": True}},
    "gpt2": {"model": GPT2["model"] | CHAIN},
    "packed": {"model": CHAIN, "data": {"mask_documents": True}, "train": {"label_smoothing": 0.1, "z_loss": 1e-3}},
    "dropout": {"model": CHAIN | {"dropout_embedding": 0.1, "dropout_residual": 0.2}},
}
CASES = [
    ("untied", {"tensor": 2}), ("gpt2", {"tensor": 2, "sequence": False}), ("untied", {"data": 2, "zero": 2}),
    ("untied", {"data": 2, "zero": 3}), ("tied", {"data": 2, "zero": 3}), ("untied", {"data": 2, "zero": 1, "overlap": False}),
    ("untied", {"tensor": 2, "pipeline": 2}), ("tied", {"tensor": 2, "pipeline": 2}), ("gpt2", {"tensor": 2, "pipeline": 2}),
    ("untied", {"pipeline": 2, "schedule": "zb-v"}), ("tied", {"pipeline": 2, "schedule": "dualpipe-v"}),
    ("untied", {"pipeline": 2, "schedule": "zb-h1"}), ("tied", {"pipeline": 2, "schedule": "gpipe", "micro_batch": 2}),
    ("untied", {"pipeline": 2, "schedule": "interleaved", "pipeline_layers": [2, 1, 1, 0]}),
    ("untied", {"pipeline": 2, "pipeline_layers": [4, 0]}),
    ("untied", {"context": 2}), ("packed", {"context": 2, "context_kind": "ring"}), ("packed", {"tensor": 2, "context": 2}),
    ("packed", {"context": 2, "context_kind": "ulysses"}),
    ("untied", {"pipeline": 2, "data": 2, "zero": 3}), ("untied", {"pipeline": 2, "schedule": "zb-v", "data": 2, "zero": 2}),
    ("tied", {"pipeline": 2, "context": 2, "zero": 1}), ("untied", {"data": 2, "zero": 3, "recompute": "full"}),
    ("untied", {"tensor": 2, "recompute": "selective"}), ("untied", {"tensor": 2, "recompute": "full", "every": 2}),
    ("untied", {"pipeline": 2, "schedule": "zb-h1", "data": 2, "zero": 3, "recompute": "selective"}),
    ("dropout", {"tensor": 2, "pipeline": 2}), ("dropout", {"context": 2, "recompute": "full"}),
    ("dropout", {"data": 2, "zero": 3}),
]  # fmt: skip


@cache
def reference(model: str):
    return serial_reference(tiny(SMALL, MODELS[model]), precisions(model))


def precisions(model: str) -> tuple[str, ...]:
    return ("fp32", "bf16") if model == "dropout" else ("fp32",)


@pytest.mark.parametrize("model, layout", CASES, ids=name)
def test_layout_equals_serial(model, layout, pool):
    for precision in ("fp64", *precisions(model)):
        equals_serial(tiny(SMALL, MODELS[model]), layout, precision, reference(model), pool)


# ---- the loss of each depth, and evaluation ----


SUMMED = 2.0**-52 * 64 * 32  # sums of up to 64 tokens, each of products of up to 32 terms before it, all in another order


def losses(rank: int, world: int, config, layout: dict) -> list[float]:
    """Evaluation, main loss and that of each depth, in the first two steps."""
    engine, found = engine_of(config, layout, rank, world), []
    for step in range(2):
        mine = batches(engine, step)
        total, tokens = engine.evaluate(mine)
        result = engine.step(mine, step)
        found += [total / tokens, result.loss, *result.ahead]
    return found


@pytest.mark.parametrize(
    "layout",
    [{"data": 2, "zero": 3}, {"pipeline": 2, "schedule": "zb-v"}, {"tensor": 2, "pipeline": 2}, {"context": 2, "zero": 1}, {"data": 4}],
    ids=describe,
)  # fmt: skip
def test_every_rank_tells_the_losses_of_one_process(layout, pool):
    config = tiny(SMALL, MODELS["packed"])
    for found in spread(pool, losses, layout, config, layout):
        assert found == pytest.approx(losses(0, 1, config, {}), rel=SUMMED)
