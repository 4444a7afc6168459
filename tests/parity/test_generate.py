"""The generated set covers what it says, leaves out only what cannot be, and its cases can be typed."""

import shlex
from itertools import combinations

import pytest

from mtmegatron.config.constraints import check
from mtmegatron.errors import UserError
from mtmegatron.verify import protocol
from mtmegatron.verify.generate import DIMENSIONS, Space, changed, wide
from mtmegatron.verify.protocol import laid_out
from mtmegatron.verify.report import parse_layouts, parse_settings
from tests.cli.mtm import mtm
from tests.parity.test_cross_product import CASES, SPACE
from tests.tiny import tiny

WIDE = Space(table=wide(layouts_only=False))


def pairs(case) -> set:
    return set(combinations(case.choice.items(), 2))


def test_every_pair_occurs_or_cannot():
    every = {
        ((a, x), (b, y)) for a, b in combinations(DIMENSIONS, 2) for x in DIMENSIONS[a] for y in DIMENSIONS[b]
    }
    found = set().union(*map(pairs, CASES))
    assert every - found == set(SPACE.impossible)


def test_at_least_60_triples_without_a_plain_value_occur():
    assert len(set().union(*(SPACE.triples_of(case.choice) for case in CASES))) >= 60


def test_each_case_can_be_run_on_8_processes():
    for case in CASES:
        assert case.world <= 8
        check(laid_out(changed(SPACE.base, case.changes), case.layout, "fp32"), case.world)


def test_what_is_left_out_has_its_reason():
    reasons = ("dropout_attention", "parallel.shard: 2", "16 processes", "train.global_batch")
    assert all(sum(reason in why for reason in reasons) == 1 for why in SPACE.impossible.values()), SPACE.impossible
    assert len(SPACE.impossible) < 12


def test_no_random_case_has_a_pair_that_was_left_out():
    for seed in range(1500):
        assert not pairs(SPACE.sample(seed)) & set(SPACE.impossible)


def test_the_set_is_a_function_of_its_seed():
    assert Space().cover() == CASES != SPACE.cover(seed=1)
    assert WIDE.sample(5) == WIDE.sample(5) != WIDE.sample(6)


@pytest.mark.parametrize("cases", [CASES, [WIDE.sample(seed) for seed in range(100)]], ids=["covering", "random"])
def test_words_of_a_case_say_the_same_case(cases):
    for case in cases:
        *changes, _, layout, _, precisions = shlex.split(case.words)
        assert parse_settings(changes, "") == case.changes
        assert parse_layouts(layout)[0] == (case.layout or {"tensor": 1})
        assert precisions.split(",") == sorted({"fp64", case.precision}, reverse=True, key=lambda p: p == "fp64")


def test_random_layouts_of_a_given_model_leave_it_as_it_is():
    space = Space(tiny(model={"tied": True, "heads": 2, "kv_heads": 1}), wide(layouts_only=True))
    cases = [space.sample(seed) for seed in range(50)]
    assert not any(case.changes for case in cases)
    assert {case.layout.get("tensor", 1) for case in cases} == {1, 2}


def test_random_cases_draw_experts_on_all_kinds_of_ranks_in_fp64():
    cases = [WIDE.sample(seed) for seed in range(150)]
    with_experts = [case for case in cases if case.choice["experts"] != "none"]
    assert {case.choice["expert ranks"] for case in with_experts} == set(WIDE.table["expert ranks"])
    assert {case.choice["prediction"] for case in with_experts} == {"none", "1"}
    assert {case.precision for case in with_experts} == {"fp64"}
    assert {case.precision for case in cases if case not in with_experts} == {"fp32", "bf16"}


@pytest.mark.parametrize("moe, drawn", [({"aux_loss": 0.02}, {2}), ({"sequence_loss": 0.02}, {1, 2, 4})])
def test_micro_batches_that_are_part_of_what_experts_compute_stay_as_they_are(moe, drawn):
    space = Space(tiny(model={"moe": {"experts": 4} | moe}), wide(layouts_only=True))
    assert {case.layout.get("micro_batch", 2) for case in map(space.sample, range(40))} <= drawn
    assert not {"experts", "prediction"} & set(space.table)


def test_settings_of_a_section_that_is_not_there_make_it():
    config = changed(tiny(), {"model.moe.experts": 4, "model.moe.top_k": 1, "model.prediction.depth": 2})
    assert (config.model.moe.experts, config.model.moe.top_k, config.model.prediction.depth) == (4, 1, 2)
    for key in ("experts.x", "model.layers.x"):
        with pytest.raises(UserError, match="there is no section"):
            changed(tiny(), {key: 1})


def test_a_model_that_nothing_fits_is_refused():
    base = tiny(model={"heads": 1, "kv_heads": 1})
    table = {"tensor": {"2": {"tensor": 2}}, "precision": {"fp32": {}}}
    with pytest.raises(UserError, match="no layout of the table fits"):
        Space(base, table).sample(0)


# ---- mtm verify --all ----


@pytest.mark.parametrize("seed, experts", [(6, "none"), (4, "softmax")])
def test_all_runs_a_random_case_of_a_seed(seed, experts):
    case = WIDE.sample(seed)
    assert case.choice["experts"] == experts
    result = mtm("verify", "--all", "--minutes", 0, "--seed", seed)
    assert result.code == 0, result.out + result.err
    assert f"pass  seed {seed}  mtm verify {case.words}\n" in result.out
    assert "1 cases passed, 0 failed" in result.out


def test_a_case_that_fails_tells_its_seed_and_how_to_run_it_again(monkeypatch):
    monkeypatch.setattr(protocol, "FACTOR", 0.0)
    result = mtm("verify", "model.tied=true", "--all", "--minutes", 0, "--seed", 4)
    assert result.code == 1
    assert "FAIL  seed 4  mtm verify model.tied=true --layouts" in result.out and "off by" in result.out


@pytest.mark.parametrize(
    "words, text",
    [
        ("--all --layouts tensor=2", "--layouts has no effect with --all"),
        ("--minutes 3", "--minutes has no effect with no --all"),
    ],
)
def test_options_without_effect_are_refused(words, text):
    result = mtm("verify", *words.split())
    assert result.code == 2 and text in result.err
