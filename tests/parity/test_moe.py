"""Experts in every layout compute what one process computes: choices, balance terms, gradients, weights (mtmegatron/verify/protocol.py).

A choice is discrete, so a rounding error may turn it where two scores are nearly equal. In fp64, whose errors are 1e-9 of those of fp32, none of
these choices is that near to a tie: there every pair of values of the table below is held to rounding. In fp32 some layouts are."""

from functools import cache

import pytest

from mtmegatron.config.derived import depends_on_micro_batch
from mtmegatron.verify.generate import Space, changed
from mtmegatron.verify.protocol import compare, describe, serial_reference
from tests.tiny import tiny

MIXTRAL = {"experts": 8, "top_k": 2, "ffn": 40, "score_after": True, "aux_loss": 0.02, "z_loss": 1e-3}
DEEPSEEK = {
    "experts": 8, "top_k": 4, "ffn": 24, "shared": 2, "first_dense": 1, "score": "sigmoid", "groups": 4, "groups_kept": 2, "renormalise": True,
    "scale": 2.5, "bias_rate": 1e-2, "sequence_loss": 0.01, "complementary": True, "global_loss": 0.01,
}  # fmt: skip
ROUTERS = {
    "mixtral": MIXTRAL, "deepseek": DEEPSEEK,
    "capacity": MIXTRAL | {"capacity": 0.8, "drop": "position", "shared_ffn": 24, "shared_gate": True, "jitter": 0.1, "every": 2},
    "pooled": DEEPSEEK | {"capacity": 0.7, "capacity_of": "group", "device_loss": 0.01, "communication_loss": 0.01},
    "padded, sinkhorn": {"experts": 6, "ffn": 24, "capacity": 1.0, "pad": True, "logits": "fp64", "sinkhorn": True, "score": "sigmoid"},
}  # fmt: skip
TABLE = {
    "router": {name: {"model.moe": moe} for name, moe in ROUTERS.items()},
    "experts": {
        "whole": {}, "2": {"expert": 2}, "2 in parts": {"expert": 2, "dispatch_parts": 3}, "allgather": {"expert": 2, "dispatcher": "allgather"},
        "columns": {"expert_tensor": 2},
    },
    "tensor": {"1": {}, "2": {"tensor": 2}},
    "context": {"1": {}, "allgather": {"context": 2}, "ring": {"context": 2, "context_kind": "ring"}},
    "pipeline": {"none": {}} | {kind: {"pipeline": 2, "schedule": kind} for kind in ("1f1b", "zb-h1", "zb-v", "interleaved")},
    "data": {"1": {}, "2": {"data": 2}},
    "zero": {"0": {}} | {str(stage): {"zero": stage} for stage in (1, 2, 3)},
    "recompute": {"none": {}, "selective": {"recompute": "selective", "parts": ["norm", "activation", "up"]}, "full": {"recompute": "full"}},
    "precision": {"fp64": {}},
}  # fmt: skip
BASE = tiny(model={"moe": MIXTRAL, "init_std": 0.1})
SPACE = Space(BASE, TABLE, most=4)
CASES = SPACE.cover()
WIDE = [
    ("deepseek", {"pipeline": 2, "tensor": 2, "data": 2, "expert": 4, "schedule": "zb-v", "zero": 1}),
    ("mixtral", {"pipeline": 2, "context": 2, "data": 2, "expert": 2, "expert_tensor": 2, "zero": 3, "recompute": "full"}),
    ("mixtral", {"data": 4, "expert": 2, "expert_tensor": 2, "dispatcher": "allgather", "zero": 2}),
    ("deepseek", {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2, "dispatch_parts": 2, "recompute": "selective"}),
    ("pooled", {"tensor": 2, "context": 2, "expert": 4, "zero": 2}), ("padded, sinkhorn", {"data": 4, "expert": 4}),
]  # fmt: skip
SINGLE = [
    ("mixtral", {"data": 2, "expert": 2}), ("mixtral", {"tensor": 2, "expert_tensor": 2}), ("deepseek", {"context": 2, "expert": 2}),
    ("capacity", {"data": 2, "expert": 2, "dispatcher": "allgather"}), ("deepseek", {"pipeline": 2, "schedule": "dualpipe-v", "data": 2, "expert": 2}),
]  # fmt: skip


@cache
def reference(router: str):
    return serial_reference(changed(BASE, {"model.moe": ROUTERS[router]}), ("fp32",))


def name(value) -> str:
    if isinstance(value, str | dict):
        return value if isinstance(value, str) else describe(value)
    return ", ".join(f"{d} {v}" for d, v in value.choice.items() if v != SPACE.plain[d] or d == "router")


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_pair_equals_serial(case, pool):
    config = changed(BASE, case.changes)
    failed = [c for c in compare(config, case.layout, "fp64", reference(case.choice["router"]), pool) if not c.passed]
    assert not failed, failed


@pytest.mark.parametrize("router, layout", WIDE, ids=name)
def test_wide_layouts_equal_serial(router, layout, pool):
    config = changed(BASE, {"model.moe": ROUTERS[router]})
    failed = [c for c in compare(config, layout, "fp64", reference(router), pool) if not c.passed]
    assert not failed, failed


def test_one_pair_alone_is_left_out():
    """Each part of the tokens would be filled up to the whole capacity."""
    assert set(SPACE.impossible) == {(("router", "padded, sinkhorn"), ("experts", "2 in parts"))}


@pytest.mark.parametrize("router, layout", SINGLE, ids=name)
def test_layout_equals_serial_in_fp32(router, layout, pool):
    config = changed(BASE, {"model.moe": ROUTERS[router]})
    failed = [c for c in compare(config, layout, "fp32", reference(router), pool) if not c.passed]
    assert not failed, failed


def test_what_a_micro_batch_defines_is_compared_with_that_micro_batch():
    defined = {router for router in ROUTERS if depends_on_micro_batch(changed(BASE, {"model.moe": ROUTERS[router]}))}
    assert defined == set(ROUTERS) - {"deepseek"}
