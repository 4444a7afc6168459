"""Rotary embedding: tables against transformers, rotation against its formula and against transformers' Llama."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from mtmegatron.errors import UserError
from mtmegatron.ops.rope import (
    inverse_frequencies,
    rope,
    rope_reference,
    rope_table,
    score_factor,
)
from tests.ops.helpers import assert_near, double, each_dtype, gradients, leaf

H = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
SCALINGS = [
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    YARN,
    YARN | {"factor": 1.0},
    YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3, "truncate": False},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(f"{v}" for v in s.values()))
@pytest.mark.parametrize("base", [1e4, 5e5])
def test_scaled_frequencies_equal_transformers(scaling, base):
    parameters = scaling | {"rope_theta": base}
    sizes = dict(hidden_size=2 * H, num_attention_heads=2, max_position_embeddings=163840)
    config = LlamaConfig(**sizes, rope_parameters=parameters)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    actual, factor = inverse_frequencies(H, base, scaling)
    # theirs is made in fp32: base^x carries the rounding of x times ln(base) < 14, and a blend a few more
    assert torch.allclose(actual.float(), expected, rtol=20 * torch.finfo(torch.float32).eps, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_faults_in_the_scaling_say_the_repair():
    with pytest.raises(UserError, match="'longcat' is not known: use one of default, linear, llama3, yarn"):
        inverse_frequencies(H, 1e4, {"rope_type": "longcat"})
    with pytest.raises(UserError, match="lacks the entry 'factor'"):
        inverse_frequencies(H, 1e4, {"rope_type": "linear"})


def test_table_is_cos_and_sin_of_float64_angles_wherever_positions_start():
    cos, sin = rope_table(torch.tensor([0, 1, 100_000]), 4, 1e4)
    angles = torch.tensor([[0, 0], [1, 0.01], [100_000, 1000.0]], dtype=torch.float64)
    assert torch.equal(cos, angles.cos().float()) and torch.equal(sin, angles.sin().float())
    assert torch.equal(rope_table(torch.arange(5, 9), 4, 1e4)[0], rope_table(torch.arange(9), 4, 1e4)[0][5:])


def test_yarn_of_deepseek_by_hand():
    """32 frequencies; dims 10 = floor(10.47) and 23 = ceil(22.51), which turn 32 times and once in 4096 tokens, bound the blend."""
    scaling = YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
    frequencies, factor = inverse_frequencies(64, 1e4, scaling)
    plain = 1e4 ** (-torch.arange(32, dtype=torch.float64) / 32)
    assert factor == 1.0
    assert torch.equal(frequencies[:11], plain[:11]) and torch.allclose(frequencies[23:], plain[23:] / 40, rtol=1e-15, atol=0)
    assert float(frequencies[15]) == pytest.approx(float(plain[15]) * (8 / 13 + 5 / 13 / 40), rel=1e-14)


@pytest.mark.parametrize(
    "more, on_table, on_scores",
    [
        ({}, 0.1 * math.log(40) + 1, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.3688879454113936**2),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, 1.2608037774058553**2),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.3688879454113936 / 1.1844439727056968, 1.1844439727056968**2),
        ({"mscale": 1.0, "mscale_all_dim": 0}, 0.1 * math.log(40) + 1, 1.0),
        ({"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.0),
    ],
)
def test_v05_temperature_is_shared_between_table_and_scores(more, on_table, on_scores):
    assert inverse_frequencies(64, 1e4, YARN | more)[1] == pytest.approx(on_table, rel=1e-14)
    assert score_factor(YARN | more) == pytest.approx(on_scores, rel=1e-14)


def test_scores_have_no_factor_without_yarn():
    assert score_factor(None) == score_factor(LLAMA3) == 1.0


def test_both_layouts_turn_the_same_pairs_to_golden_values():
    """Pair (3, 4) at angle a turns to (3 cos a - 4 sin a, 4 cos a + 3 sin a); angles are 1 and 0.01."""
    cos, sin = rope_table(torch.tensor([1]), 4, 1e4, torch.float64)
    first, second = (-1.7449770216271667, 4.685622177896248), (2.9598506679133294, 4.029799501669161)
    halves, pairs = torch.tensor([[[3.0, 3, 4, 4]]]).double(), torch.tensor([[[3.0, 4, 3, 4]]]).double()
    assert rope(halves, cos, sin).flatten().tolist() == pytest.approx([first[0], second[0], first[1], second[1]], rel=1e-12)
    assert rope(pairs, cos, sin, True).flatten().tolist() == pytest.approx([*first, *second], rel=1e-12)


def test_table_carries_the_yarn_temperature():
    cos, _ = rope_table(torch.zeros(1), 4, 1e4, scaling=YARN | {"attention_factor": 1.25})
    assert torch.equal(cos, torch.full((1, 2), 1.25))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [8, 6, 2])
@pytest.mark.parametrize("offset", [0, 3])
@each_dtype
def test_rotation_is_the_formula_on_strided_heads_whole_or_partial(interleaved, size, offset, dtype):
    flat = leaf(11, 50, dtype=dtype)
    cos, sin = rope_table(torch.arange(11), size, 1e4, torch.promote_types(dtype, torch.float32))

    def call(function):
        return lambda x: function(x[:, offset : offset + 40].unflatten(1, (5, 8)), cos, sin, interleaved)

    actual, expected = gradients(call(rope), flat), gradients(call(rope_reference), *double(flat))
    assert actual[0].dtype == dtype
    assert_near(actual, expected, 4)  # two products and a sum


def test_rotation_equals_transformers_llama():
    query, key = leaf(9, 4, 8), leaf(9, 2, 8, seed=1)
    cos, sin = rope_table(torch.arange(9), 8, 1e4, torch.float64)
    whole = (torch.cat((t, t), -1)[None] for t in (cos, sin))
    q, k = apply_rotary_pos_emb(*(t.transpose(0, 1)[None] for t in (query, key)), *whole)
    both = rope(torch.cat((query, key), 1), cos, sin)
    assert_near([both], [torch.cat((q[0], k[0])).transpose(0, 1)], 4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone(interleaved):
    query, key = leaf(1, 1, 8), leaf(1, 1, 8, seed=1)

    def score(i, j):
        tables = (rope_table(torch.tensor([p]), 8, 100.0, torch.float64) for p in (i, j))
        turned = [rope(x, *table, interleaved) for x, table in zip((query, key), tables)]
        return (turned[0] * turned[1]).sum()

    assert torch.allclose(score(3, 1), score(103, 101), rtol=1e-12)
    assert not torch.allclose(score(3, 1), score(3, 2), rtol=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_passes_gradcheck(interleaved):
    cos, sin = rope_table(torch.arange(4), 4, 10.0, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin, interleaved), leaf(4, 2, 6))
