"""Latent attention against transformers' DeepSeek-V2 and V3, and against itself: recomputed, and from a cache of short vectors.

Notable: whole tiny models with dense feed-forward layers, with the yardstick of tests/models/test_huggingface.py.
"""

import re
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from mtmegatron.batch import Batch, Bounds
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import Config
from mtmegatron.layers.attention import Cache
from mtmegatron.layers.latent import _remade
from mtmegatron.mesh import Mesh
from mtmegatron.models.decoder import Decoder
from mtmegatron.models.generation import Options, generate, next_logits
from mtmegatron.plan.collectives import record_step
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import FACTOR, batches, describe, world_of
from tests.models import test_huggingface as huggingface
from tests.models.test_huggingface import (
    DOCUMENTS,
    LAYERS,
    OURS,
    THEIRS,
    Kind,
    state,
    worst,
)
from tests.tiny import tiny

SIZES = {"query_rank": 12, "kv_rank": 20, "nope": 10, "rope": 8, "value": 6}
YARN = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def ours(yarn: dict | None = None, **latent) -> dict:
    return OURS | {"norm_eps": 1e-6, "latent": SIZES | latent, "rope_scaling": yarn}


def theirs(config: type, rank: int | None = 12, yarn: dict | None = None, **more):
    given = THEIRS | {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "first_k_dense_replace": LAYERS, "tie_word_embeddings": False}
    given |= {"q_lora_rank": rank, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6}
    given |= {"rope_parameters": (yarn or {"rope_type": "default"}) | {"rope_theta": 10000.0}}
    return config(**given | more)


def v2(rank: int | None = 12, yarn: dict | None = None) -> Kind:
    return Kind(DeepseekV2ForCausalLM, theirs(DeepseekV2Config, rank, yarn), ours(yarn, query_rank=rank))


def v3(rank: int | None = 12, yarn: dict | None = None, interleaved: bool = True) -> Kind:
    config = theirs(DeepseekV3Config, rank, yarn, rope_interleave=interleaved, num_mtp_layers=0)
    return Kind(DeepseekV3ForCausalLM, config, ours(yarn, query_rank=rank, interleaved=interleaved))


