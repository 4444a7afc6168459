"""How large a model is, who holds which part, what it costs, where it starts, and what decays.

Notable: the parts that the ranks of a layout hold are built on torch's meta device, without processes, for any layout
that hypothesis thinks of; together they must cover each parameter exactly once in each of its copies.
"""

import json
import math
from collections import Counter, defaultdict
from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from typer import Typer
from typer.testing import CliRunner

from mtmegatron.cli.info import describe, info_command, readable_bytes
from mtmegatron.config import Config, check, load
from mtmegatron.config.derived import layout_of
from mtmegatron.config.model import ModelConfig
from mtmegatron.config.schema import ParallelConfig
from mtmegatron.data.loader import micro_batches
from mtmegatron.layers.build import Build
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.models.decoder import Decoder
from mtmegatron.models.size import (
    block_flops,
    expert_blocks,
    head_flops,
    parameters,
    prediction_flops,
    split_layers,
    training_flops,
)
from mtmegatron.models.stages import build_chunks
from mtmegatron.parallel.pipeline.schedule import placement_of
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import RandomSamples
from tests.tiny import GPT2, tiny

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BIASES = {"bias_qkv": True, "bias_attention_out": True, "bias_mlp": True}
LATENT = {"kv_heads": None, "latent": {"query_rank": 24, "kv_rank": 20, "nope": 12, "rope": 8, "value": 10}}
SHARED = {"experts": 6, "top_k": 2, "ffn": 24, "shared": 2, "first_dense": 1, "shared_gate": True}
BIASED = {"experts": 4, "top_k": 3, "shared": 1, "shared_ffn": 40, "pattern": [True, False, False, True], "bias_rate": 0.1}
# every kind of norm, position, activation, bias, head, table, attention and feed-forward layer
KINDS = {
    "gpt2": GPT2["model"],
    "llama": {},
    "llama-tied": {"tied": True},
    "qwen2": {"bias_qkv": True, "tied": True},
    "one-kv-head": {"kv_heads": 1, "head_size": 20},
    "geglu": {"activation": "geglu", "norm": "layernorm"},
    "geglu-tanh": {"activation": "geglu_tanh", "kv_heads": 4, "rope_fraction": 0.5},
    "gelu": {"activation": "gelu", **BIASES},
    "squared-relu": {"activation": "squared_relu", "positions": "learned"},
    "qk-norm": {"qk_norm": True, "head_size": 20},
    "latent": LATENT,
    "latent-direct": LATENT | {"latent": LATENT["latent"] | {"query_rank": None}, "bias_attention_out": True},
    "experts": {"moe": {"experts": 4, "every": 2}},
    "shared-experts": {"moe": SHARED} | LATENT,
    "biased-experts": {"moe": BIASED, "activation": "gelu"},
    "prediction": {"prediction": {"depth": 2}, "norm": "layernorm"},
    "prediction-experts": {"prediction": {}, "moe": BIASED, "tied": True},
}


def part(config: Config, layout: Layout, rank: int) -> Decoder:
    """The model part of a rank, on the meta device."""
    stage, stages = layout.coordinate(rank, "pipeline"), layout.pipeline
    layers = split_layers(config.model, range(stages), config.data.sequence, config.parallel.pipeline_layers)[stage]
    with torch.device("meta"):
        return Decoder(config, Build(Mesh(layout, rank)), layers, stage == 0, stage == stages - 1)


def whole_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model in one process."""
    serial = check(config.model_copy(update={"parallel": ParallelConfig()}), 1)
    return {name: p.placement.shape for name, p in part(serial, Layout(), 0).named_parameters()}


def existing(config: Config) -> int:
    """Elements of all parameters, and of the biases that balance the choice of experts."""
    whole = part(check(config.model_copy(update={"parallel": ParallelConfig()}), 1), Layout(), 0)
    biases = [buffer for name, buffer in whole.named_buffers() if name.endswith("mlp.bias")]
    return sum(t.numel() for t in (*whole.parameters(), *biases))


def test_golden_gpt_of_6240_parameters():
    """Megatron's own smoke test: GPT-2 blocks of 1,884 parameters, an output projection of its own."""
    model = GPT2["model"] | {"layers": 2, "width": 12, "heads": 4, "vocab": 100, "max_positions": 4, "tied": False}
    config = check(Config.model_validate({"model": model, "data": {"sequence": 4}}), 1)
    assert parameters(config.model) == 6240 == existing(config)


