"""Attention over documents against its formula, torch's own, and itself in pieces (blocks of keys, caches)."""

import pytest
import torch
from torch.nn import functional as F

from mtmegatron.batch import Bounds
from mtmegatron.ops import attention as module
from mtmegatron.ops.attention import (
    attention,
    attention_backward,
    attention_backward_reference,
    attention_cached,
    attention_forward,
    attention_reference,
)
from tests.ops.helpers import assert_near, double, each_dtype, gradients, leaf

UNEQUAL = Bounds((0, 1, 66, 70, 71, 200))  # lengths 1, 65, 4, 1, 129: alone, over a block bound, and over two
BOUNDS = {"equal": Bounds.equal(2, 100), "unequal": UNEQUAL, "single tokens": Bounds.equal(200, 1)}
HEADS = [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 8, 8), (4, 4, 12, 8), (2, 2, 4, 8)]  # N, K, H of query and key, H of value
# A score, an output and a gradient are sums of up to 129 products: a random walk of their roundings, twice (softmax of
# a sum). Values are of size 1 and so are the terms of a gradient, which may cancel: a single token's query has none.
ROUNDINGS = 4 * 129**0.5


def inputs(heads, dtype=torch.float64, tokens=200):
    n, k, size, value_size = heads
    return [leaf(tokens, *s, dtype=dtype, seed=i) for i, s in enumerate([(n, size), (k, size), (k, value_size)])]


def by_formula(query, key, value, bounds, causal, scale=None):
    pieces = zip(*(t.split(bounds.lengths) for t in (query, key, value)))
    return torch.cat([attention_reference(*(t[None] for t in p), causal, scale)[0][0] for p in pieces])


@pytest.fixture(params=["blocks of 64", "blocks of 3", "flash"])
def path(request, monkeypatch):
    """Both CPU paths at test sizes: small blocks have many borders; the flash operator is for long documents."""
    if request.param == "blocks of 3":
        monkeypatch.setattr(module, "ROWS", 3)
    if request.param == "flash":
        monkeypatch.setattr(module, "LONGEST", 0)


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_the_formula_within_documents(path, bounds, heads, causal):
    actual = gradients(lambda *t: attention(*t, bounds, causal), *inputs(heads))
    assert_near(actual, gradients(lambda *t: by_formula(*t, bounds, causal), *inputs(heads)), ROUNDINGS, 1)