KINDS = {
    "v2": v2(),
    "v2-lite-yarn": v2(None, YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
    "v3-half": v3(interleaved=False),
    "v3-direct-query": v3(None),
    "v3-yarn": v3(yarn=YARN),
    "v3-half-yarn-two-mscales": v3(None, YARN | {"mscale": 0.8, "beta_fast": 4}, interleaved=False),
    "v3-yarn-no-mscale": v3(yarn={key: YARN[key] for key in ("rope_type", "factor", "original_max_position_embeddings")}),
}
NAMES = {
    "self_attn.q_a_proj": "attention.query_down", "self_attn.q_a_layernorm": "attention.query_norm", "self_attn.q_b_proj": "attention.query_up",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down", "self_attn.kv_a_layernorm": "attention.kv_norm", "self_attn.kv_b_proj": "attention.kv_up",
}  # fmt: skip


@pytest.fixture(autouse=True)
def deepseek(monkeypatch):
    """The tables of test_huggingface.py with the kinds and names of this file."""
    for table, more in ((huggingface.KINDS, KINDS), (huggingface.NAMES, NAMES)):
        for key, value in more.items():
            monkeypatch.setitem(table, key, value)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("packing", DOCUMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_all_gradients_equal_hugging_face(kind, packing, precision):
    excess, where = worst(kind, state(kind), packing, precision)
    assert excess <= 1, where


def test_a_fault_of_the_layout_of_rotated_channels_shows():
    """V01: the channels of interleaved pairs taken for halves."""
    wrong = {}
    for name, t in state("v3-half").items():
        if re.search(r"query_up|kv_down", name):
            still, turned = t.unflatten(0, (-1, 18) if "query" in name else (1, 28)).split([10 if "query" in name else 20, 8], 1)
            t = torch.cat([still, turned.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)], 1).flatten(0, 1)
        wrong[name] = t
    excess, _ = worst("v3-half", wrong, "equal", "fp32")
    assert excess > 1e3


@pytest.mark.parametrize("mscale, factor", [(1.0, 1.87385), (0.707, 1.58963)])
def test_v05_the_scale_of_scores_has_the_square_of_mscale(mscale, factor):
    scales = []
    for scaling in (None, YARN | {"mscale_all_dim": mscale}):
        model = engine_of({"rope_scaling": scaling}).model
        scales.append(model.layers["0"].attention.scale)
    assert scales[0] == pytest.approx((10 + 8) ** -0.5, rel=1e-15)
    assert scales[1] / scales[0] == pytest.approx(factor, abs=5e-6)


# ---- recomputation ----


def engine_of(model: dict, **sections) -> Engine:
    config = check(tiny({"model": {"kv_heads": None, "latent": SIZES} | model}, sections), 1)
    return Engine(config, Mesh(layout_of(config)))


PARTS = [[], ["norm"], ["up"], ["norm", "up"], ["attention"], ["attention", "norm", "activation", "up"]]


def gradients(parts: list[str], model: dict) -> tuple[tuple, list[torch.Tensor]]:
    mode = {"mode": "selective", "parts": parts} if parts else {"mode": "none"}
    engine = engine_of(model, recompute=mode, train={"global_batch": 4})
    mine = batches(engine, 0)
    numbers = engine.gradients(mine, engine.count_tokens(mine), 1)
    return numbers, [bucket.own_gradients.clone() for bucket in engine.buckets.buckets]


@pytest.mark.parametrize("model", [{}, {"latent": SIZES | {"query_rank": None}}, {"dropout_attention": 0.2}], ids=["plain", "direct", "dropout"])
def test_recomputed_gradients_have_the_same_bits(model):
    numbers, right = gradients([], model)
    for parts in PARTS[1:]:
        mine, found = gradients(parts, model)
        assert mine == numbers and all(torch.equal(a, b) for a, b in zip(found, right, strict=True)), parts


def storages_left(monkeypatch, parts: list[str]) -> list[bool]:
    """For query, key and value of a block whether they are in memory between forward and backward."""
    attention = engine_of({}, recompute={"mode": "selective", "parts": parts} if parts else {})
    block, refs = attention.model.layers["0"].attention, []
    core = block._core

    def spied(*qkv_where):
        refs.extend(StorageWeakRef(t.untyped_storage()) for t in qkv_where[:3])
        return core(*qkv_where)

    monkeypatch.setattr(block, "_core", spied)
    hidden = attention.model(None, batches(attention, 0)[0], step=0)
    left = [not ref.expired() for ref in refs]
    assert len(left) == 3 and hidden.requires_grad
    return left


def test_up_keeps_neither_queries_nor_keys_nor_values(monkeypatch):
    for parts in PARTS:
        assert storages_left(monkeypatch, parts) == [("up" not in parts)] * 3, parts


def test_views_that_a_function_keeps_are_made_again_with_their_strides():
    """As kernels of other devices keep them: heads first."""
    weights, calls = [torch.randn(6, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64).requires_grad_() for i in range(3)], []

    def make() -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return tuple((w * w).unflatten(1, (2, 4))[..., 1:] for w in weights)

    def function(*qkv: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in qkv), is_causal=True).square()

    right = torch.autograd.grad(function(*make()).sum(), weights)
    mine = torch.autograd.grad(_remade(function, make).sum(), weights)
    assert len(calls) == 3 and all(torch.equal(a, b) for a, b in zip(mine, right))


def test_up_does_not_repeat_attention(monkeypatch):
    """Without "attention" only the short vectors are projected again, once."""
    for parts, cores in ((["norm", "up"], 1), (["attention", "up"], 2), (["attention"], 2)):
        engine, calls = engine_of({}, recompute={"mode": "selective", "parts": parts}, train={"global_batch": 2}), []
        block = engine.model.layers["0"].attention
        for name in ("_core", "_up"):
            monkeypatch.setattr(block, name, partial(lambda name, f, *given: calls.append(name) or f(*given), name, getattr(block, name)))
        mine = batches(engine, 0)
        assert len(mine) == 1
        engine.gradients(mine, engine.count_tokens(mine), 1)
        assert calls.count("_core") == cores and calls.count("_up") == 1 + ("up" in parts), parts


# ---- what a step sends and keeps, known without processes ----


def recorded(parallel: dict, parts: tuple[str, ...] = (), model: dict = {}):
    mode = {"recompute": {"mode": "selective", "parts": list(parts)}} if parts else {}
    sections = {"parallel": parallel, "train": {"global_batch": 2}, **mode}
    config = check(tiny({"model": {"kv_heads": None, "latent": SIZES, "layers": 1} | model}, sections), world_of(parallel))
    return record_step(config, 0)


