"""Published architectures: the files in configs/ have the published hyper-parameters and, from the configuration alone, the published counts.

Notable: right values are the figures of the papers, the published configuration files, and transformers' own classes on the meta device.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    Qwen3MoeConfig,
)

from mtmegatron.config import Config, check, load
from mtmegatron.models.size import active_parameters, parameters, prediction_parameters
from tests.models.test_size import existing
from tests.shared import shared

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2-0.5b": 494_032_768,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,  # without the module of multi-token prediction
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_architectures_have_the_published_number_of_parameters(name):
    config = check(load(CONFIGS / f"{name}.yaml").config, 1)
    assert parameters(config.model) - prediction_parameters(config.model) == PUBLISHED[name]
    assert existing(config) == parameters(config.model)


def test_every_architecture_file_is_tested():
    described = [path.stem for path in CONFIGS.glob("*.yaml") if load(path).config.model.width >= 768]
    assert sorted(described) == sorted(PUBLISHED)


THEIR_WORDS = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size", "norm_eps": "rms_norm_eps",
    "rope_base": "rope_theta",
    "tied": "tie_word_embeddings", "init_std": "initializer_range", "max_positions": "max_position_embeddings",
    "rope_scaling": "rope_scaling",
}  # fmt: skip


@pytest.mark.parametrize(
    "name, folder", [("llama3-8b", "Llama3-8B"), ("llama3-70b", "Llama3-72B"), ("qwen2-0.5b", "Qwen2-0.5B")]
)
def test_architecture_files_say_what_the_published_files_say(name, folder):
    published = json.loads(shared(f"hf_config/full/{folder}/config.json").read_text())
    model = load(CONFIGS / f"{name}.yaml").config.model
    if (
        name == "llama3-8b"
    ):  # the file at hand is that of Llama 3.1, which differs in the long context alone, as ours says
        text = (CONFIGS / f"{name}.yaml").read_text()
        assert f"max_positions: {published['max_position_embeddings']}" in text
        assert all(f"{key}: {value}" in text for key, value in published["rope_scaling"].items())
        published |= {"max_position_embeddings": 8192, "rope_scaling": None}
    assert {key: getattr(model, key) for key in THEIR_WORDS} == {
        key: published.get(word) for key, word in THEIR_WORDS.items()
    }
    assert model.activation == "swiglu" and published["hidden_act"] == "silu"
    assert model.bias_qkv == (published["model_type"] == "qwen2")


# of published files of mixtures of experts, in the words of their formats
DEEPSEEK = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size", "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps", "rope_base": "rope_theta", "tied": "tie_word_embeddings", "max_positions": "max_position_embeddings",
    "moe.experts": "n_routed_experts", "moe.top_k": "num_experts_per_tok", "moe.ffn": "moe_intermediate_size", "moe.shared": "n_shared_experts",
    "moe.first_dense": "first_k_dense_replace", "moe.score": "scoring_func", "moe.scale": "routed_scaling_factor", "moe.groups": "n_group",
    "moe.groups_kept": "topk_group", "moe.renormalise": "norm_topk_prob", "latent.query_rank": "q_lora_rank", "latent.kv_rank": "kv_lora_rank",
    "latent.nope": "qk_nope_head_dim", "latent.rope": "qk_rope_head_dim", "latent.value": "v_head_dim",
}  # fmt: skip
NATIVE = {
    "layers": "n_layers", "width": "dim", "heads": "n_heads", "ffn": "inter_dim", "vocab": "vocab_size", "rope_scaling.mscale": "mscale",
    "moe.experts": "n_routed_experts", "moe.top_k": "n_activated_experts", "moe.ffn": "moe_inter_dim", "moe.shared": "n_shared_experts",
    "moe.first_dense": "n_dense_layers", "moe.scale": "route_scale", "latent.kv_rank": "kv_lora_rank", "latent.nope": "qk_nope_head_dim",
    "latent.rope": "qk_rope_head_dim", "latent.value": "v_head_dim",
}  # fmt: skip
MIXTRAL = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size", "vocab": "vocab_size", "rope_base": "rope_theta", "tied": "tie_word_embeddings",
    "max_positions": "max_position_embeddings", "moe.experts": "num_local_experts", "moe.top_k": "num_experts_per_tok",
}  # fmt: skip
QWEN3 = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "head_size": "head_dim", "vocab": "vocab_size", "norm_eps": "rms_norm_eps", "rope_base": "rope_theta", "tied": "tie_word_embeddings",
    "moe.experts": "num_experts", "moe.top_k": "num_experts_per_tok", "moe.ffn": "moe_intermediate_size", "moe.renormalise": "norm_topk_prob",
}  # fmt: skip
# name: file, words, transformers' configuration, and what differs in the file at hand: that of Qwen3 is of a smaller test model
EXPERTS = {
    "mixtral-8x7b": ("transcribed/Mixtral-8x7B-v0.1/config.json", MIXTRAL, MixtralConfig, {}),
    "deepseek-v2-lite": ("deepseek_native/config_16B.json", NATIVE, DeepseekV2Config, {}),
    "deepseek-v2": ("full/DeepseekV2_236B/config.json", DEEPSEEK, DeepseekV2Config, {}),
    "deepseek-v3": ("full/DeepseekV3_671B/config.json", DEEPSEEK, DeepseekV3Config, {}),
    "qwen3-30b-a3b": (
        "toy/qwen3_moe/config.json", QWEN3, Qwen3MoeConfig, {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
    ),
}  # fmt: skip


def value_of(model, key: str):
    for part in key.split("."):
        model = model[part] if isinstance(model, dict) else getattr(model, part)
    return model


def published_file(name: str) -> dict:
    path, _, _, changes = EXPERTS[name]
    return json.loads(shared(f"hf_config/{path}").read_text()) | changes


@pytest.mark.parametrize("name", EXPERTS)
def test_files_of_mixtures_of_experts_say_what_the_published_files_say(name):
    model, published, words = load(CONFIGS / f"{name}.yaml").config.model, published_file(name), EXPERTS[name][1]
    assert {key: value_of(model, key) for key in words} == {key: published[word] for key, word in words.items()}
    scaling = published.get("rope_scaling")
    if scaling:
        assert model.rope_scaling == {"rope_type" if key == "type" else key: value for key, value in scaling.items()}


def theirs_of(name: str) -> torch.nn.Module:
    """transformers' model of a published file, on the meta device."""
    file, words, config, _ = EXPERTS[name]
    given = published_file(name)
    if words is NATIVE:
        given = {DEEPSEEK[key]: given[word] for key, word in NATIVE.items() if key in DEEPSEEK}
        given |= {"q_lora_rank": None, "tie_word_embeddings": False, "num_key_value_heads": given["num_attention_heads"]}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(**{k: v for k, v in given.items() if k not in ("model_type", "architectures")}))


