"""The decoder against Hugging Face transformers: same weights and documents, so the same logits and gradients.

Notable:
- Right values are transformers' own in double precision. Its code rounds to fp32 inside (norms, softmax, rotary angles)
  whatever the model's type; `Double` turns those casts into fp64, so the comparison reaches 1e-14 and not 1e-6.
- What transformers' fp32 run differs from its fp64 run is rounding, tensor by tensor. Our fp32 run may differ by FACTOR
  times that, our fp64 run by the same times the ratio of the units of rounding.
- transformers runs each document alone, ours all of them end to end (field bugs D10, V01, V06, V07).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from mtmegatron.batch import IGNORE, Batch, Bounds
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import Config
from mtmegatron.mesh import Mesh
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import FACTOR

VOCAB, WIDTH, FFN, LAYERS = 61, 32, 40, 2
UNIT = {torch.float32: torch.finfo(torch.float32).eps, torch.float64: torch.finfo(torch.float64).eps}
# documents of a micro-batch: short equal ones, unequal ones longer than a block of query rows, one of a single token
DOCUMENTS = {"equal": (40, 40), "packed": (90, 1, 37)}

BIASES = {"bias_qkv": True, "bias_attention_out": True, "bias_mlp": True}
OURS = {"layers": LAYERS, "width": WIDTH, "heads": 4, "vocab": VOCAB, "ffn": FFN}
THEIRS = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "attn_implementation": "eager",
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Kind:
    """One architecture: the class of transformers, its configuration, and ours."""

    model: type
    config: object
    ours: dict


def llama(ours: dict, **theirs) -> Kind:
    return Kind(LlamaForCausalLM, LlamaConfig(**THEIRS | {"tie_word_embeddings": False} | theirs), OURS | ours)


KINDS = {
    "gpt2": Kind(
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCAB, n_positions=128, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_inner=FFN,
            activation_function="gelu_new", attn_implementation="eager", bos_token_id=0, eos_token_id=0,
        ),
        OURS | BIASES | {"norm": "layernorm", "positions": "learned", "max_positions": 128}
        | {"activation": "gelu_tanh", "tied": True},
    ),
    "llama": llama({}),
    "llama-tied-grouped": llama({"kv_heads": 2, "tied": True}, num_key_value_heads=2, tie_word_embeddings=True),
    "llama-one-kv-head": llama(
        {"kv_heads": 1, "rope_base": 500.0},
        num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "llama-wide-heads": llama({"head_size": 12, "kv_heads": 2}, head_dim=12, num_key_value_heads=2),
    "llama-biases": llama(BIASES, attention_bias=True, mlp_bias=True),
    "llama3-scaled": llama(
        {"kv_heads": 2, "rope_base": 100.0, "rope_scaling": LLAMA3_ROPE},
        num_key_value_heads=2, rope_parameters=LLAMA3_ROPE | {"rope_theta": 100.0},
    ),
    "qwen2": Kind(
        Qwen2ForCausalLM,
        Qwen2Config(**THEIRS | {"rms_norm_eps": 1e-6}, num_key_value_heads=2, tie_word_embeddings=True),
        OURS | {"kv_heads": 2, "bias_qkv": True, "tied": True, "norm_eps": 1e-6},
    ),
}  # fmt: skip


class Double(TorchFunctionMode):
    """Every mention of fp32 means fp64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def double(x):
            return torch.float64 if x is torch.float32 else x

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*(double(a) for a in args), **{k: double(v) for k, v in (kwargs or {}).items()})


# what a run shows: "logits" [T, V], "loss" (mean over tokens), and its gradient for each parameter by our name
Result = dict[str, Tensor]


@cache
def theirs(kind: str) -> torch.nn.Module:
    """transformers' model in fp64 with random weights that fp32 holds exactly.

    Norms are near 1, biases and all else large enough to matter."""
    torch.manual_seed(0)
    with Double():
        model = KINDS[kind].model(KINDS[kind].config).double().eval()
        for name, p in model.named_parameters():
            near_one = p.dim() == 1 and name.endswith("weight")
            p.data = (near_one + 0.25 * torch.randn(p.shape)).float().double()
    return model


@cache
def documents(lengths: tuple[int, ...]) -> tuple[tuple[Tensor, Tensor], ...]:
    """(tokens, labels) of each document; some labels take no part in the loss."""
    draw = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, VOCAB, (2, n), generator=draw) for n in lengths]
    return tuple((t, y.masked_fill(torch.rand(len(y), generator=draw) < 0.1, IGNORE)) for t, y in tokens)


@cache
def right(kind: str, lengths: tuple[int, ...]) -> tuple[Result, dict[str, float]]:
    """transformers' result in fp64, and by name what rounding to fp32 does to it.

    The gradient of a token's loss by its logits is at most sqrt(2) long, so logits' rounding bounds the loss's."""
    model = theirs(kind)
    with Double():
        exact = hugging_face(model, lengths)
    single = KINDS[kind].model(KINDS[kind].config).eval()
    single.load_state_dict(model.state_dict())
    rounded = hugging_face(single, lengths)
    rounding = {name: distance(rounded[name], t) for name, t in exact.items()}
    rounding["loss"] = rounding["logits"] * (2 / sum(lengths)) ** 0.5
    return exact, {name: max(r, UNIT[torch.float32] * float(exact[name].norm())) for name, r in rounding.items()}


