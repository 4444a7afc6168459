"""Every kind of optimizer in layouts of 2 to 4 ranks computes what one process computes (mtmegatron/verify/protocol.py).

Sign decisions of Lion turn on a rounding error, so its fp32 runs are not comparable by weight; fp64 is where all kinds are held to rounding."""

from functools import cache

import pytest

from mtmegatron.verify.protocol import compare, describe, serial_reference
from tests.tiny import tiny

MOE = {"model": {"moe": {"experts": 4, "top_k": 2, "ffn": 40}, "init_std": 0.1}}
GROUPS = [
    {"match": "*norm*", "lr": 0.5, "decay": 2.0}, {"match": "layers.1.*", "frozen": True}, {"match": "*.out.weight", "kind": "sgd"},
    {"match": "layers.[02].mlp.*", "kind": "muon", "lr": 0.1}, {"match": "head.*", "kind": "lamb"},
]  # fmt: skip
KINDS = {
    "adam": {"kind": "adam"}, "sgd": {"kind": "sgd", "nesterov": True}, "lion": {"kind": "lion", "lr": 1e-3}, "lamb": {"kind": "lamb"},
    "muon": {"kind": "muon"}, "groups": {"groups": GROUPS, "ema": 0.9}, "clip": {"clip": 0.0, "clip_value": 1e-3, "weight_decay_end": 0.3},
}  # fmt: skip
CASES = [
    ("adam", {"data": 2, "zero": 2}), ("sgd", {"tensor": 2, "data": 2, "zero": 3}), ("lion", {"pipeline": 2, "data": 2, "zero": 1}),
    ("lamb", {"data": 2}), ("lamb", {"tensor": 2, "data": 2, "zero": 3}), ("lamb", {"pipeline": 2, "tensor": 2}),
    ("lamb", {"data": 4, "zero": 1, "shard": 2}), ("lamb", {"tensor": 4}),
    ("muon", {"data": 2}), ("muon", {"data": 4, "zero": 2, "shard": 2}), ("muon", {"tensor": 2, "data": 2, "zero": 3}), ("muon", {"tensor": 4}),
    ("muon", {"tensor": 2, "sequence": False}), ("muon", {"pipeline": 2, "context": 2, "zero": 1}),
    ("groups", {"data": 2, "zero": 1}), ("groups", {"tensor": 2, "pipeline": 2}), ("clip", {"tensor": 2, "data": 2, "zero": 1}),
]  # fmt: skip
EXPERTS = [{"data": 2, "expert": 2}, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2, "zero": 1}, {"data": 4, "expert": 2, "zero": 3}]


@cache
def reference(kind: str, model: str = "dense"):
    return serial_reference(config(kind, model), ("fp32",))


def config(kind: str, model: str = "dense"):
    return tiny({"optimizer": KINDS[kind]}, MOE if model == "experts" else {"model": {"tied": kind in ("lamb", "sgd")}})


def name(value) -> str:
    return value if isinstance(value, str) else describe(value)


@pytest.mark.parametrize("kind, layout", CASES, ids=name)
def test_layout_equals_serial(kind, layout, pool):
    for precision in ("fp64",) if kind in ("lion", "clip") else ("fp64", "fp32"):
        failed = [c for c in compare(config(kind), layout, precision, reference(kind), pool) if not c.passed]
        assert not failed, failed


@pytest.mark.parametrize("layout", EXPERTS, ids=name)
@pytest.mark.parametrize("kind", ["muon", "lamb"])
def test_experts_are_matrices_and_parameters_of_their_own(kind, layout, pool):
    failed = [c for c in compare(config(kind, "experts"), layout, "fp64", reference(kind, "experts"), pool) if not c.passed]
    assert not failed, failed