@pytest.mark.parametrize("kind", KINDS)
def test_the_count_is_that_of_the_parameters_that_exist(kind):
    config = check(tiny(model=KINDS[kind]), 1)
    assert parameters(config.model) == existing(config)


@pytest.mark.parametrize(
    "moe, blocks",
    [
        ({}, [1, 1, 1, 1, 1, 1]), ({"every": 2}, [1, 0, 1, 0, 1, 0]), ({"first_dense": 3}, [0, 0, 0, 1, 1, 1]),
        ({"first_dense": 1, "every": 2}, [0, 1, 0, 1, 0, 1]), ({"first_dense": 2, "every": 3}, [0, 0, 1, 0, 0, 1]),
        ({"pattern": [0, 1, 1, 0, 0, 1]}, [0, 1, 1, 0, 0, 1]), ({"first_dense": 6}, [0] * 6),
    ],
    ids=str,
)  # fmt: skip
def test_which_blocks_have_experts(moe, blocks):
    config = tiny(model={"layers": 6, "moe": {"experts": 4} | moe})
    assert expert_blocks(config.model) == blocks
    assert expert_blocks(tiny().model) == [False] * 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.booleans(), min_size=1, max_size=7).filter(any), st.integers(1, 4), st.integers(1, 400), st.sampled_from([8, 259, 4000]),
    st.sampled_from([None, {}]),
)  # fmt: skip
def test_no_split_has_a_cheaper_dearest_stage(pattern, stages, ffn, vocab, prediction):
    """Against all splits there are, with experts that are dearer or cheaper than a dense layer."""
    changes = {"layers": len(pattern), "moe": {"experts": 4, "ffn": ffn, "pattern": pattern}, "vocab": vocab, "prediction": prediction}
    model = check(tiny(model=changes), 1).model
    cost = [block_flops(model, 32, experts) for experts in pattern]

    def dearest(counts: tuple[int, ...]) -> float:
        ends = [sum(counts[:i]) for i in range(stages + 1)]
        costs = [sum(cost[a:b]) for a, b in zip(ends, ends[1:])]
        costs[0] += 0.1 * cost[0]
        costs[-1] += head_flops(model) + prediction_flops(model, 32)
        return max(costs)

    mine = tuple(map(len, split_layers(model, range(stages), 32)))
    every = [c for c in product(range(len(pattern) + 1), repeat=stages) if sum(c) == len(pattern)]
    assert mine in every and dearest(mine) == pytest.approx(min(map(dearest, every)), rel=1e-4)


V = [
    (2, 6, 259, [2, 1, 2, 1]), (2, 6, 4000, [0, 3, 3, 0]), (2, 4, 131, [1, 1, 1, 1]), (4, 12, 400, [2, 1, 1, 1, 2, 2, 2, 1]),
    (3, 2, 131, [0, 0, 0, 1, 1, 0]), (1, 5, 259, [3, 2]),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["zb-v", "dualpipe-v"])
@pytest.mark.parametrize("pipeline, layers, vocab, counts", V)
def test_the_split_of_a_v_evens_out_its_ranks(kind, pipeline, layers, vocab, counts):
    """The head costs 0.3, 5, 0.2, 0.5, 0.2 and 0.3 blocks."""
    model = check(tiny(model={"layers": layers, "vocab": vocab}), 1).model
    assert [len(stage) for stage in split_layers(model, [rank for rank, _ in placement_of(kind, pipeline, 2)], 32)] == counts