@pytest.mark.parametrize("name", EXPERTS)
def test_total_and_active_parameters_are_those_of_transformers_classes(name):
    model, theirs = load(CONFIGS / f"{name}.yaml").config.model, theirs_of(name)
    model = check(Config(model=model), 1).model
    biases = [(n, b) for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias")]
    counts = {n: t.numel() for n, t in (*theirs.named_parameters(), *biases)}
    idle = sum(count for n, count in counts.items() if ".experts." in n) * (model.moe.experts - model.moe.top_k) // model.moe.experts
    assert parameters(model) - prediction_parameters(model) == sum(counts.values())
    assert active_parameters(model) == sum(counts.values()) - idle


# billions as printed in the papers, their decimals, and whether they count the embedding table, of which a token takes one row
ACTIVE = {
    "mixtral-8x7b": (12.9, 1, True), "deepseek-v2-lite": (2.4, 1, False), "deepseek-v2": (21, 0, False), "deepseek-v3": (37, 0, False),
    "qwen3-30b-a3b": (3.3, 1, True),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_printed(name):
    """To the last digit, rounded or cut: 2.45 is printed as 2.4, 3.35 as 3.3."""
    model = check(load(CONFIGS / f"{name}.yaml").config, 1).model
    printed, decimals, table = ACTIVE[name]
    count = (active_parameters(model) - (0 if table else model.vocab * model.width)) / 1e9
    assert printed in (round(count, decimals), math.floor(count * 10**decimals) / 10**decimals)
