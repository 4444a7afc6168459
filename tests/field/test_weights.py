"""Which weights there are, on which stage, and what they are at first; each test is named after its report."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.layers.build import Build
from mtmegatron.mesh import Mesh
from mtmegatron.models.decoder import Decoder
from mtmegatron.models.size import parameters, split_layers
from mtmegatron.verify.protocol import batches, world_of
from tests.field.training import engine_of, joined, name, parts_of
from tests.tiny import GPT2, tiny


def stage_models(config, pipeline: int) -> list[Decoder]:
    own = check(tiny(config, parallel={"pipeline": pipeline, "bucket_mb": 25}), pipeline)
    layers = split_layers(own.model, range(pipeline), own.data.sequence)
    with torch.device("meta"):
        return [
            Decoder(own, Build(Mesh(layout_of(own), rank, "meta")), part, rank == 0, rank == pipeline - 1)
            for rank, part in enumerate(layers)
        ]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers, pipeline", [(5, 2), (6, 4), (10, 4), (30, 4), (61, 16), (80, 16)])
def test_p24_no_layer_is_lost_in_an_uneven_split(layers, pipeline, tied):
    config = {"model": {"layers": layers, "tied": tied}}
    found = {}
    for model in stage_models(config, pipeline):
        found |= {name: param.numel() for name, param in model.named_parameters()}
    assert {int(key.split(".")[1]) for key in found if key.startswith("layers.")} == set(range(layers))
    assert sum(found.values()) == parameters(check(tiny(config), 1).model)


@given(layers=st.integers(1, 200), stages=st.integers(1, 64), vocab=st.integers(1, 300_000))
@settings(max_examples=60, deadline=None)
def test_p24_every_layer_lies_on_one_stage_in_order(layers, stages, vocab):
    model = check(tiny(model={"layers": layers, "vocab": vocab}), 1).model
    split = split_layers(model, range(stages), 128)
    assert len(split) == stages and [i for part in split for i in part] == list(range(layers))


# ---- the first weights ----

LAYOUTS = [{"tensor": 2}, {"tensor": 4}, {"pipeline": 2}, {"tensor": 2, "pipeline": 4}, {"data": 2, "zero": 1}]


@pytest.mark.parametrize(
    "model", [{}, {"tied": True, "kv_heads": 1, "bias_qkv": True}, GPT2["model"]], ids=["llama", "qwen", "gpt2"]
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_p38_first_weights_do_not_depend_on_the_layout(layout, model):
    serial = joined([parts_of(engine_of(tiny(model=model), {}))])
    ranks = [parts_of(engine_of(tiny(model=model), layout, rank)) for rank in range(world_of(layout))]
    whole = joined(ranks)
    assert whole.keys() == serial.keys() and all(torch.equal(whole[n], serial[n]) for n in serial)


def test_p38_no_two_matrices_or_shards_begin_alike_and_their_spread_is_as_told():
    found: dict[bytes, str] = {}
    for rank in range(4):
        for key, (shape, _, value) in parts_of(engine_of(tiny(), {"tensor": 4}, rank)).items():
            if (
                len(shape) < 2 or ".key." in key or ".value." in key
            ):  # vectors are constant; two ranks share a key/value head
                continue
            assert found.setdefault(value[:4, :4].tobytes(), f"{key} of rank {rank}") == f"{key} of rank {rank}"
            std = 0.02 / math.sqrt(8) if ".out." in key or ".down." in key else 0.02
            # the standard deviation of n normal numbers is off by std / sqrt(2n); by five of those once in a million
            assert value.std() == pytest.approx(std, rel=5 / math.sqrt(2 * value.size)), key


@pytest.mark.parametrize(
    "model",
    [{}, {"tied": True}, GPT2["model"], {"kv_heads": 1, "bias_qkv": True}],
    ids=["llama", "tied", "gpt2", "qwen"],
)
def test_p40_the_first_loss_is_that_of_guessing(model):
    engine = engine_of(tiny(model=model), {})
    total, tokens = engine.evaluate(batches(engine, 0))
    assert total / tokens == pytest.approx(math.log(259), abs=0.3)