def test_the_split_of_a_v_is_that_of_the_engine():
    config = check(tiny(model={"layers": 6}, parallel={"pipeline": 2, "schedule": "zb-v"}), 2)
    ranks = [build_chunks(config, Build(Mesh(layout_of(config), rank, "meta"))) for rank in range(2)]
    assert [[list(chunk.layers) for chunk in chunks] for chunks in ranks] == [[["0", "1"], ["5"]], [["2"], ["3", "4"]]]


def costs_of_ranks(model: ModelConfig, split: list[range], ranks: list[int]) -> list[float]:
    costs = [0.0] * (max(ranks) + 1)
    for stage, rank in zip(split, ranks):
        costs[rank] += sum(block_flops(model, 32, expert_blocks(model)[i]) for i in stage)
    costs[ranks[0]] += 0.1 * block_flops(model, 32, expert_blocks(model)[0])
    costs[ranks[-1]] += head_flops(model) + prediction_flops(model, 32)
    return costs


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 400), st.sampled_from([8, 259, 1000, 4000]), st.sampled_from([2, 3]))
def test_no_split_of_a_v_has_a_cheaper_dearest_rank(pattern, ffn, vocab, pipeline):
    """Against all splits there are where blocks are alike; where they are not, it is at least no worse than alike stages."""
    experts = {"moe": {"experts": 4, "ffn": ffn, "pattern": pattern}} if any(pattern) else {}
    model = check(tiny(model={"layers": len(pattern), "vocab": vocab} | experts), 1).model
    ranks = [*range(pipeline), *reversed(range(pipeline))]
    mine = max(costs_of_ranks(model, split_layers(model, ranks, 32), ranks))
    rounding = 1 + 1e-4  # costs are compared as whole numbers
    assert mine <= max(costs_of_ranks(model, split_layers(model, range(2 * pipeline), 32), ranks)) * rounding
    if len(set(pattern)) == 1:
        cuts = combinations_with_replacement(range(len(pattern) + 1), 2 * pipeline - 1)
        every = ([range(a, b) for a, b in zip((0, *cut), (*cut, len(pattern)))] for cut in cuts)
        assert mine <= min(max(costs_of_ranks(model, split, ranks)) for split in every) * rounding


def test_dear_blocks_of_experts_are_fewer_on_a_stage_than_dense_ones():
    model = check(tiny(model={"layers": 8, "moe": {"experts": 8, "top_k": 8, "first_dense": 4}, "vocab": 8}), 1).model
    assert [len(stage) for stage in split_layers(model, range(2), 32)] == [6, 2]


@st.composite
def laid_out(draw) -> tuple[Config, Layout]:
    """A small model and a layout that it allows: few or many key/value heads, uneven vocabulary, ffn and stages."""
    tensor = draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([k for k in range(1, 13) if k % tensor == 0 or tensor % k == 0]))
    heads = math.lcm(kv_heads, tensor) * draw(st.integers(1, 2))
    layers, data = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    model = KINDS[draw(st.sampled_from(["gpt2", "llama", "qwen2"]))] | {
        "layers": layers, "width": 8, "heads": heads, "kv_heads": kv_heads, "head_size": 2, "tied": draw(st.booleans()),
        "ffn": draw(st.integers(tensor, 20)), "vocab": draw(st.integers(tensor, 40)),
    }  # fmt: skip
    parallel = {
        "tensor": tensor,
        "pipeline": draw(st.integers(1, layers + 2)),
        "data": data,
        "sequence": draw(st.booleans()) if tensor > 1 else False,
    }
    tree = {"model": model, "parallel": parallel, "data": {"sequence": tensor * 4}, "train": {"global_batch": data}}
    config = check(Config.model_validate(tree), tensor * parallel["pipeline"] * data)
    return config, layout_of(config)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(laid_out())
