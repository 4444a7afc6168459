"""The router against golden values, Hugging Face's routers, a plain reference over all options, and the faults that others have had."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtmegatron.config.model import MoEConfig
from mtmegatron.ops.router import choose, route, sinkhorn_choice
from tests.ops.helpers import assert_near, double, leaf
from tests.ops.test_cross_entropy import Threads

GOLDEN = torch.tensor([[2.0, 1, 0, -1], [0, 3, 1, 2], [1, 1.5, 0.5, 0]])
ROUNDINGS = 24  # of a softmax over a few experts: the exponent's own rounding, the sum, the division, the scale


def moe(experts: int = 8, top_k: int = 2, **options) -> MoEConfig:
    return MoEConfig(experts=experts, top_k=top_k, **options)


def dense(routing, experts: int) -> Tensor:
    """Weights by expert, [T, E], whatever the order of the chosen."""
    return routing.weights.new_zeros(len(routing.experts), experts).scatter(1, routing.experts, routing.weights)


def reference(logits: Tensor, config: MoEConfig, bias: Tensor | None = None) -> tuple[list[list[int]], Tensor]:
    """(experts, weights) token by token, with Python's sort and the formulas of the papers."""
    experts, weights, size = [], [], config.experts // config.groups
    for z in logits:
        scores = z.sigmoid() if config.score == "sigmoid" else z.exp() / z.exp().sum()
        selection = (z if config.score_after else scores) + (0 if bias is None else bias)
        kept, allowed = config.groups_kept or config.groups, range(config.experts)
        if kept < config.groups:
            members = [sorted(selection[g * size : (g + 1) * size].tolist(), reverse=True) for g in range(config.groups)]
            value = [m[0] if config.group_score == "max" else sum(m[: max(1, config.top_k // kept)]) for m in members]
            best = sorted(range(config.groups), key=lambda g: (-value[g], g))[:kept]
            allowed = [e for e in allowed if e // size in best]
        chosen = sorted(allowed, key=lambda e: (-selection[e].item(), e))[: config.top_k]
        w = scores[chosen]
        if config.score_after and config.score == "softmax":
            w = z[chosen].exp() / z[chosen].exp().sum()
        if config.renormalise:
            w = w / w.sum()
        experts.append(chosen)
        weights.append(w * config.scale)
    return experts, torch.stack(weights)


# ---- right values from outside ----


@pytest.mark.parametrize(
    "options, weights",
    [
        ({"score_after": True}, [[0.731059, 0.268941], [0.731059, 0.268941], [0.622459, 0.377541]]),
        ({}, [[0.643914, 0.236883], [0.643914, 0.236883], [0.455054, 0.276004]]),
        ({"score": "sigmoid", "renormalise": True}, [[0.546449, 0.453551], [0.519575, 0.480425], [0.527933, 0.472067]]),
    ],
)
def test_golden_choices_and_weights(options, weights):
    routing = route(GOLDEN, moe(4, **options))
    assert routing.experts.tolist() == [[0, 1], [1, 3], [1, 0]] and routing.experts.dtype == torch.int64
    torch.testing.assert_close(routing.weights, torch.tensor(weights), rtol=0, atol=6e-7)  # six digits are given


def hugging_face(name: str):
    """(router class made from a tiny configuration, our options)."""
    from transformers import models

    if name == "mixtral":
        config = models.mixtral.MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2)
        return models.mixtral.modeling_mixtral.MixtralTopKRouter(config), moe(8, 2, score_after=True)
    if name == "qwen3":
        config = models.qwen3_moe.Qwen3MoeConfig(hidden_size=16, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True)
        return models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter(config), moe(16, 4, renormalise=True)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    if name == "deepseek-v2":
        config = models.deepseek_v2.DeepseekV2Config(**sizes, n_routed_experts=16, topk_method="group_limited_greedy", routed_scaling_factor=16.0)
        ours = moe(16, 4, groups=4, groups_kept=2, group_score="max", scale=16.0)
        return models.deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter(config), ours
    config = models.deepseek_v3.DeepseekV3Config(**sizes, n_routed_experts=16, norm_topk_prob=True, routed_scaling_factor=2.5)
    ours = moe(16, 4, score="sigmoid", groups=4, groups_kept=2, renormalise=True, scale=2.5)
    return models.deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter(config), ours


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek-v2", "deepseek-v3"])
def test_choices_weights_and_gradients_are_hugging_faces(name):
    router, config = hugging_face(name)
    x, incoming = leaf(64, 16, dtype=torch.float32).detach(), leaf(64, config.experts, dtype=torch.float32, seed=3).detach()
    weight = leaf(config.experts, 16, dtype=torch.float32).detach()
    bias = None
    with torch.no_grad():
        router.weight.copy_(weight)
        if name == "deepseek-v3":
            bias = leaf(config.experts, dtype=torch.float32, seed=5).detach() * 0.3
            router.e_score_correction_bias.copy_(bias)
    _, weights, experts = router(x)
    theirs = torch.zeros(64, config.experts).scatter(1, experts, weights)
    (theirs * incoming).sum().backward()
    own = weight.requires_grad_()
    routing = route(torch.nn.functional.linear(x, own), config, bias)
    ours = dense(routing, config.experts)
    (ours * incoming).sum().backward()
    assert torch.equal(ours.detach() > 0, theirs.detach() > 0)
    # logits are the same bits; a weight gradient sums 64 tokens
    assert_near([ours.detach()], [theirs.detach()], ROUNDINGS)
    assert_near([own.grad], [router.weight.grad], ROUNDINGS + 64)


# ---- the plain reference, over all options ----


def all_options():
    """Every combination; the bias at the end."""
    for score, after, again, bias in product(["softmax", "sigmoid"], [False, True], [False, True], [False, True]):
        for groups in ({}, {"groups": 4, "groups_kept": 2}, {"groups": 4, "groups_kept": 3, "group_score": "max"}):
            yield {"score": score, "score_after": after, "renormalise": again, **groups}, bias


@pytest.mark.parametrize("options, biased", list(all_options()), ids=str)
def test_choices_weights_and_gradients_are_the_reference_in_float64(options, biased):
    config, logits = moe(8, 3, scale=2.5, **options), leaf(32, 8)
    bias = leaf(8, seed=2).detach() if biased else None
    routing = route(logits, config, bias)
    (plain,) = double(logits)
    experts, weights = reference(plain, config, bias)
    assert routing.experts.tolist() == experts
    incoming = leaf(32, 3, seed=4).detach()
    assert_near(
        [routing.weights.detach(), *torch.autograd.grad(routing.weights, logits, incoming)],
        [weights.detach(), *torch.autograd.grad(weights, plain, incoming)],
        ROUNDINGS, size=2.5,
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"score_after": True}, {"score": "sigmoid"}, {"score": "sigmoid", "renormalise": True}], ids=str)
def test_gradients_to_the_logits_pass_gradcheck(options):
    config, logits = moe(6, 2, scale=2.5, **options), leaf(5, 6)
    assert torch.autograd.gradcheck(lambda z: route(z, config)[1:3], logits)


def test_scores_are_those_of_all_experts_without_bias_scale_or_groups():
    logits = leaf(16, 8)
    options = {"groups": 4, "groups_kept": 1, "scale": 16.0, "score_after": True}
    routing = route(logits, moe(8, 2, **options), torch.full((8,), 3.0))
    assert torch.equal(routing.scores, logits.softmax(-1)) and routing.logits is logits


def test_a_choice_made_before_is_used_as_it_is():
    chosen = torch.tensor([[3, 2], [0, 1], [2, 3]])
    routing = route(GOLDEN, moe(4), experts_Tk=chosen)
    assert routing.experts is chosen and torch.equal(routing.weights, GOLDEN.softmax(-1).gather(1, chosen))
    with pytest.raises(AssertionError, match="no effect"):
        route(GOLDEN, moe(4), torch.zeros(4), chosen)


# ---- faults of the original system and of its peers ----


def test_a_masked_expert_cannot_win_with_negative_biased_scores():
    """With 0 as the mask every expert of the groups left out would beat those of the groups kept."""
    bias = torch.full((8,), -5.0)
    routing = route(leaf(32, 8, dtype=torch.float32), moe(8, 2, score="sigmoid", groups=4, groups_kept=1), bias)
    assert bool((routing.experts[:, 0] // 2 == routing.experts[:, 1] // 2).all())


def test_more_groups_kept_than_experts_chosen_still_rank_by_their_best():
    """top_k // groups_kept is 0 here: group scores of 0 would keep the first groups, whatever is in them."""
    logits = torch.tensor([[0.0, 0, 0, 0, 0, 0, 9, 8]])
    assert route(logits, moe(8, 2, groups=4, groups_kept=3)).experts.tolist() == [[6, 7]]


@pytest.mark.parametrize("options", [{}, {"score_after": True}, {"groups": 2, "groups_kept": 1}, {"groups": 2, "groups_kept": 2}], ids=str)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_bias_reaches_every_choice_and_no_weight(score, options):
    """The original system ignored it without node groups, and had no sigmoid outside one kind of loss."""
    logits, bias = leaf(32, 8, dtype=torch.float32), torch.zeros(8)
    bias[5] = 100.0
    config = moe(8, 2, score=score, **options)
    routing = route(logits, config, bias)
    assert routing.experts[:, 0].tolist() == [5] * 32
    assert torch.equal(routing.weights, route(logits, config, experts_Tk=routing.experts).weights)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_after_top_k_works_with_groups_and_is_scaled(score):
    """The original system raised on the first and left out the second."""
    config = moe(8, 2, score=score, score_after=True, groups=4, groups_kept=2)
    plain, scaled = (route(GOLDEN.repeat(1, 2), c).weights for c in (config, config.model_copy(update={"scale": 16.0})))
    assert torch.equal(scaled, 16 * plain)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_normalisation_is_there_for_both_scores_and_sums_to_one_where_scores_vanish(score):
    logits = torch.tensor([[-200.0, -201, -203, -300], [-1000, -1001, -990, -999], [80, 70, 90, -80]])
    weights = route(logits, moe(4, renormalise=True, score=score)).weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(3), rtol=0, atol=2 * torch.finfo(torch.float32).eps)


def test_logits_in_low_precision_are_refused_and_fp32_decides():
    """E10: 1e-4 apart is one value in bf16."""
    logits = torch.tensor([[1.0, 1.0001]])
    assert logits.bfloat16()[0, 0] == logits.bfloat16()[0, 1]
    assert route(logits, moe(2, 1)).experts.tolist() == [[1]]
    with pytest.raises(AssertionError, match="reorders"):
        route(logits.bfloat16(), moe(2, 1))


@given(seed=st.integers(0, 999), experts=st.sampled_from([4, 8, 12]), levels=st.integers(1, 3), extreme=st.sampled_from([1.0, 100.0, 1e30]))
@settings(max_examples=60, deadline=None)
def test_any_logits_give_different_experts_in_order_with_ties_to_the_lower(seed, experts, levels, extreme):
    """Few levels of logits, so that nearly all are equal; huge ones, so that scores are 0 and 1."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels + 1, (16, experts), generator=draw) * extreme
    bias = torch.randint(-2, 2, (experts,), generator=draw).float()
    for score, after, kept in product(["softmax", "sigmoid"], [False, True], [1, 2, 4]):
        config = moe(experts, experts // 4, score=score, score_after=after, groups=4, groups_kept=kept)
        routing = route(logits, config, bias)
        assert all(len(set(row)) == config.top_k for row in routing.experts.tolist())
        assert bool(torch.isfinite(routing.weights).all()) and bool((routing.weights >= 0).all())
        used = (routing.experts // (experts // 4)).sort(-1).values
        assert bool(((used.diff() > 0).sum(-1) + 1 <= kept).all())
        selection = (logits if after else routing.scores) + bias
        mine, best = selection.gather(1, routing.experts), selection.argsort(dim=-1, descending=True, stable=True)
        if kept == 4:
            assert torch.equal(routing.experts, best[:, : config.top_k])
        assert bool((mine.diff() <= 0).all())
        assert bool(((mine.diff() < 0) | (routing.experts.diff() > 0)).all())


@pytest.mark.parametrize("options", [{}, {"groups": 4, "groups_kept": 2}])
def test_all_equal_logits_choose_the_first(options):
    assert route(torch.zeros(3, 8), moe(8, 3, **options)).experts.tolist() == [[0, 1, 2]] * 3


def test_logits_that_are_no_numbers_still_give_valid_experts():
    """The step is refused later, when the loss is seen; an index outside would end the process first."""
    logits = torch.full((4, 8), torch.nan)
    assert route(logits, moe(8, 3)).experts.tolist() == [[0, 1, 2]] * 4


# ---- Sinkhorn ----


def sinkhorn_reference(logits: Tensor) -> Tensor:
    """exp(logits) with rows and columns scaled in turns until nothing changes."""
    plan = logits.double().exp()
    for _ in range(500):
        plan = plan / plan.sum(1, keepdim=True)
        plan = plan / plan.sum(0)
    return plan


def skewed() -> Tensor:
    return (leaf(64, 8) + torch.linspace(0, 2, 8)).detach()


def test_sinkhorn_chooses_by_the_balanced_matrix():
    expected = choose(sinkhorn_reference(skewed()), moe(8, 2))
    assert torch.equal(sinkhorn_choice(skewed(), moe(8, 2)), expected)


def test_sinkhorn_balances_what_plain_choice_does_not():
    counts = [torch.bincount(experts.flatten(), minlength=8) for experts in (choose(skewed(), moe()), sinkhorn_choice(skewed(), moe()))]
    assert counts[0].max() >= 2 * 16 and counts[1].max() < 1.5 * 16


@pytest.mark.parametrize("cut", [[32, 32], [10, 54], [64, 0], [16, 16, 16, 16]], ids=str)
def test_sinkhorn_is_the_same_however_tokens_are_spread(cut):
    def on(axis, rank):
        return sinkhorn_choice(skewed().split(cut)[rank], moe(), axis)

    assert torch.equal(torch.cat(Threads(len(cut)).run(on)), sinkhorn_choice(skewed(), moe()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_sinkhorn_does_not_see_padding(ranks):
    logits, mask = torch.cat([skewed()[:32], 50 * leaf(32, 8).detach()]), torch.arange(64) < 32

    def on(axis, rank):
        return sinkhorn_choice(logits.chunk(ranks)[rank], moe(), axis, mask.chunk(ranks)[rank])

    assert torch.equal(torch.cat(Threads(ranks).run(on))[:32], sinkhorn_choice(logits[:32], moe()))


def test_sinkhorn_stands_extreme_logits_and_padding_alone():
    draw = 1e4 * leaf(16, 8, dtype=torch.float32).detach()
    for logits, mask in ((draw, None), (torch.zeros(16, 8), None), (draw, torch.zeros(16, dtype=torch.bool))):
        chosen = sinkhorn_choice(logits, moe(8, 3), mask_T=mask)
        assert all(len(set(row)) == 3 and min(row) >= 0 for row in chosen.tolist())


def test_all_of_it_runs_without_values():
    logits = torch.empty(6, 8, device="meta", requires_grad=True)
    config, bias = moe(8, 2, groups=4, groups_kept=2), torch.empty(8, device="meta")
    for routing in (route(logits, config, bias), route(logits, config, experts_Tk=sinkhorn_choice(logits, config))):
        assert routing.experts.shape == (6, 2) and torch.autograd.grad(routing.weights.sum(), logits)[0].shape == (6, 8)
