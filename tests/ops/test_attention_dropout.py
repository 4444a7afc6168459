"""Attention dropout against the formula with the same mask, against attention without it, and itself in slices."""

from itertools import product

import pytest
import torch

from mtmegatron.batch import Bounds
from mtmegatron.ops.attention import attention
from mtmegatron.ops.attention_dropout import HEAD, attention_dropout, attention_dropout_reference
from mtmegatron.ops.dropout import Stream, keep_mask, keep_reference
from tests.ops.helpers import assert_near, double, each_dtype, gradients, leaf

STREAM = Stream(seed=1234, step=7, layer=3, site="attention")
T, P, SCALE = 40, 0.3, 0.4
BOUNDS = Bounds((0, 1, 20, 24, 40))
TOKENS = torch.arange(T) + 1000  # of a global batch whose first 1000 tokens are on other ranks
HEADS = [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 8, 8), (4, 4, 12, 8)]  # N, K, H of query and key, H of value
# A score, an output and a gradient are sums of up to 19 products of size 1, divided by 1 - P once or twice: a random
# walk of their roundings, twice (softmax of a sum).
ROUNDINGS = 4 * 19**0.5 / (1 - P) ** 2


def inputs(heads=(6, 2, 8, 8), dtype=torch.float64, tokens=T):
    n, k, size, value_size = heads
    return [leaf(tokens, *s, dtype=dtype, seed=i) for i, s in enumerate([(n, size), (k, size), (k, value_size)])]


def visible(causal):
    document = torch.repeat_interleave(torch.arange(len(BOUNDS.lengths)), torch.tensor(BOUNDS.lengths))
    same = document == document[:, None]
    return same.tril() if causal else same


def by_formula(query, key, value, causal):
    keep = torch.stack([keep_mask(STREAM, n * HEAD + TOKENS, TOKENS, P) for n in range(query.shape[1])])
    return attention_dropout_reference(query, key, value, visible(causal), keep, P, SCALE)


def whole(query, key, value, causal=True, p=P):
    return attention_dropout(query, key, value, BOUNDS, STREAM, TOKENS, range(query.shape[1]), p, causal, SCALE)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_formula_with_the_same_mask(heads, causal):
    actual = gradients(lambda *t: whole(*t, causal), *inputs(heads))
    assert_near(actual, gradients(lambda *t: by_formula(*t, causal), *inputs(heads)), ROUNDINGS, 1)