def test_the_ranks_of_a_layout_hold_every_parameter_exactly_once_in_each_copy(case):
    config, layout = case
    shapes = whole_shapes(config)
    painted: dict[tuple, np.ndarray] = {}
    stages = defaultdict(set)
    for rank in range(layout.world):
        for name, param in part(config, layout, rank).named_parameters():
            assert param.placement.shape == shapes[name]
            offset, size = param.placement.offset_and_size(layout, rank)
            assert tuple(param.shape) == size
            split = {axis for _, axis in param.placement.split}
            copy = "key_value_copies" if "key_value" in split else None if "tensor" in split else "tensor"
            where = [layout.coordinate(rank, axis) for axis in ("data", "pipeline", copy) if axis]
            canvas = painted.setdefault((name, *where), np.zeros(shapes[name], dtype=int))
            canvas[tuple(slice(o, o + n) for o, n in zip(offset, size))] += 1
            stages[name].add(layout.coordinate(rank, "pipeline"))
    assert stages.keys() == shapes.keys()
    assert all((canvas == 1).all() for canvas in painted.values())
    ends = {0, layout.pipeline - 1}
    assert all(
        where == ends if config.model.tied and name == "embedding.weight" else len(where) == 1
        for name, where in stages.items()
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(laid_out())
def test_every_rank_holds_the_key_heads_that_its_query_heads_read(case):
    """Rows of a head stay together (V03), biases with them (V06)."""
    config, layout = case
    model = config.model
    for rank in range(layout.stage):
        for name, param in part(config, layout, rank).named_parameters():
            if ".query." in name:
                start, size = (x[0] // model.head_size for x in param.placement.offset_and_size(layout, rank))
                group = model.heads // model.kv_heads
                needed = (start // group, (start + size - 1) // group)
            elif ".key." in name or ".value." in name:
                start, size = (x[0] / model.head_size for x in param.placement.offset_and_size(layout, rank))
                assert (start, start + size - 1) == needed


@pytest.mark.parametrize("layers, pipeline", [(30, 4), (80, 16), (5, 2), (6, 4), (10, 2), (1, 3)])
def test_no_layer_is_lost_between_stages(layers, pipeline):
    """Field bug P24."""
    config = check(tiny(model={"layers": layers}, parallel={"pipeline": pipeline}), pipeline)
    split = split_layers(config.model, range(pipeline), 32)
    assert [layer for stage in split for layer in stage] == list(range(layers))
    held = Counter(n for r in range(pipeline) for n, _ in part(config, layout_of(config), r).named_parameters())
    assert set(held.values()) == {1} and held.keys() == whole_shapes(config).keys()


THEIR_SIZES = {"vocab_size": 259, "attn_implementation": "eager", "use_cache": False}
LLAMA_SIZES = THEIR_SIZES | {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4
}  # fmt: skip
EXPERT_SIZES = LLAMA_SIZES | {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "experts_implementation": "eager"}
DEEPSEEK_SIZES = EXPERT_SIZES | {
    "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 6, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
COUNTED = {
    "grouped, gated": LlamaConfig(num_key_value_heads=2, **LLAMA_SIZES),
    "one key head, wide": LlamaConfig(num_key_value_heads=1, head_dim=20, **LLAMA_SIZES),
    "experts": MixtralConfig(num_key_value_heads=2, num_local_experts=6, **EXPERT_SIZES),
    "many experts, normalised heads": Qwen3MoeConfig(num_key_value_heads=2, head_dim=20, num_experts=6, decoder_sparse_step=2, **EXPERT_SIZES),
    "latent, experts": DeepseekV2Config(q_lora_rank=None, n_shared_experts=2, **DEEPSEEK_SIZES),
    "latent, compressed, experts": DeepseekV3Config(q_lora_rank=24, n_shared_experts=1, n_group=2, topk_group=1, **DEEPSEEK_SIZES),
    "plain": GPT2Config(
        n_embd=64, n_inner=176, n_layer=4, n_head=4, n_positions=40, bos_token_id=0, eos_token_id=0, **THEIR_SIZES
    ),
}  # fmt: skip
OUR_EXPERTS = {"experts": 6, "top_k": 2, "ffn": 48, "first_dense": 1}
OUR_SIZES = {
    "grouped, gated": {}, "one key head, wide": KINDS["one-kv-head"], "plain": KINDS["gpt2"] | {"kv_heads": 4},
    "experts": {"moe": {"experts": 6}},
    "many experts, normalised heads": {"moe": OUR_EXPERTS | {"every": 2}, "qk_norm": True, "head_size": 20},
    "latent, experts": {"moe": OUR_EXPERTS | {"shared": 2}} | KINDS["latent-direct"] | {"bias_attention_out": False},
    "latent, compressed, experts": {"moe": OUR_EXPERTS | {"shared": 1, "groups": 2, "groups_kept": 1}} | LATENT,
}  # fmt: skip


@pytest.mark.parametrize("kind", COUNTED)
def test_training_flops_are_those_that_a_counter_sees(kind):
    """Field bug T01. Batched products: attention's, which transformers computes whole; causal: (S + 1) / 2S of it."""
    sequence = 32
    model = AutoModelForCausalLM.from_config(COUNTED[kind])
    tokens = torch.zeros(1, sequence, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    counts = {str(op).split(".")[-1]: n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("bmm")
    counted = (sum(counts.values()) + attention * (sequence + 1) / (2 * sequence)) / sequence
    config = check(tiny(model=OUR_SIZES[kind]), 1)
    assert training_flops(config.model, sequence) == pytest.approx(counted, rel=1e-12)


def test_flops_depend_on_nothing_but_the_model_and_the_sequence():
    serial = check(tiny(), 1)
    parallel = check(tiny(parallel={"tensor": 2, "pipeline": 2}), 8)
    assert training_flops(serial.model, 32) == training_flops(parallel.model, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_that_of_a_uniform_guess(kind):
    """Field bug P40: ln(V), and the little that the variance of the first logits adds."""
    config = check(tiny(model=KINDS[kind]), 1)
    engine = Engine(config, Mesh(layout_of(config)))
    batches = micro_batches(config, RandomSamples(config.model.vocab, config.data.sequence, 0), engine.mesh, 0)
    loss, _, _ = engine.gradients(batches, engine.count_tokens(batches))
    assert loss == pytest.approx(math.log(config.model.vocab), abs=0.3)


def decayed(rank: int, world: int, config: Config) -> dict[str, float]:
    """By name, the factor of one update with learning rate 0.1 and zero gradients; nan if elements differ."""
    config = check(config, world)
    engine = Engine(config, Mesh(layout_of(config), rank, connect=world > 1))
    with torch.no_grad():
        for param in engine.model.parameters():
            param.fill_(1.0)
    engine.optimizer.refresh_masters()
    engine.buckets.start()
    engine.buckets.finish()
    engine.optimizer.step(0.1, 1.0)
    factors = {name: param.detach().unique() for name, param in engine.model.named_parameters()}
    return {name: float(values) if len(values) == 1 else math.nan for name, values in factors.items()}


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"tensor": 2, "zero": 1}, {"data": 2, "zero": 1}, {"pipeline": 2}], ids=str
)
@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "llama"])
def test_matrices_decay_and_nothing_else(kind, embeddings, layout, pool):
    """Field bug O02, in every layout alike."""
    optimizer = {"weight_decay": 0.1, "decay_embeddings": embeddings}
    config = tiny(model=KINDS[kind], optimizer=optimizer, parallel=layout, train={"precision": "fp64"})
    world = math.prod(layout.get(axis, 1) for axis in ("tensor", "data", "pipeline"))
    ranks = [decayed(0, 1, config)] if world == 1 else pool.run(decayed, world, config)
    for name, shape in whole_shapes(config).items():
        table = name in ("embedding.weight", "positions.weight")
        right = 0.99 if len(shape) == 2 and (embeddings or not table) else 1.0
        held = [factors[name] for factors in ranks if name in factors]
        assert held and all(factor == pytest.approx(right, rel=1e-15) for factor in held), name


def test_without_weight_decay_everything_still_learns():
    config = check(tiny(optimizer={"weight_decay": 0.0}), 1)
    engine = Engine(config, Mesh(layout_of(config)))
    before = {name: param.detach().clone() for name, param in engine.model.named_parameters()}
    for bucket in engine.buckets.buckets:
        bucket.gradients.fill_(1.0)
    engine.optimizer.step(0.1, 1.0)
    assert not [name for name, param in engine.model.named_parameters() if not (param != before[name]).all()]


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "pipeline": 2}, {"tensor": 4, "data": 3, "zero": 1}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_info_counts_the_bytes_that_a_rank_really_has(layout, precision):
    config = tiny(model=KINDS["qwen2"], parallel=layout, train={"precision": precision, "global_batch": 6})
    world = math.prod(layout.get(axis, 1) for axis in ("tensor", "data", "pipeline"))
    config = check(config, world)
    for stage, facts in enumerate(describe(config)["stages"]):
        own = []
        for rank in range(stage * world // config.parallel.pipeline, (stage + 1) * world // config.parallel.pipeline):
            engine = Engine(config, Mesh(layout_of(config), rank))
            own.append(real_bytes(engine))
        assert (facts["weights"], facts["gradients"], facts["optimizer"]) == max(own)


def real_bytes(engine: Engine) -> tuple[int, int, int]:
    """Bytes of the different storages of weights, gradients, and optimizer state."""
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.model.parameters()}
    gradients = {
        p.grad_sum.untyped_storage().data_ptr(): p.grad_sum.untyped_storage().nbytes()
        for p in engine.model.parameters()
    }
    states = [t.untyped_storage() for s in engine.optimizer.states for t in s.tensors.values()]
    state = {s.data_ptr(): s.nbytes() for s in states if s.data_ptr() not in weights}
    return sum(weights.values()), sum(gradients.values()), sum(state.values())


def test_info_of_70_billion_parameters_on_512_ranks():
    changes = [
        "parallel.tensor=8",
        "parallel.pipeline=4",
        "parallel.zero=1",
        "train.precision=bf16",
        "train.global_batch=16",
    ]
    config = check(load(CONFIGS / "llama3-70b.yaml", changes).config, 512)
    facts = describe(config)
    total = facts["parameters"]["total"]
    assert total == facts["active_parameters"] == 70_553_706_496 == sum(facts["parameters"].values()) / 2
    held = sum(stage["parameters"] for stage in facts["stages"])
    norms = facts["parameters"]["norms"]
    assert held == (total - norms) // 8 + norms  # norms are whole on every tensor rank
    first = facts["stages"][0]
    assert first["weights"] == pytest.approx(2 * first["parameters"], rel=1e-4)
    assert first["gradients"] == 2 * first["weights"]
    assert first["optimizer"] == pytest.approx(12 * first["parameters"] / 16, rel=1e-3)


@pytest.mark.parametrize(
    "count, text",
    [(0, "0.00 B"), (1023, "1023.00 B"), (1024, "1.00 KiB"), (3 * 2**29, "1.50 GiB"), (2**52, "4096.00 TiB")],
)
def test_readable_bytes(count, text):
    assert readable_bytes(count) == text


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_info_command_prints_what_it_counted(options):
    app = Typer()
    app.command()(info_command)
    arguments = [str(CONFIGS / "llama3-8b.yaml"), "parallel.tensor=2", "parallel.pipeline=2", *options]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"}, catch_exceptions=False)
    if options:
        facts = json.loads(result.output)
        assert facts["layout"] == "tensor=2,pipeline=2" and [s["stage"] for s in facts["stages"]] == [0, 1]
        assert sum(s["layers"] for s in facts["stages"]) == 32
    else:
        assert all(text in result.output for text in ("8,030,261,248", "tensor=2,pipeline=2", "training", "GiB"))