def hugging_face(model: torch.nn.Module, lengths: tuple[int, ...]) -> Result:
    """Each document alone through transformers; the mean loss over the valid tokens of all."""
    logits = torch.cat([model(tokens[None]).logits[0] for tokens, _ in documents(lengths)])
    loss = torch.nn.functional.cross_entropy(logits, torch.cat([y for _, y in documents(lengths)]))
    names, parameters = zip(*model.named_parameters())
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters)))
    return {"logits": logits.detach(), "loss": loss.detach()} | dict(in_our_names(gradients))


NAMES = {
    "model.embed_tokens": "embedding", "transformer.wte": "embedding", "transformer.wpe": "positions",
    "model.layers": "layers", "transformer.h": "layers",
    "input_layernorm": "attention_norm", "ln_1": "attention_norm",
    "post_attention_layernorm": "mlp_norm", "ln_2": "mlp_norm",
    "self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key", "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out", "attn.c_proj": "attention.out",
    "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.c_fc": "mlp.up",
    "mlp.down_proj": "mlp.down", "mlp.c_proj": "mlp.down",
    "model.norm": "norm", "transformer.ln_f": "norm", "lm_head": "head",
}  # fmt: skip


def in_our_names(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """transformers' parameters or gradients as ours. GPT-2 keeps matrices as [in, out], query, key and value in one."""
    for name, t in tensors.items():
        for pattern, ours in NAMES.items():
            name = re.sub(rf"(^|(?<=\.)){re.escape(pattern)}(?=\.)", ours, name)
        if (
            t.dim() == 2
            and re.search(r"attn\.c_attn|attention\.out|mlp\.", name)
            and "transformer" in next(iter(tensors))
        ):
            t = t.t()
        if "attn.c_attn" in name:
            for part, rows in zip(("query", "key", "value"), t.chunk(3)):
                yield name.replace("attn.c_attn", f"attention.{part}"), rows
        else:
            yield name, t


def state(kind: str) -> dict[str, Tensor]:
    return dict(in_our_names({name: p.detach() for name, p in theirs(kind).named_parameters()}))


def run_ours(
    kind: str, weights: dict[str, Tensor], lengths: tuple[int, ...], precision: str, seen: tuple[int, ...]
) -> Result:
    """All documents as one micro-batch through the engine of one process; `seen`: the lengths that it is told."""
    config = check(
        Config.model_validate(
            {"model": KINDS[kind].ours, "train": {"precision": precision}, "data": {"sequence": 128}}
        ),
        1,
    )
    engine = Engine(config, Mesh(layout_of(config)))
    named = dict(engine.model.named_parameters())
    assert named.keys() == weights.keys()
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(weights[name])
    tokens, labels = (torch.cat(ts) for ts in zip(*documents(lengths)))
    positions = torch.cat([torch.arange(n) for n in seen])
    batch = Batch(tokens, labels, positions, Bounds((0, *accumulate(seen))))
    loss, _, _ = engine.gradients([batch], engine.count_tokens([batch]))
    with torch.no_grad():
        logits = engine.model.logits(engine.model(None, batch))
    return {"logits": logits, "loss": torch.tensor(loss, dtype=torch.float64)} | {
        name: p.grad_sum for name, p in named.items()
    }


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


def worst(
    kind: str, weights: dict[str, Tensor], packing: str, precision: str, seen: tuple[int, ...] = ()
) -> tuple[float, str]:
    """The largest difference in units of what is allowed, and where; up to 1 is equality to rounding."""
    lengths = DOCUMENTS[packing]
    exact, rounding = right(kind, lengths)
    mine = run_ours(kind, weights, lengths, precision, seen or lengths)
    assert mine.keys() == exact.keys()
    allowed = FACTOR * UNIT[mine["logits"].dtype] / UNIT[torch.float32]
    return max((distance(mine[name], t) / (allowed * rounding[name]), name) for name, t in exact.items())


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("packing", DOCUMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_all_gradients_equal_hugging_face(kind, packing, precision):
    excess, where = worst(kind, state(kind), packing, precision)
    assert excess <= 1, where


def swap(a: str, b: str):
    def fault(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: weights[name.replace(a, "#").replace(b, a).replace("#", b)] for name in weights}

    return fault


def interleave(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Channels of query and key in the order of interleaved rotary pairs."""

    def rows(t: Tensor) -> Tensor:
        return t.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)

    return {name: rows(t) if re.search(r"query|key", name) else t for name, t in weights.items()}


def turn_heads(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Query heads dealt to the key/value heads in turn, not in groups."""
    return {
        name: t.unflatten(0, (2, 2, 8)).transpose(0, 1).flatten(0, 2) if "query" in name else t
        for name, t in weights.items()
    }


def drop(part: str):
    return lambda weights: {name: torch.zeros_like(t) if part in name else t for name, t in weights.items()}


FAULTS = {
    "gate and up swapped": ("llama", swap("mlp.gate", "mlp.up")),
    "norms swapped": ("qwen2", swap("attention_norm", "mlp_norm")),
    "rotary pairs interleaved": ("llama", interleave),
    "heads not in groups": ("llama-tied-grouped", turn_heads),
    "bias of query left out": ("qwen2", drop("query.bias")),
    "head left out": ("llama", drop("head.weight")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_mapping_shows(fault):
    kind, change = FAULTS[fault]
    excess, _ = worst(kind, change(state(kind)), "equal", "fp32")
    assert excess > 1e3


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_documents_run_together_show(kind):
    excess, _ = worst(kind, state(kind), "packed", "fp32", seen=(sum(DOCUMENTS["packed"]),))
    assert excess > 1e3
