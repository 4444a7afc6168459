"""Whole models with experts against transformers' Mixtral, DeepSeek-V2, DeepSeek-V3 and Qwen3-MoE: same weights, so the same logits, choices, balance
loss and gradients.

Notable: the yardstick is that of tests/models/test_huggingface.py. transformers' balance loss counts k assignments a token and takes all layers as
one, so with one layer it is k times ours.
"""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mtmegatron.batch import Batch, Bounds
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import Config
from mtmegatron.layers.moe import MoE
from mtmegatron.mesh import Mesh
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import FACTOR
from tests.layers import test_latent as latent
from tests.models import test_huggingface as huggingface
from tests.models import test_qwen3 as qwen3
from tests.models.test_huggingface import (
    DOCUMENTS,
    OURS,
    THEIRS,
    UNIT,
    Double,
    Kind,
    distance,
    documents,
    state,
    worst,
)

EXPERTS, TOP_K, WIDE = 8, 4, 24
GROUPS = {"n_group": 4, "topk_group": 2}
KEPT = {"groups": 4, "groups_kept": 2}
BASE = THEIRS | {"num_key_value_heads": 2, "tie_word_embeddings": False, "experts_implementation": "eager"}


def mixtral(layers: int = 2, **moe) -> Kind:
    given = {"num_hidden_layers": layers, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "sliding_window": None}
    config = MixtralConfig(**BASE | given, num_local_experts=EXPERTS, num_experts_per_tok=2)
    own = {"experts": EXPERTS, "top_k": 2, "score_after": True} | moe
    return Kind(MixtralForCausalLM, config, OURS | {"kv_heads": 2, "layers": layers, "moe": own})


def deepseek(model: type, config: type, theirs: dict, **moe) -> Kind:
    given = {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "n_shared_experts": 2, "moe_intermediate_size": WIDE, "first_k_dense_replace": 1}
    made = latent.theirs(config, **given | theirs, experts_implementation="eager")
    own = {"experts": EXPERTS, "top_k": TOP_K, "shared": 2, "ffn": WIDE, "first_dense": 1} | moe
    return Kind(model, made, latent.ours() | {"moe": own})


