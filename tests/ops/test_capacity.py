"""Capacity against a plain queue for each expert, its policies, ties and padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtmegatron.config.model import MoEConfig
from mtmegatron.ops.capacity import capacity, keep
from mtmegatron.ops.router import route
from tests.ops.helpers import leaf

T, E, K = 24, 8, 2


def moe(factor: float, **options) -> MoEConfig:
    return MoEConfig(experts=E, top_k=K, capacity=factor, **options)


def reference(experts: Tensor, weights: Tensor, config: MoEConfig, mask: Tensor) -> list[list[bool]]:
    """One queue for each owner, in Python."""
    size = E // config.groups if config.capacity_of == "group" else 1
    most, kept = capacity(len(experts), config) * size, [[False] * config.top_k for _ in experts]
    for owner in range(E // size):
        queue = [(t, j) for t in range(len(experts)) for j in range(config.top_k) if experts[t, j] // size == owner and mask[t]]
        if config.drop == "weight":
            queue.sort(key=lambda place: -weights[place].item())  # stable: the earliest first
        for t, j in queue[:most]:
            kept[t][j] = True
    return kept


def test_golden_capacity():
    assert capacity(32, MoEConfig(experts=4, top_k=2, capacity=1.0)) == 16  # 64 routes, 4 experts


@pytest.mark.parametrize("tokens, factor, expected", [(24, 0.5, 3), (24, 1.0, 6), (24, 1.25, 8), (25, 1.0, 7), (400, 1.1, 110), (24, 100.0, 24)])
def test_capacity_is_rounded_up_from_the_decimal_factor_and_never_above_the_tokens(tokens, factor, expected):
    """400 tokens: 100 x 1.1 is above 110 in binary."""
    assert capacity(tokens, moe(factor)) == expected


@given(seed=st.integers(0, 999), factor=st.sampled_from([0.1, 0.5, 1.0, 1.5]), levels=st.sampled_from([1, 2, 1000]))
@pytest.mark.parametrize("of", ["expert", "group"])
@pytest.mark.parametrize("drop", ["weight", "position"])
@settings(max_examples=25, deadline=None)
def test_who_stays_is_the_plain_queue_with_ties_to_the_earliest(seed, factor, levels, of, drop):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (T, E), generator=draw) / levels + torch.linspace(0, 1, E) * (seed % 3)
    config, mask = moe(factor, capacity_of=of, groups=4, drop=drop), torch.rand(T, generator=draw) < 0.8
    routing = route(logits, config)
    kept = keep(routing.experts, routing.weights, config, mask)
    assert kept.kept.tolist() == reference(routing.experts, routing.weights, config, mask)
    real = int(mask.sum()) * K
    assert kept.dropped.item() == pytest.approx((real - int(kept.kept.sum())) / max(1, real), abs=1e-6)
    whole = keep(routing.experts, routing.weights, config)
    assert whole.kept.tolist() == reference(routing.experts, routing.weights, config, torch.ones(T, dtype=torch.bool))


@pytest.mark.parametrize("of", ["expert", "group"])
@pytest.mark.parametrize("drop", ["weight", "position"])
def test_a_large_factor_drops_nothing_and_no_factor_takes_more_than_the_capacity(of, drop):
    """E09."""
    logits = leaf(T, E).detach() + torch.linspace(0, 3, E)
    for factor in (0.5, 1.0, 100.0):
        config = moe(factor, capacity_of=of, groups=4, drop=drop)
        routing = route(logits, config)
        kept, dropped = keep(routing.experts, routing.weights, config)
        owners = routing.experts // (E // 4) if of == "group" else routing.experts
        most = capacity(T, config) * (E // 4 if of == "group" else 1)
        assert torch.bincount(owners[kept]).max() <= most
        assert (dropped == 0) == bool(kept.all()) == (factor == 100.0)


def test_pooled_capacity_drops_no_more_than_that_of_each_expert():
    """One expert of each group is chosen more often than the other."""
    logits = leaf(T, E).detach() + torch.tensor([0, 1.5] * (E // 2))
    drops = []
    for of in ("expert", "group"):
        config = moe(1.0, capacity_of=of, groups=4)
        routing = route(logits, config)
        drops.append(keep(routing.experts, routing.weights, config).dropped.item())
    assert 0 < drops[1] < drops[0]


def test_the_default_policy_is_a_listed_one_and_others_are_refused():
    """E08."""
    assert moe(1.0).drop == "weight" and moe(1.0).capacity_of == "expert"
    for wrong in ({"drop": "probs"}, {"capacity_of": "device"}):
        with pytest.raises(ValueError, match="Input should be"):
            moe(1.0, **wrong)


def test_padding_takes_nobodys_place():
    """The first half is padding of the same weights, which the policy by position would prefer."""
    logits = leaf(T // 2, E).detach().repeat(2, 1)
    mask = torch.arange(T) >= T // 2
    for drop in ("weight", "position"):
        config = moe(2.0, drop=drop)
        routing = route(logits, config)
        kept = keep(routing.experts, routing.weights, config, mask).kept
        alone = keep(routing.experts[mask], routing.weights[mask], config.model_copy(update={"capacity": 4.0}))
        assert not kept[~mask].any() and torch.equal(kept[mask], alone.kept)


def test_padding_alone_drops_nothing():
    routing = route(leaf(T, E).detach(), moe(1.0))
    kept, dropped = keep(routing.experts, routing.weights, moe(1.0), torch.zeros(T, dtype=torch.bool))
    assert not kept.any() and dropped == 0


def test_all_of_it_runs_without_values():
    config, logits = moe(1.0), torch.empty(T, E, device="meta", requires_grad=True)
    routing = route(logits, config)
    kept, dropped = keep(routing.experts, routing.weights, config, torch.empty(T, dtype=torch.bool, device="meta"))
    assert kept.shape == (T, K) and kept.dtype == torch.bool and dropped.shape == ()
