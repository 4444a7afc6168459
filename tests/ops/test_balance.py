"""Balance terms against golden values, Hugging Face and the formulas of the papers; the same value and gradient however tokens are spread."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtmegatron.config.model import MoEConfig
from mtmegatron.ops.balance import (
    Batchwide,
    balance_losses,
    expert_counts,
    sequence_numbers,
    sums,
    updated_bias,
)
from mtmegatron.ops.capacity import keep
from mtmegatron.ops.router import route
from tests.ops.helpers import assert_near, leaf
from tests.ops.test_cross_entropy import Threads
from tests.ops.test_router import GOLDEN

B, S, E, K, G, M = 4, 6, 8, 3, 4, 2
TERMS = ["aux_loss", "sequence_loss", "global_loss", "device_loss", "communication_loss", "z_loss"]
ALL = {name: 0.1 * (i + 1) for i, name in enumerate(TERMS)}
PREVIOUS = torch.tensor([9, 4, 2, 0, 30, 3, 3, 21])
BATCH = Batchwide(B * S, B, PREVIOUS)
# a sum over all tokens and experts of products of two means; float64 against float64
ROUNDINGS = 4 * (B * S * E) ** 0.5


def moe(**options) -> MoEConfig:
    return MoEConfig(experts=E, top_k=K, **{"groups": G, "groups_kept": M, **options})


def losses(logits: Tensor, config: MoEConfig, batch=BATCH, sequences=B, numbers=None, mask=None, axis=None) -> dict[str, Tensor]:
    numbers = sequence_numbers(sequences, len(logits)) if numbers is None else numbers
    return balance_losses(sums(route(logits, config), config, sequences, numbers, mask, axis), config, batch)


def value_and_gradient(logits: Tensor, config: MoEConfig, **given) -> list[Tensor]:
    """[terms in order, gradient of their sum to the logits]."""
    logits = logits.detach().requires_grad_()
    terms = losses(logits, config, **given)
    (gradient,) = torch.autograd.grad(sum(terms.values()), logits)
    return [torch.stack(list(terms.values())).detach(), gradient]


def reference(logits: Tensor, config: MoEConfig) -> dict[str, Tensor]:
    """The papers' formulas, one sequence and one expert after the other; all tokens are one micro-batch."""
    routing, tokens = route(logits, config), len(logits)
    scores, chosen = routing.scores, torch.nn.functional.one_hot(routing.experts, E).sum(1).to(logits.dtype)
    result = {"aux_loss": E / (tokens**2 * K) * sum(scores[:, e].sum() * chosen[:, e].sum() for e in range(E))}
    by_sequence = []
    for sequence, picked in zip(scores.split(S), chosen.split(S)):
        f = [picked[:, e].sum() * E / (S * K) for e in range(E)]
        share = sequence / sequence.sum(-1, keepdim=True) if config.complementary else sequence
        p, size = sequence.mean(0), E // G
        groups = [range(g * size, (g + 1) * size) for g in range(G)]
        p_group = [sum(p[e] for e in group) for group in groups]
        sent = [(picked[:, list(group)].sum(1) > 0).sum().item() * G / (M * S) for group in groups]
        by_sequence.append({
            "sequence_loss": sum(f[e] * share.mean(0)[e] for e in range(E)),
            "device_loss": sum(sum(f[e] for e in group) / size * q for group, q in zip(groups, p_group)),
            "communication_loss": sum(s * q for s, q in zip(sent, p_group)),
        })  # fmt: skip
    result |= {name: sum(terms[name] for terms in by_sequence) / B for name in by_sequence[0]}
    result["global_loss"] = sum(E * PREVIOUS[e].item() / PREVIOUS.sum().item() * scores[:, e].mean() for e in range(E))
    result["z_loss"] = logits.logsumexp(-1).square().mean()
    return {name: getattr(config, name) * result[name] for name in TERMS if getattr(config, name)}


# ---- right values ----


def test_golden_counts_losses_and_bias():
    config = MoEConfig(experts=4, aux_loss=0.01, z_loss=1e-3, score_after=True)
    routing = route(GOLDEN, config)
    counts = expert_counts(routing.experts, 4)
    assert counts.tolist() == [2, 3, 0, 1]
    terms = balance_losses(sums(routing, config), config, Batchwide(3, 1))
    assert {name: pytest.approx(value, abs=6e-9) for name, value in {"aux_loss": 0.01395997, "z_loss": 0.00767378}.items()} == terms
    torch.testing.assert_close(updated_bias(torch.zeros(4), counts, 0.1), torch.tensor([-0.1, -0.1, 0.1, 0.1]))


