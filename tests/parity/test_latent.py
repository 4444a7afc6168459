"""Latent attention in every layout computes what one process computes (see mtmegatron/verify/protocol.py), and generates the same tokens."""

import math
from functools import cache

import pytest

from mtmegatron.models.generation import Options, generate
from mtmegatron.verify.protocol import serial_reference
from tests.field.test_recompute import different
from tests.models.test_generation import (
    DRAWN,
    configuration,
    in_layout,
    model_of,
    prompts_of,
    saved,
)
from tests.parity.common import equals_serial, name
from tests.tiny import tiny

SIZES = {"query_rank": 24, "kv_rank": 20, "nope": 12, "rope": 8, "value": 10}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}
MODELS = {
    "compressed": {"model": {"kv_heads": None, "latent": SIZES, "bias_attention_out": True}},
    "direct": {
        "model": {"kv_heads": None, "latent": SIZES | {"query_rank": None, "interleaved": False}, "rope_scaling": YARN, "tied": True},
        "data": {"mask_documents": True},
    },
    "layernorm": {"model": {"kv_heads": None, "latent": SIZES, "norm": "layernorm"}},
}
UP = {"recompute": "selective", "parts": ["norm", "up"]}
ALL = {"recompute": "selective", "parts": ["attention", "norm", "activation", "up"]}
CASES = [
    ("compressed", {"tensor": 2}), ("compressed", {"tensor": 2, "sequence": False} | UP), ("direct", {"tensor": 4}),
    ("direct", {"tensor": 2, "sequence": False}), ("layernorm", {"tensor": 2}), ("compressed", {"tensor": 2} | ALL),
    ("compressed", {"context": 2}), ("compressed", {"context": 2, "context_kind": "ring"} | UP), ("direct", {"context": 4, "context_kind": "ring"}),
    ("direct", {"context": 4, "context_kind": "ulysses"}), ("direct", {"context": 4, "context_kind": "ring-ulysses", "ulysses": 2} | UP),
    ("direct", {"tensor": 2, "context": 2, "context_kind": "ulysses"} | ALL), ("compressed", {"tensor": 2, "context": 2, "context_kind": "ring"}),
    ("compressed", {"pipeline": 2, "schedule": "zb-h1"} | UP), ("direct", {"pipeline": 2, "schedule": "zb-v", "micro_batch": 1} | UP),
    ("compressed", {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"} | ALL), ("direct", {"data": 4, "zero": 3, "micro_batch": 1} | UP),
    ("compressed", {"tensor": 2, "data": 2, "zero": 3} | UP), ("direct", {"tensor": 2, "data": 2, "zero": 1, "recompute": "full"}),
]  # fmt: skip
ROUNDED = [
    ("compressed", {"tensor": 2}), ("direct", {"tensor": 2, "sequence": False}), ("direct", {"context": 2}), ("compressed", {"pipeline": 2} | UP),
]  # fmt: skip


@cache
def reference(model: str):
    return serial_reference(tiny(MODELS[model]), ("fp32", "bf16"))


@pytest.mark.parametrize(
    "model, layout, precision", [(*case, "fp64") for case in CASES] + [(*case, p) for case in ROUNDED for p in ("fp32", "bf16")], ids=name
)
def test_layout_equals_serial(model, layout, precision, pool):
    equals_serial(tiny(MODELS[model]), layout, precision, reference(model), pool)


# ---- recomputation has the same bits in every layout ----

MODES = [{"recompute": "full"}, UP, ALL]
LAYOUTS = [
    {"tensor": 2}, {"tensor": 2, "sequence": False}, {"pipeline": 2, "schedule": "zb-h1"}, {"data": 2, "zero": 3},
    {"context": 2, "context_kind": "ring"}, {"context": 2, "context_kind": "ulysses"},
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_recomputed_gradients_have_the_same_bits(layout, pool):
    model = MODELS["compressed"]["model"]
    assert not any(pool.run(different, 2, model, layout, MODES))


# ---- generation ----

GENERATING = [{"tensor": 2}, {"tensor": 2, "sequence": False}, {"tensor": 4}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocab": 37, "init_std": 0.4, "latent": SIZES}
    models = {"compressed": sizes, "direct": sizes | {"latent": SIZES | {"query_rank": None}, "rope_scaling": YARN}}
    return {name: saved(tmp_path_factory.mktemp(name), configuration(model)) for name, model in models.items()}


@pytest.mark.parametrize("model", ["compressed", "direct"])
@pytest.mark.parametrize("layout", GENERATING, ids=name)
def test_every_layout_generates_the_tokens_of_one_process(stores, pool, model, layout):
    prompts, options = prompts_of(1, 3, 17), [Options(max_new_tokens=12), DRAWN]
    right = [generate(model_of(stores[model]), prompts, o) for o in options]
    assert len({tuple(tokens) for tokens in right[0]}) == 3
    world = math.prod(n for n in layout.values() if not isinstance(n, bool))
    for answer in pool.run(in_layout, world, stores[model].folder, layout, prompts, options):
        assert answer == right