@pytest.mark.parametrize("parts, backwards", [((), 1), (("norm", "up"), 2)])
def test_what_is_gathered_for_attention_is_short(parts, backwards):
    """64 tokens in fp32: beside the inputs of the feed-forward layer and of the head, the three short vectors travel. In backward they do for the
    weight gradients of the two up-projections, and when these are made again."""
    transfers = [t for t in recorded({"tensor": 2}, parts).transfers if t.axis == "tensor" and t.operation == "all_gather"]
    short = {64 * 4 * SIZES[name]: name for name in ("query_rank", "kv_rank", "rope")}
    found = [(t.when, short.get(t.bytes, "width")) for t in transfers]
    forward = [name for when, name in found if when == "forward"]
    assert sorted(forward) == sorted([*short.values(), "width", "width"])
    backward = [name for when, name in found if when == "backward"]
    assert [backward.count(name) for name in ("query_rank", "kv_rank", "rope")] == [backwards, backwards, backwards - 1]


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, *({"context": 2, "context_kind": kind} for kind in ("ulysses", "ring"))], ids=describe)
def test_a_plan_knows_what_up_does_not_keep(parallel):
    """Of each token, and for each head in fp32: the query, the key, and k_nope and V; beside what it saves in the feed-forward layer."""

    def saved(model: dict) -> int:
        return recorded(parallel, ("norm",), model).kept[0] - recorded(parallel, ("norm", "up"), model).kept[0]

    channels = 2 * (SIZES["nope"] + SIZES["rope"]) + SIZES["nope"] + SIZES["value"]
    assert saved({}) - saved({"latent": None}) >= 64 * 4 * channels * 4 // world_of(parallel)


# ---- generation ----

VOCAB = 37
MODELS = {
    "compressed query": {"latent": SIZES},
    "direct query, yarn, half": {"latent": SIZES | {"query_rank": None, "interleaved": False}, "rope_scaling": YARN},
}
PROMPTS = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 4, 17, 90)]


def decoder(model: dict, precision: str = "fp64") -> Decoder:
    """With weights so large that tokens differ."""
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocab": VOCAB, "init_std": 0.4}
    config = Config.model_validate({"model": sizes | model, "data": {"sequence": 128}, "train": {"precision": precision}})
    config = check(config, 1)
    return Engine(config, Mesh(layout_of(config))).model.requires_grad_(False)


def whole_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    n = len(tokens)
    batch = Batch(torch.tensor(tokens), torch.full((n,), -100), torch.arange(n), Bounds((0, n)))
    return model.logits(model(None, batch))


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_from_short_vectors_are_those_of_the_whole(name, precision):
    """Rounding is what fp32 without a cache is off; the cache, in its own units, may be off FACTOR times that."""
    prompts = PROMPTS[1:3]
    exact, single, model = (decoder(MODELS[name], p) for p in ("fp64", "fp32", precision))
    whole = [whole_logits(exact, prompt) for prompt in prompts]
    rounding = max(float((whole_logits(single, p).double() - right).abs().max()) for p, right in zip(prompts, whole))
    bound = FACTOR * rounding * torch.finfo(model.build.dtype).eps / torch.finfo(torch.float32).eps
    cache = Cache(2)
    for start, end in (((0, 0), (2, 9)), ((2, 9), (3, 16)), ((3, 16), (4, 17))):  # the pieces differ in length
        mine = next_logits(model, [p[a:b] for p, a, b in zip(prompts, start, end)], list(start), cache)
        for row, right, b in zip(mine, whole, end):
            assert (row - right[b - 1]).abs().max() <= bound
    assert cache.longest == 17
    numbers = {rows.filled[0].numel() for entry in cache.entries.values() for pair in entry for rows in pair}
    assert numbers == {SIZES["kv_rank"] + SIZES["rope"], 0}  # of each token and layer, for all heads


@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_those_of_a_model_without_a_cache(name):
    model, right = decoder(MODELS[name]), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(whole_logits(model, tokens)[-1].argmax()))
        right.append(tokens[len(prompt) :])
    assert generate(model, PROMPTS, Options(max_new_tokens=12)) == right
    assert len({tuple(tokens) for tokens in right}) == len(PROMPTS)


def test_bf16_generates_from_short_vectors():
    """The products with the cache are fp32, so both paths round the same numbers at other places."""
    exact, model = decoder(MODELS["compressed query"]), decoder(MODELS["compressed query"], "bf16")
    prompt, cache = PROMPTS[2], Cache(1)
    next_logits(model, [prompt[:-1]], [0], cache)
    cached = next_logits(model, [prompt[-1:]], [len(prompt) - 1], cache)[0].double()
    right, plain = whole_logits(exact, prompt)[-1], whole_logits(model, prompt)[-1].double()
    assert (cached - right).norm() <= FACTOR * (plain - right).norm()
