"""Frozen parameters: their gradients are not made, and nothing else changes. That they stay is in test_kinds, checkpoints too."""

import pytest

from mtmegatron.verify.protocol import batches
from tests.field.test_run import FAMILIES
from tests.field.training import engine_of, name, spread
from tests.tiny import tiny

FROZEN = {
    "bottom": ["embedding.*", "layers.[01].*"],
    "top": ["layers.3.*", "norm.*", "head.*"],
    "matrices": ["*.mlp.*", "*.attention.*"],
    "mixed": ["*.query.*", "*.mlp.gate.*", "*norm.bias"],
    "all but one": ["[!h]*"],
}


def frozen_rank(rank, world, layout, changes, patterns, precision, skip):
    """(weights, losses and norms, frozen parameters with a gradient, frozen parameters) after two steps.

    `skip` false: gradients of all parameters are made, and dropped."""
    groups = [{"match": pattern, "frozen": True} for pattern in patterns]
    engine = engine_of(tiny(changes, optimizer={"groups": groups}), layout, rank, world, precision)
    frozen = {name for param, name in engine.names.items() if not param.requires_grad}
    if not skip:
        for param in engine.names:
            param.requires_grad_()
    engine.optimizer.prepare_gradients, prepare = lambda: None, engine.optimizer.prepare_gradients
    mine = batches(engine, 0)
    engine.gradients(mine, engine.count_tokens(mine))
    there = {name: param.grad_sum for param, name in engine.names.items() if param.grad_sum.untyped_storage().size()}
    touched = {name for name, total in there.items() if name in frozen and bool(total.any())}
    engine.optimizer.prepare_gradients = prepare
    results = [engine.step(batches(engine, step), step) for step in range(2)]
    weights = {item.name: item.param.detach().double().numpy().copy() for item in engine.buckets.whole_values()}
    return weights, [(r.loss, r.grad_norm, r.fault) for r in results], touched, frozen


FROZEN_CASES = [
    *(({}, {}, "fp32", which) for which in FROZEN), ({"tensor": 2}, {}, "bf16", "bottom"), ({"tensor": 2}, {}, "bf16", "mixed"),
    ({"pipeline": 2, "schedule": "zb-h1"}, {}, "fp32", "bottom"), ({"pipeline": 2, "schedule": "zb-h1"}, {}, "fp32", "top"),
    ({"data": 2, "zero": 3}, {}, "bf16", "bottom"), ({"data": 2, "zero": 3}, {}, "bf16", "all but one"),
    ({"pipeline": 2, "schedule": "zb-v", "recompute": "full"}, FAMILIES["gpt2"], "fp32", "bottom"),
    ({"recompute": "selective"}, FAMILIES["gpt2"], "bf16", "mixed"), ({}, FAMILIES["deepseek"], "fp32", "matrices"),
    ({"data": 2, "expert": 2, "zero": 2}, FAMILIES["mixtral"], "fp32", "bottom"),
    ({}, {"train": {"numerics": "canonical"}, "model": {"kv_heads": 4}}, "fp32", "mixed"),
    ({}, {"train": {"numerics": "canonical"}, "model": {"kv_heads": 4}}, "fp32", "top"),
]  # fmt: skip


@pytest.mark.parametrize("layout, changes, precision, which", FROZEN_CASES, ids=name)
def test_gradients_of_frozen_parameters_are_not_made_and_all_others_keep_their_bits(layout, changes, precision, which, pool):
    lean, full = (spread(pool, frozen_rank, layout, layout, changes, FROZEN[which], precision, skip) for skip in (True, False))
    for (weights, results, touched, frozen), (right, right_results, all_touched, _) in zip(lean, full):
        assert results == right_results and not any(fault for *_, fault in results)
        assert weights.keys() == right.keys() and all((weights[key] == right[key]).all() for key in right)
        # what is multiplied together with others that learn
        assert not touched or which == "mixed" and all(".query." in key or ".gate." in key for key in touched)
        assert all_touched or layout.get("zero", 0) >= 2 or not frozen