def test_aux_loss_is_hugging_faces_over_the_number_of_chosen():
    """Theirs counts an assignment as a token, so that balance gives k."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits, config = leaf(24, E, dtype=torch.float32).detach(), MoEConfig(experts=E, top_k=K, aux_loss=1.0)
    mask = torch.arange(24) % 5 > 0
    for padding, tokens in ({}, 24), ({"mask": mask}, int(mask.sum())):
        ours = losses(logits, config, Batchwide(tokens, 1), sequences=1, **padding)["aux_loss"]
        theirs = load_balancing_loss_func((logits,), E, K, *([mask[None].float()] if padding else []))
        torch.testing.assert_close(ours * K, theirs, rtol=ROUNDINGS * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid"}, {"score": "sigmoid", "complementary": True}, {"score_after": True}], ids=str)
def test_every_term_and_its_gradient_are_the_formulas(options):
    logits, config = leaf(B * S, E), moe(**ALL, **options)
    expected = reference(logits, config)
    gradient = torch.autograd.grad(sum(expected.values()), logits)[0]
    actual = value_and_gradient(logits, config)
    assert list(losses(logits, config)) == list(expected) == TERMS
    assert_near(actual, [torch.stack(list(expected.values())).detach(), gradient], ROUNDINGS)


def test_balanced_softmax_scores_give_one_and_no_gradient_to_the_counts():
    """E tokens, each next k experts: every expert is chosen k times, with equal sums of scores."""
    logits = torch.stack([torch.arange(E).roll(shift) for shift in range(E)]).double()
    config = MoEConfig(experts=E, top_k=K, aux_loss=1.0, sequence_loss=1.0, global_loss=1.0, complementary=True)
    terms = losses(logits, config, Batchwide(E, 1), sequences=1)
    assert all(value.item() == pytest.approx(1.0, abs=1e-14) for value in terms.values()) and len(terms) == 3


@pytest.mark.parametrize("name", TERMS)
def test_each_term_alone_passes_gradcheck(name):
    config = moe(**{name: 0.5}, score="sigmoid", complementary=True)
    assert torch.autograd.gradcheck(lambda z: losses(z, config)[name], leaf(B * S, E))


# ---- the same in every layout ----


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "complementary": True}], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "context", "any", "rank without tokens"])
def test_value_and_gradient_are_the_same_however_tokens_are_spread(kind, options):
    """On each rank the whole value; the gradient to its own tokens is that of one process."""
    logits, config = leaf(B * S, E).detach(), moe(**ALL, **options)
    shares = {
        "tensor": torch.arange(B * S).chunk(2),
        "context": torch.arange(B * S).view(B, 2, S // 2).transpose(0, 1).reshape(2, -1),
        "any": torch.randperm(B * S, generator=torch.Generator().manual_seed(0)).split([5, 12, 7]),
        "rank without tokens": torch.arange(B * S).split([B * S, 0]),
    }[kind]

    def on(axis, rank):
        own = shares[rank]
        result = value_and_gradient(logits[own], config, numbers=own // S, axis=axis)
        assert axis.calls == 1  # forward alone, once for all terms
        return result

    value, gradient = value_and_gradient(logits, config)
    for own, (value_there, gradient_there) in zip(shares, Threads(len(shares)).run(on)):
        assert_near([value_there], [value], ROUNDINGS)
        if len(own):
            assert_near([gradient_there], [gradient[own]], ROUNDINGS)


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "complementary": True}], ids=str)
@pytest.mark.parametrize("sequences", [1, 2])
def test_all_but_the_aux_loss_are_the_same_for_every_number_of_micro_batches(sequences, options):
    logits, config = leaf(B * S, E).detach(), moe(**ALL | {"aux_loss": 0.0}, **options)
    parts = [value_and_gradient(part, config, sequences=sequences) for part in logits.split(sequences * S)]
    together = [sum(part[0] for part in parts), torch.cat([part[1] for part in parts])]
    assert_near(together, value_and_gradient(logits, config), ROUNDINGS)


def test_the_aux_loss_is_over_each_micro_batch_by_its_share_of_tokens():
    logits, config = leaf(B * S, E).detach(), moe(aux_loss=1.0)
    parts = [losses(part, config, sequences=1)["aux_loss"] for part in logits.split(S)]
    by_sequence = losses(logits, moe(sequence_loss=1.0))["sequence_loss"]
    assert_near([sum(parts)], [by_sequence], ROUNDINGS)  # of equal sequences, one in each micro-batch


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_padding_counts_nowhere(data):
    """E07: padding anywhere, also whole sequences of it, gives what the real tokens alone give, on one and two ranks."""
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=B * S, max_size=B * S)))
    config, numbers = moe(**ALL), sequence_numbers(B, B * S)
    batch = Batchwide(max(1, int(mask.sum())), B, PREVIOUS)
    logits = leaf(B * S, E).detach()
    expected = value_and_gradient(logits[mask], config, batch=batch, numbers=numbers[mask])
    loud = torch.where(mask[:, None], logits, 100 * logits)
    value, gradient = value_and_gradient(loud, config, batch=batch, numbers=numbers, mask=mask)
    if mask.any():
        assert_near([value, gradient[mask]], expected, ROUNDINGS)
    assert not gradient[~mask].any()

    def on(axis, rank):
        part = slice(rank * B * S // 2, (rank + 1) * B * S // 2)
        return value_and_gradient(loud[part], config, batch=batch, numbers=numbers[part], mask=mask[part], axis=axis)

    halves = Threads(2).run(on)
    assert_near([halves[0][0], torch.cat([half[1] for half in halves])], [value, gradient], ROUNDINGS)
    experts = route(logits, config).experts
    assert torch.equal(expert_counts(experts, E, mask), expert_counts(experts[mask], E))


def test_the_count_of_a_rank_is_not_changed_by_the_sum_over_ranks():
    """E07: an all-reduce in place of what someone else holds doubles it the next time."""
    logits, config = leaf(6, E).detach(), moe(sequence_loss=1.0)
    routing = route(logits, config)
    first, again = (Threads(2).run(lambda axis, _: sums(routing, config, axis=axis))[0] for _ in range(2))
    assert torch.equal(first.counts, again.counts) and first.counts.sum() == 2 * 6 * K


def test_numbers_of_sequences_follow_the_cut_over_context_and_tensor():
    assert sequence_numbers(3, 12).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    parts = [sequence_numbers(3, 3, parts=4, part=part).tolist() for part in range(4)]
    assert [number for part in parts for number in part] == sequence_numbers(3, 12).tolist()


# ---- options ----


def test_only_terms_with_a_coefficient_are_there():
    logits = leaf(B * S, E)
    assert losses(logits, moe()) == {}
    assert list(losses(logits, moe(z_loss=0.1, device_loss=0.1))) == ["device_loss", "z_loss"]


def test_groups_of_the_losses_are_the_models_and_not_the_machines():
    """One group has nothing to balance: its mean load is 1 and its scores sum to 1."""
    config = moe(groups=1, groups_kept=None, device_loss=1.0)
    assert losses(leaf(B * S, E), config)["device_loss"].item() == pytest.approx(1.0, abs=1e-14)


def test_the_load_is_that_before_dropping():
    """Counts after dropping hide overload: all tokens choose one expert here, and most are dropped."""
    logits = torch.zeros(B * S, E).index_fill_(1, torch.tensor([5]), 9.0)
    config = MoEConfig(experts=E, top_k=1, capacity=1.0, sequence_loss=1.0)
    routing = route(logits, config)
    assert keep(routing.experts, routing.weights, config).kept.sum() == B * S // E
    assert expert_counts(routing.experts, E)[5] == B * S
    torch.testing.assert_close(losses(logits, config)["sequence_loss"], E * routing.scores[0, 5])


def test_complementary_changes_the_sequence_loss_of_sigmoid_scores_alone():
    """The original compared strings wrongly: softmax was used, and the normalisation did nothing."""
    logits = leaf(B * S, E)
    for score, same in (("sigmoid", False), ("softmax", True)):
        plain, shares = (losses(logits, moe(score=score, complementary=c, **ALL)) for c in (False, True))
        assert all(torch.equal(plain[name], shares[name]) for name in TERMS if name != "sequence_loss")
        assert torch.allclose(plain["sequence_loss"], shares["sequence_loss"], rtol=1e-14) == same


@pytest.mark.parametrize("previous", [None, torch.zeros(E, dtype=torch.int64), torch.full((E,), 7)], ids=["none", "zeros", "equal"])
def test_the_global_loss_knows_no_load_before_the_first_step(previous):
    value, gradient = value_and_gradient(leaf(B * S, E), moe(global_loss=1.0), batch=Batchwide(B * S, B, previous))
    assert value.item() == pytest.approx(1.0, abs=1e-14) and gradient.abs().max() < 1e-15


def test_the_global_loss_pushes_down_what_was_overloaded():
    previous = torch.tensor([100, 1, 1, 1, 1, 1, 1, 1])
    _, gradient = value_and_gradient(torch.zeros(B * S, E).double(), moe(global_loss=1.0), batch=Batchwide(B * S, B, previous))
    assert bool((gradient[:, 0] > 0).all()) and bool((gradient[:, 1:] < 0).all())


@example(counts=[2**26 + 1, 2**26 - 1, 2**26, 2**26])
@given(counts=st.lists(st.integers(0, 2**40), min_size=4, max_size=4))
def test_the_bias_moves_by_the_rate_towards_the_mean(counts):
    """E05. Above 2^24 tokens float counts would be rounded; an expert at the mean stays."""
    bias = updated_bias(torch.full((4,), 0.5), torch.tensor(counts), 2**-10)
    mean = sum(counts) / 4
    steps = [(mean > count) - (mean < count) for count in counts]
    assert bias.dtype == torch.float32 and bias.tolist() == [0.5 + step * 2**-10 for step in steps]


def test_all_of_it_runs_without_values():
    logits, config = torch.empty(B * S, E, device="meta", requires_grad=True), moe(**ALL, complementary=True)
    numbers, mask = (torch.empty(B * S, dtype=dtype, device="meta") for dtype in (torch.int64, torch.bool))
    terms = losses(logits, config, Batchwide(B * S, B, torch.empty(E, dtype=torch.int64, device="meta")), numbers=numbers, mask=mask)
    assert torch.autograd.grad(sum(terms.values()), logits)[0].shape == (B * S, E)
    assert updated_bias(torch.empty(E, device="meta"), expert_counts(route(logits, config).experts, E, mask), 0.1).shape == (E,)