@each_dtype
def test_every_dtype_is_within_its_rounding_of_float64(dtype):
    tensors = inputs(dtype=dtype)
    actual = gradients(whole, *tensors)
    assert all(t.dtype == dtype for t in actual)
    assert_near(actual, gradients(lambda *t: by_formula(*t, True), *double(*tensors)), ROUNDINGS, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_without_drops_it_is_attention(causal):
    actual = gradients(lambda *t: whole(*t, causal, p=0.0), *inputs())
    assert_near(actual, gradients(lambda *t: attention(*t, BOUNDS, causal, SCALE), *inputs()), ROUNDINGS, 1)


def test_an_entry_of_the_mask_belongs_to_head_query_and_key():
    """With equal scores and one-hot values the output shows the mask itself."""
    query, key, value = torch.zeros(8, 2, 4), torch.zeros(8, 1, 4), torch.eye(8)[:, None]
    tokens = TOKENS[:8]
    out = attention_dropout(query, key, value, Bounds((0, 8)), STREAM, tokens, range(5, 7), 0.5, causal=False)
    for q, n, k in product(range(8), range(2), range(8)):
        kept = keep_reference(STREAM, (5 + n) * HEAD + 1000 + q, 1000 + k, 0.5)
        assert out[q, n, k] == kept * 0.25, (q, n, k)  # 1 / 8 of the softmax, twice that after the scaling


def test_gradcheck():
    tensors = inputs((2, 1, 3, 2), tokens=7)
    bounds, tokens = Bounds((0, 3, 7)), TOKENS[:7]
    assert torch.autograd.gradcheck(lambda *t: attention_dropout(*t, bounds, STREAM, tokens, range(2), 0.4), tensors)


def test_slices_of_heads_are_the_whole():
    """Tensor parallel: each rank holds a key head and its three query heads (field bug P21)."""
    query, key, value = inputs()
    parts = []
    for k in range(2):
        n, piece = range(3 * k, 3 * k + 3), (slice(None), slice(k, k + 1))
        q = query[:, n.start : n.stop]
        parts.append(attention_dropout(q, key[piece], value[piece], BOUNDS, STREAM, TOKENS, n, P, scale=SCALE))
    assert_near([torch.cat(parts, 1)], [whole(query, key, value)], ROUNDINGS, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_slices_of_queries_are_the_whole(causal):
    """Context parallel in zigzag: rank 0 has the first and last quarters, rank 1 the middle; keys are gathered.

    Bounds of the ranks' pieces hold, of documents of 1, 19, 4 and 16 tokens, 1, 9, 0, 10 and 0, 10, 4, 6."""
    mine = [torch.cat([torch.arange(0, 10), torch.arange(30, 40)]), torch.arange(10, 30)]
    bounds = [Bounds((0, 1, 10, 10, 20)), Bounds((0, 0, 10, 14, 20))]

    def in_parts(query, key, value):
        out = torch.empty_like(query)
        for rows, piece in zip(mine, bounds):
            others = dict(key_bounds=BOUNDS, key_tokens=TOKENS)
            out[rows] = attention_dropout(
                query[rows], key, value, piece, STREAM, TOKENS[rows], range(6), P, causal, SCALE, **others
            )
        return out

    actual = gradients(in_parts, *inputs())
    assert_near(actual, gradients(lambda *t: whole(*t, causal), *inputs()), ROUNDINGS, 1)


def test_keys_of_another_sequence():
    """Cross attention of an encoder-decoder: another number of keys, with their own numbers."""
    query, (_, key, value) = inputs(tokens=5)[0], inputs(tokens=9)
    bounds, key_bounds, tokens, key_tokens = Bounds((0, 2, 5)), Bounds((0, 6, 9)), TOKENS[:5], TOKENS[:9]
    seen = torch.block_diag(torch.ones(2, 6), torch.ones(3, 3)).bool()
    keep = torch.stack([keep_mask(STREAM, n * HEAD + tokens, key_tokens, P) for n in range(6)])
    out = attention_dropout(
        query, key, value, bounds, STREAM, tokens, range(6), P, False, SCALE, key_bounds, key_tokens
    )
    assert_near([out], [attention_dropout_reference(query, key, value, seen, keep, P, SCALE)], ROUNDINGS, 1)


def test_only_inputs_are_saved():
    tensors, saved = inputs(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        whole(*tensors)
    assert sum(t.numel() for t in saved) == sum(t.numel() for t in tensors) + 2 * T


@pytest.mark.parametrize("tokens,heads,match", [(T - 1, 6, "queries"), (T, 5, "heads")])
def test_numbers_must_cover_queries_and_heads(tokens, heads, match):
    with pytest.raises(AssertionError, match=match):
        attention_dropout(*inputs(), BOUNDS, STREAM, TOKENS[:tokens], range(heads), P)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_on_another_device(dtype):
    tensors = [t.detach().to("meta").requires_grad_() for t in inputs(dtype=dtype)]
    out = attention_dropout(*tensors, BOUNDS, STREAM, TOKENS.to("meta"), range(6), P)
    grads = torch.autograd.grad(out.sum(), tensors)
    assert (out.shape, out.dtype) == (tensors[0].shape, dtype)
    assert all((g.shape, g.dtype, g.device) == (t.shape, t.dtype, t.device) for g, t in zip(grads, tensors))