def qwen() -> Kind:
    given = {"rms_norm_eps": 1e-6, "head_dim": 12, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": WIDE}
    config = Qwen3MoeConfig(**BASE | given, norm_topk_prob=True, mlp_only_layers=[0])
    own = {"experts": EXPERTS, "top_k": TOP_K, "ffn": WIDE, "renormalise": True, "pattern": [False, True]}
    return Kind(Qwen3MoeForCausalLM, config, OURS | {"norm_eps": 1e-6, "qk_norm": True, "kv_heads": 2, "head_size": 12, "moe": own})


V3 = {"num_mtp_layers": 0, "norm_topk_prob": True, "routed_scaling_factor": 2.5} | GROUPS
KINDS = {
    "mixtral": mixtral(),
    "mixtral-balanced": mixtral(1, aux_loss=0.5),
    "deepseek-v2": deepseek(
        DeepseekV2ForCausalLM, DeepseekV2Config, {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0} | GROUPS,
        scale=4.0, group_score="max", **KEPT,
    ),
    "deepseek-v2-lite": deepseek(DeepseekV2ForCausalLM, DeepseekV2Config, {"topk_method": "greedy"}),
    "deepseek-v3": deepseek(DeepseekV3ForCausalLM, DeepseekV3Config, V3, scale=2.5, score="sigmoid", renormalise=True, **KEPT),
    "qwen3-moe": qwen(),
}  # fmt: skip
WHOLE = [kind for kind in KINDS if kind != "mixtral-balanced"]
plain_names = huggingface.in_our_names


def in_our_names(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names of experts, router and shared experts first, then the others."""
    renamed: dict[str, Tensor] = {}
    for name, t in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            renamed |= {name.replace("gate_up_proj", part): half for part, half in zip(("gate", "up"), t.chunk(2, dim=1))}
        else:
            name = re.sub(r"mlp\.gate\.weight", "mlp.router.weight", name).replace("mlp.experts.down_proj", "mlp.experts.down")
            renamed[re.sub(r"shared_experts\.(\w+)_proj", r"shared.\1", name)] = t
    return plain_names(renamed)


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    """Those of test_huggingface.py with the kinds and names of this file."""
    for table, more in ((huggingface.KINDS, KINDS), (huggingface.NAMES, latent.NAMES | qwen3.NAMES)):
        for key, value in more.items():
            monkeypatch.setitem(table, key, value)
    monkeypatch.setattr(huggingface, "in_our_names", in_our_names)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("packing", DOCUMENTS)
@pytest.mark.parametrize("kind", WHOLE)
def test_logits_and_all_gradients_equal_hugging_face(kind, packing, precision):
    excess, where = worst(kind, state(kind), packing, precision)
    assert excess <= 1, where


def ours(kind: str) -> Engine:
    """In fp64 with their weights."""
    config = Config.model_validate({
        "model": KINDS[kind].ours, "train": {"precision": "fp64", "micro_batch": 1, "global_batch": 1}, "data": {"sequence": 40},
    })  # fmt: skip
    config = check(config, 1)
    engine, weights = Engine(config, Mesh(layout_of(config))), state(kind)
    with torch.no_grad():
        for name, p in engine.model.named_parameters():
            p.copy_(weights[name])
    return engine


def one_document() -> tuple[Batch, Tensor, Tensor]:
    tokens, labels = documents((40,))[0]
    return Batch(tokens, labels, torch.arange(40), Bounds((0, 40))), tokens, labels


@pytest.mark.parametrize("kind", WHOLE)
def test_every_token_goes_to_the_same_experts(kind, monkeypatch):
    chosen, right = [], []
    plain = MoE._within_capacity
    monkeypatch.setattr(MoE, "_within_capacity", lambda self, routing, where: chosen.append(plain(self, routing, where)) or chosen[-1])
    engine, (batch, tokens, _), model = ours(kind), one_document(), huggingface.theirs(kind)
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(lambda module, given, out: right.append(out[-1])) for router in routers]
    with torch.no_grad(), Double():
        model(tokens[None])
    with torch.no_grad():
        engine.model(None, batch)
    for hook in hooks:
        hook.remove()
    assert len(chosen) == len(right) > 0
    for mine, other in zip(chosen, right):
        assert torch.equal(mine.sort(-1).values, other.sort(-1).values) and len(mine.unique()) > mine.shape[1], "and choices differ"


def test_the_balance_loss_and_its_gradients_equal_hugging_face():
    kind, coefficient = "mixtral-balanced", 0.5
    engine, (batch, tokens, labels), model = ours(kind), one_document(), huggingface.theirs(kind)
    with Double():
        out = model(tokens[None], output_router_logits=True)
        right = torch.nn.functional.cross_entropy(out.logits[0], labels) + coefficient * out.aux_loss / 2
    names, parameters = zip(*model.named_parameters())
    gradients = dict(in_our_names(dict(zip(names, torch.autograd.grad(right, parameters)))))
    engine.gradients([batch], engine.count_tokens([batch]))
    (layer,) = [module for module in engine.model.modules() if isinstance(module, MoE)]
    term = layer.record[EXPERTS + 2]  # the first term
    assert float(term) == pytest.approx(coefficient * out.aux_loss.item() / 2, rel=64 * UNIT[torch.float64])
    for name, p in engine.model.named_parameters():
        # a sum over 40 tokens of products over at most 61 channels, through attention, experts and head
        assert distance(p.grad_sum, gradients[name]) <= FACTOR * 40 * 61 * UNIT[torch.float64] * float(gradients[name].norm()), name
    without = torch.autograd.grad(torch.nn.functional.cross_entropy(model(tokens[None]).logits[0], labels), parameters)
    plain = dict(in_our_names(dict(zip(names, without))))["layers.0.mlp.router.weight"]
    assert distance(plain, gradients["layers.0.mlp.router.weight"]) > 1e-3 * float(plain.norm()), "the term takes part"
