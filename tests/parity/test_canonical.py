"""Canonical numerics: every layout has the bits of one process, after several steps, and the numbers are those of a fast run to rounding."""

from functools import cache

import pytest

from mtmegatron.mesh import Axis
from mtmegatron.verify.canonical import canonical, compare_bits, run
from tests.parity.common import name
from tests.tiny import GPT2, tiny

MODELS = {
    "llama": {"model": {"kv_heads": 4}},
    "gqa-tied-packed": {"model": {"kv_heads": 2, "tied": True}, "data": {"mask_documents": True}, "train": {"label_smoothing": 0.1, "z_loss": 1e-3}},
    "qwen3": {"model": {"qk_norm": True}},
    "gpt2": GPT2 | {"model": GPT2["model"] | {"dropout_residual": 0.1, "dropout_embedding": 0.1}},
}
CASES = [
    ("llama", {"tensor": 2}, "fp32"), ("llama", {"tensor": 4, "sequence": False}, "bf16"), ("llama", {"tensor": 4}, "fp32"),
    ("llama", {"data": 4, "zero": 1}, "bf16"), ("llama", {"data": 2, "zero": 3, "recompute": "full"}, "fp32"),
    ("llama", {"pipeline": 2, "schedule": "zb-v", "micro_batch": 1}, "fp32"), ("llama", {"context": 4}, "fp32"),
    ("llama", {"tensor": 2, "context": 2, "recompute": "selective"}, "bf16"), ("llama", {"micro_batch": 4}, "fp32"),
    ("gqa-tied-packed", {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}, "fp32"), ("gqa-tied-packed", {"context": 2, "zero": 2, "data": 2}, "bf16"),
    ("gqa-tied-packed", {"pipeline": 2, "schedule": "interleaved", "data": 2, "zero": 2, "shard": 1, "micro_batch": 1}, "fp32"),
    ("qwen3", {"tensor": 2, "pipeline": 2}, "fp32"), ("gpt2", {"tensor": 2, "data": 2, "zero": 3}, "fp32"), ("gpt2", {"tensor": 2, "pipeline": 2, "context": 2, "zero": 1}, "bf16"),
]  # fmt: skip
STEPS = 3


@cache
def model(name: str):
    return canonical(tiny(MODELS[name]))


@pytest.mark.parametrize("which, layout, precision", CASES, ids=name)
def test_layout_has_the_bits_of_one_process(which, layout, precision, pool):
    failed = [c for c in compare_bits(model(which), [layout], [precision], pool, STEPS) if not c.passed]
    assert not failed, failed


def test_other_cuts_of_the_numbers_are_other_bits():
    """The comparison can fail: another number of blocks, another seed."""
    base = model("llama")
    again = [run(0, 1, base.model_copy(update={"train": base.train.model_copy(update=change)}), {}, "fp32", 2) for change in ({}, {}, {"blocks": 2})]
    assert again[0] == again[1] and again[0][0] != again[2][0] and again[0][1] != again[2][1]


def test_a_wrong_gradient_is_found_and_named(pool):
    checks = pool.run(_broken, 2, model("llama"))[0]
    assert [c.passed for c in checks] == [True, False, False, False]  # Adam's first update hardly sees a size: losses differ later
    assert "step 0" in checks[1].what and "gradient of step 0" in checks[2].what


def _broken(rank, world, config):
    """Rank 1 hands over one wrong bit once."""
    from mtmegatron.verify.canonical import _checks

    true = Axis._reduce_scatter
    hit = []

    def faulty(self, x, *rest, **more):
        if rank == 1 and not hit and not x.is_floating_point() and self.name.startswith("data"):
            hit.append(1)
            x.view(-1)[5] ^= 1 << 40
        return true(self, x, *rest, **more)

    right = run(0, 1, config, {}, "fp32", 2)
    Axis._reduce_scatter = faulty
    try:
        mine = run(rank, world, config, {"data": 2, "zero": 1}, "fp32", 2)
    finally:
        Axis._reduce_scatter = true
    import torch.distributed as dist

    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    return list(_checks("data=2", "fp32", everyone, right))


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-5), ("bf16", 2e-2)])
def test_the_numbers_are_those_of_a_fast_run(precision, bound):
    """To rounding: 3 steps, relative to the loss; both paths have an error of some units of their precision."""
    slow, fast = run(0, 1, model("llama"), {}, precision, STEPS), run(0, 1, tiny(MODELS["llama"]), {}, precision, STEPS)
    for (a, norm_a), (b, norm_b) in zip(slow[0], fast[0]):
        assert float.fromhex(a) == pytest.approx(float.fromhex(b), rel=bound)
        assert float.fromhex(norm_a) == pytest.approx(float.fromhex(norm_b), rel=10 * bound)
