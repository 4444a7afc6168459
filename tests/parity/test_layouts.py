"""Every layout computes what one process computes: loss, norm, each gradient, each weight after 3 steps (see
mtmegatron/verify/protocol.py). Cases by hand, for what the generated cross product beside this file does not have:
degrees of 4 and 6, other architectures and losses, unequal stages."""

from functools import cache

import pytest

from mtmegatron.verify.protocol import serial_reference
from tests.parity.common import equals_serial, name
from tests.tiny import GPT2, tiny

MODELS = {
    "llama": {},
    "llama-tied": {"model": {"tied": True}},
    "gpt2": GPT2,
    "packed": {"data": {"mask_documents": True}, "train": {"label_smoothing": 0.1, "z_loss": 1e-3}},
    "qwen": {"model": {"bias_qkv": True, "kv_heads": 1, "tied": True, "head_size": 8}},
}
CASES = [
    ("llama", {"tensor": 4}), ("llama-tied", {"tensor": 4, "sequence": False}), ("llama", {"data": 4, "zero": 1, "micro_batch": 1}),
    ("llama", {"pipeline": 2, "pipeline_layers": [1, 3], "micro_batch": 8}), ("llama-tied", {"pipeline": 6, "micro_batch": 1}),
    ("llama", {"pipeline": 4, "schedule": "zb-h1", "micro_batch": 1}), ("llama-tied", {"pipeline": 3, "schedule": "zb-v", "micro_batch": 1}),
    ("llama-tied", {"tensor": 2, "pipeline": 2, "data": 2, "zero": 1}), ("llama", {"context": 4, "context_kind": "ring"}),
    ("gpt2", {"tensor": 2, "pipeline": 2, "data": 2, "zero": 3}), ("gpt2", {"tensor": 4, "sequence": False}),
    ("packed", {"tensor": 4, "sequence": False}), ("packed", {"context": 4, "zero": 3}), ("packed", {"tensor": 2, "pipeline": 2, "zero": 1}),
    ("qwen", {"tensor": 4}), ("qwen", {"tensor": 2, "pipeline": 2, "zero": 1}), ("qwen", {"data": 4, "zero": 2, "micro_batch": 1}),
]  # fmt: skip


@cache
def reference(model: str):
    return serial_reference(tiny(MODELS[model]), ("fp32", "bf16"))


@pytest.mark.parametrize("model, layout", CASES, ids=name)
def test_layout_equals_serial(model, layout, pool):
    for precision in ("fp64", "fp32", "bf16"):
        equals_serial(tiny(MODELS[model]), layout, precision, reference(model), pool)
