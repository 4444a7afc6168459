"""Every layout computes what one process computes: loss, norm, each gradient, each weight after 3 steps (see mtmegatron/verify/protocol.py)."""

from functools import cache

import pytest

from mtmegatron.verify.protocol import compare, serial_reference
from tests.tiny import GPT2, tiny

MODELS = {
    "llama": {},
    "llama-tied": {"model": {"tied": True}},
    "gpt2": GPT2,
    "packed": {"data": {"mask_documents": True}, "train": {"label_smoothing": 0.1, "z_loss": 1e-3}},
    "qwen": {"model": {"bias_qkv": True, "kv_heads": 1, "tied": True, "head_size": 8}},
}
LAYOUTS = [
    {"tensor": 2}, {"tensor": 2, "sequence": False}, {"tensor": 4}, {"tensor": 4, "sequence": False}, {"data": 2}, {"data": 2, "zero": 1},
    {"data": 4, "zero": 1, "micro_batch": 1}, {"data": 2, "overlap": False}, {"pipeline": 2}, {"pipeline": 2, "schedule": "gpipe"},
    {"pipeline": 4, "micro_batch": 1}, {"pipeline": 2, "pipeline_layers": [1, 3], "micro_batch": 8}, {"pipeline": 6, "micro_batch": 1},
    {"tensor": 2, "pipeline": 2}, {"tensor": 2, "data": 2, "zero": 1}, {"tensor": 2, "data": 2, "sequence": False, "zero": 1},
    {"pipeline": 2, "data": 2, "zero": 1}, {"pipeline": 2, "data": 2}, {"tensor": 2, "pipeline": 2, "data": 2},
    {"tensor": 2, "pipeline": 2, "data": 2, "zero": 1}, {"tensor": 4, "pipeline": 2}, {"tensor": 4, "data": 2, "zero": 1},
]  # fmt: skip
FEW = [{"tensor": 2, "pipeline": 2, "data": 2, "zero": 1}, {"tensor": 4, "sequence": False, "pipeline": 2}, {"data": 4, "zero": 1, "micro_batch": 1}]
CASES = [("llama", layout) for layout in LAYOUTS]
CASES += [("llama-tied", layout) for layout in LAYOUTS if layout.get("pipeline", 1) > 1 or layout.get("tensor", 1) > 1]
CASES += [(model, layout) for model in ("gpt2", "packed", "qwen") for layout in FEW]


@cache
def reference(model: str):
    return serial_reference(tiny(MODELS[model]), ("fp32", "bf16"))


def name(value) -> str:
    return value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()).replace(" ", "")


@pytest.mark.parametrize("model, layout", CASES, ids=name)
def test_layout_equals_serial(model, layout, pool):
    for precision in ("fp64", "fp32", "bf16"):
        failed = [c for c in compare(tiny(MODELS[model]), layout, precision, reference(model), pool) if not c.passed]
        assert not failed, failed
