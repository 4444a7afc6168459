"""Normalised queries and keys against transformers' Qwen3, whose only other difference from a Llama is that heads have a width of their own.

Notable: the yardstick is that of tests/models/test_huggingface.py.
"""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtmegatron.batch import Batch, Bounds
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.layers.attention import Cache
from mtmegatron.mesh import Mesh
from mtmegatron.train.engine import Engine
from tests.models import test_huggingface as huggingface
from tests.models.test_huggingface import (
    DOCUMENTS,
    OURS,
    THEIRS,
    Kind,
    state,
    swap,
    worst,
)
from tests.tiny import tiny


def qwen3(ours: dict, **theirs) -> Kind:
    given = THEIRS | {"rms_norm_eps": 1e-6, "num_key_value_heads": 2, "head_dim": 12} | theirs
    return Kind(Qwen3ForCausalLM, Qwen3Config(**given), OURS | {"norm_eps": 1e-6, "qk_norm": True, "kv_heads": 2, "head_size": 12} | ours)


KINDS = {
    "qwen3": qwen3({}, tie_word_embeddings=False),
    "qwen3-tied-one-kv-head": qwen3({"tied": True, "kv_heads": 1}, tie_word_embeddings=True, num_key_value_heads=1),
    "qwen3-biases": qwen3({"bias_qkv": True, "bias_attention_out": True}, tie_word_embeddings=False, attention_bias=True),
}
NAMES = {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    """Those of test_huggingface.py with the kinds and names of this file."""
    for table, more in ((huggingface.KINDS, KINDS), (huggingface.NAMES, NAMES)):
        for key, value in more.items():
            monkeypatch.setitem(table, key, value)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("packing", DOCUMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_all_gradients_equal_hugging_face(kind, packing, precision):
    excess, where = worst(kind, state(kind), packing, precision)
    assert excess <= 1, where


def test_norms_of_query_and_key_swapped_show():
    excess, _ = worst("qwen3", swap("query_norm", "key_norm")(state("qwen3")), "equal", "fp32")
    assert excess > 1e3


def test_scores_do_not_depend_on_the_size_of_the_projections():
    """What the norms are for. Without the eps a query that is 7 times longer would give the same scores exactly."""
    config = check(tiny(model={"qk_norm": True, "norm_eps": 1e-12, "init_std": 0.5}, train={"precision": "fp64"}), 1)
    engine = Engine(config, Mesh(layout_of(config)))
    batch = Batch(torch.arange(20), torch.arange(20), torch.arange(20), Bounds((0, 20)))
    with torch.no_grad():
        before = engine.model.logits(engine.model(None, batch))
        for name, p in engine.model.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                p.mul_(7)
        after = engine.model.logits(engine.model(None, batch))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-10 * float(before.abs().max()))


def test_tokens_one_by_one_from_the_cache_have_the_logits_of_all_at_once():
    config = check(tiny(model={"qk_norm": True}, train={"precision": "fp64"}), 1)
    model, tokens, cache = Engine(config, Mesh(layout_of(config))).model, torch.arange(20), Cache(1)
    with torch.no_grad():
        whole = model.logits(model(None, Batch(tokens, tokens, torch.arange(20), Bounds((0, 20)))))
        steps = [model.logits(model(None, Batch(t, t, p, Bounds((0, 1))), cache)) for t, p in zip(tokens.split(1), torch.arange(20).split(1))]
    torch.testing.assert_close(torch.cat(steps), whole, rtol=1e-12, atol=1e-12)
