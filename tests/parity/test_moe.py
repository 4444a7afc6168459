"""Experts in every layout compute what one process computes: choices, balance terms, gradients, weights (mtmegatron/verify/protocol.py).

A choice is discrete, so a rounding error may turn it where two scores are nearly equal. In fp64, whose errors are 1e-9 of those of fp32, none of
these choices is that near to a tie: there every pair of values of the table below is held to rounding. In fp32 some layouts are.
For bf16 the model is one whose choices stand apart: tokens belong to eight kinds, a kind is most of what a token's vector is, and each router reads
the kind. A test measures how far from a tie every choice is, and what rounding does to it."""

from functools import cache

import pytest
import torch

from mtmegatron.config.derived import depends_on_micro_batch
from mtmegatron.ops import router as routers
from mtmegatron.train.engine import Engine
from mtmegatron.verify import protocol
from mtmegatron.verify.generate import Space, changed
from mtmegatron.verify.protocol import FACTOR, describe, run_layout, serial_reference
from tests.parity.common import equals_serial
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
    equals_serial(config, case.layout, "fp64", reference(case.choice["router"]), pool)


@pytest.mark.parametrize("router, layout", WIDE, ids=name)
def test_wide_layouts_equal_serial(router, layout, pool):
    config = changed(BASE, {"model.moe": ROUTERS[router]})
    equals_serial(config, layout, "fp64", reference(router), pool)


def test_one_pair_alone_is_left_out():
    """Each part of the tokens would be filled up to the whole capacity."""
    assert set(SPACE.impossible) == {(("router", "padded, sinkhorn"), ("experts", "2 in parts"))}


@pytest.mark.parametrize("router, layout", SINGLE, ids=name)
def test_layout_equals_serial_in_fp32(router, layout, pool):
    config = changed(BASE, {"model.moe": ROUTERS[router]})
    equals_serial(config, layout, "fp32", reference(router), pool)


def test_what_a_micro_batch_defines_is_compared_with_that_micro_batch():
    defined = {router for router in ROUTERS if depends_on_micro_batch(changed(BASE, {"model.moe": ROUTERS[router]}))}
    assert defined == set(ROUTERS) - {"deepseek"}


# ---- where choices stand apart: bf16 ----

KINDS, APART = 8, 3.0  # kinds of tokens; the logits of experts are near APART where a kind prefers them, near -APART elsewhere
SEPARATED = [
    ("mixtral", {"tensor": 2, "expert": 2}), ("mixtral", {"data": 2, "expert": 2, "zero": 3}), ("mixtral", {"context": 2, "context_kind": "ring"}),
    ("deepseek", {"pipeline": 2}), ("deepseek", {"context": 2, "expert": 2, "dispatch_parts": 3, "recompute": "full"}),
    ("deepseek", {"pipeline": 2, "schedule": "zb-v", "data": 2, "expert": 2, "zero": 2}),
    ("capacity", {"tensor": 2, "expert_tensor": 2}), ("capacity", {"data": 2, "expert": 2, "dispatcher": "allgather", "zero": 1}),
]  # fmt: skip


class Separated(Engine):
    """An engine whose first weights make choices that stand apart."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        moe, width = self.config.model.moe, self.config.model.width
        signs = torch.linalg.qr(torch.randn(width, KINDS, generator=torch.Generator().manual_seed(1)).double()).Q.T * width**0.5
        with torch.no_grad():
            for p, name in self.names.items():
                if name == "embedding.weight":
                    p += 2 * signs[torch.arange(len(p)) % KINDS].to(p)
                elif name.endswith("router.weight"):
                    preferred = [[(kind * moe.top_k // 2 + j) % moe.experts for j in range(moe.top_k)] for kind in range(KINDS)]
                    wanted = torch.full((KINDS, moe.experts), -APART).scatter_(1, torch.tensor(preferred), APART)
                    p += (wanted.T.to(p) @ signs.to(p)) / width


@cache
def separated(router: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "Engine", Separated)
        return serial_reference(changed(BASE, {"model.moe": ROUTERS[router]}), ("fp32", "bf16"))


def choices(router: str, precision: str, monkeypatch) -> list[tuple[torch.Tensor, int]]:
    """What the choices of a serial run were made on: the scores of experts or of groups, and how many were taken."""
    seen, best, state = [], routers._best, separated(router).tensors
    monkeypatch.setattr(routers, "_best", lambda x, k: seen.append((x.double(), k)) or best(x, k))
    run_layout(0, 1, changed(BASE, {"model.moe": ROUTERS[router]}), {}, precision, state)
    monkeypatch.undo()
    return seen


@pytest.mark.parametrize("router", sorted({router for router, _ in SEPARATED}))
def test_choices_stand_apart_by_more_than_rounding_can_move_them(router, monkeypatch):
    """What a layout may differ by is FACTOR times what the serial run does; two scores that near to each other may change places."""
    taken = set()
    for (exact, k), (rounded, _) in zip(*(choices(router, precision, monkeypatch) for precision in ("fp64", "bf16")), strict=True):
        kth, next_one = exact.topk(k + 1).values[:, -2:].unbind(1)
        moved = (exact - rounded).nan_to_num(0.0).abs().max()  # experts of other groups are at -inf in both
        assert 0 < moved and 2 * FACTOR * moved < (kth - next_one).min()
        taken |= {tuple(row) for row in exact.topk(k).indices.sort().values.tolist()}
    assert len(taken) >= 4  # and they are not the same for all


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("router, layout", SEPARATED, ids=name)
def test_layout_equals_serial_where_choices_stand_apart(router, layout, precision, pool):
    config = changed(BASE, {"model.moe": ROUTERS[router]})
    equals_serial(config, layout, precision, separated(router), pool)
