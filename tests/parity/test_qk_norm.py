"""Normalised queries and keys in every layout (see mtmegatron/verify/protocol.py): their weights are whole on every rank, and each rank's gradient
is the part of its own heads, under sequence parallel or not."""

from functools import cache

import pytest

from mtmegatron.verify.protocol import serial_reference
from tests.parity.common import equals_serial, name
from tests.tiny import tiny

# At the learning rate of the small model, 1e-2, changes of the first weights by the unit of bf16 move the norm of the third step by a tenth even in
# fp64 arithmetic: the comparison would be of chaos. At a tenth of it the steps are as well conditioned as the first.
SLOW = {"optimizer": {"lr": 1e-3}}
MODELS = {"grouped": {"model": {"qk_norm": True}} | SLOW, "tied": {"model": {"qk_norm": True, "tied": True, "head_size": 20}} | SLOW}
SELECTIVE = {"recompute": "selective", "parts": ["attention", "norm", "activation"]}
CASES = [
    ("grouped", {"tensor": 2}), ("grouped", {"tensor": 2, "sequence": False}), ("tied", {"tensor": 4}), ("grouped", {"tensor": 4, "sequence": False}),
    ("grouped", {"pipeline": 2}), ("tied", {"tensor": 2, "pipeline": 2, "schedule": "zb-v", "micro_batch": 1}), ("grouped", {"data": 2, "zero": 3}),
    ("tied", {"tensor": 2, "sequence": False, "data": 2, "zero": 2}), ("grouped", {"tensor": 4, "zero": 3}), ("tied", {"tensor": 2} | SELECTIVE),
    ("grouped", {"tensor": 2, "context": 2, "context_kind": "ring"}), ("grouped", {"context": 2, "context_kind": "ulysses", "recompute": "full"}),
]  # fmt: skip


@cache
def reference(model: str):
    return serial_reference(tiny(MODELS[model]), ("fp32", "bf16"))


@pytest.mark.parametrize("model, layout", CASES, ids=name)
def test_layout_equals_serial(model, layout, pool):
    for precision in ("fp64", "fp32", "bf16"):
        equals_serial(tiny(MODELS[model]), layout, precision, reference(model), pool)