@each_dtype
def test_every_dtype_is_within_its_rounding_of_float64(path, dtype):
    tensors = inputs((6, 2, 8, 8), dtype)
    actual = gradients(lambda *t: attention(*t, UNEQUAL, scale=0.2), *tensors)
    assert all(t.dtype == dtype for t in actual)
    assert_near(actual, gradients(lambda *t: by_formula(*t, UNEQUAL, True, 0.2), *double(*tensors)), ROUNDINGS, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_torch_sdpa(path, causal):
    def sdpa(*tensors):
        batch = (t.unflatten(0, (2, 100)).transpose(1, 2) for t in tensors)
        return F.scaled_dot_product_attention(*batch, is_causal=causal, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    actual = gradients(lambda *t: attention(*t, Bounds.equal(2, 100), causal), *inputs((4, 2, 8, 8)))
    assert_near(actual, gradients(sdpa, *inputs((4, 2, 8, 8))), ROUNDINGS, 1)


def test_the_path_of_other_devices_is_the_formula():
    for bounds in BOUNDS.values():
        out = module._attention_sdpa(*inputs((6, 2, 8, 8)), bounds, True, 0.3)
        assert_near([out], [by_formula(*inputs((6, 2, 8, 8)), bounds, True, 0.3)], ROUNDINGS, 1)


def test_views_of_one_fused_tensor_are_read_where_they_lie(path):
    fused = leaf(200, 6 + 2 + 2, 8)
    call = lambda function: lambda x: function(*x.split((6, 2, 2), dim=1), UNEQUAL, True)
    assert_near(gradients(call(attention), fused), gradients(call(by_formula), fused), ROUNDINGS, 1)


def test_a_document_does_not_see_another(path):
    query, key, value = inputs((4, 2, 8, 8))
    before = attention(query, key, value, UNEQUAL)
    key.data[66:70], value.data[66:70] = 1e3, 1e3
    changed = (attention(query, key, value, UNEQUAL) != before).flatten(1).any(1)
    assert changed[66:70].all() and not changed[:66].any() and not changed[70:].any()


def test_large_scores_stay_finite(path):
    large = [(1000 * t).detach().requires_grad_() for t in inputs((2, 2, 8, 8), torch.float32)]
    assert all(t.isfinite().all() for t in gradients(lambda *t: attention(*t, UNEQUAL), *large))


def test_attention_passes_gradcheck(path):
    tensors = [leaf(7, n, h, seed=i) for i, (n, h) in enumerate([(4, 3), (2, 3), (2, 2)])]
    assert torch.autograd.gradcheck(lambda *t: attention(*t, Bounds((0, 1, 3, 7))), tensors)


@pytest.mark.parametrize("lengths", [((1, 1, 1), (5, 1, 90)), ((3, 70, 2), (80, 70, 2)), ((5,), (131,))], ids=str)
def test_cached_attention_is_the_tail_of_the_whole(lengths):
    query_lengths, key_lengths = lengths
    _, key, value = inputs((6, 2, 8, 8), tokens=sum(key_lengths))
    query = leaf(sum(key_lengths), 6, 8, seed=3)
    whole = by_formula(query, key, value, Bounds(tuple(torch.tensor((0, *key_lengths)).cumsum(0).tolist())), True)
    tails = [torch.cat([t[-n:] for t, n in zip(x.split(key_lengths), query_lengths)]) for x in (query, whole)]
    assert_near([attention_cached(tails[0], key, value, query_lengths, key_lengths)], tails[1:], ROUNDINGS, 1)


BLOCKS = [(5, 9, False), (9, 9, False), (9, 9, True), (5, 9, True)]  # Sq, Sk, causal


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_with_lse_are_the_formula(heads, block):
    n, k, size, value_size = heads
    queries, keys, causal = block
    query, key, value = leaf(2, queries, n, size), leaf(2, keys, k, size, seed=1), leaf(2, keys, k, value_size, seed=2)
    grad = leaf(2, queries, n, value_size, seed=3).detach()
    with torch.no_grad():
        out, lse = attention_forward(query, key, value, causal)
        assert_near([out, lse], attention_reference(query, key, value, causal), ROUNDINGS, 1)
        actual = attention_backward(grad, query, key, value, out, lse, causal)
        by_hand = attention_backward_reference(grad, query, key, value, out, lse, causal, size**-0.5)
    by_autograd = torch.autograd.grad(attention_reference(query, key, value, causal)[0], (query, key, value), grad)
    assert_near(actual, by_autograd, ROUNDINGS, 1)
    assert_near(by_hand, by_autograd, ROUNDINGS, 1)


def test_two_blocks_of_keys_merge_to_the_whole_forward_and_backward():
    query, key, value = leaf(1, 8, 4, 6), leaf(1, 8, 2, 6, seed=1), leaf(1, 8, 2, 6, seed=2)
    late, past, own = slice(4, 8), slice(0, 4), slice(4, 8)  # the later queries: all of the past, causally themselves
    grad = leaf(1, 4, 4, 6, seed=3).detach()
    with torch.no_grad():
        blocks = [(past, False), (own, True)]
        parts = [attention_forward(query[:, late], key[:, b], value[:, b], c) for b, c in blocks]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(o * torch.exp(part - lse)[..., None] for o, part in parts)
        grads = [attention_backward(grad, query[:, late], key[:, b], value[:, b], out, lse, c) for b, c in blocks]
    whole = attention_reference(query, key, value, True)[0][:, late]
    dq, dk, dv = torch.autograd.grad(whole, (query, key, value), grad)
    assert_near([out, grads[0][0] + grads[1][0]], [whole, dq[:, late]], ROUNDINGS, 1)
    assert_near([torch.cat([g[i] for g in grads], 1) for i in (1, 2)], [dk, dv], ROUNDINGS, 1)


def test_unequal_totals_are_refused():
    with pytest.raises(AssertionError, match="bounds must cover"):
        attention(*inputs((2, 2, 4, 4), tokens=5), Bounds.equal(2, 3))
