"""Attention with dropout on the probabilities, dropout(softmax(scale * Q KT)) V, inside each document.

Notable:
- An entry of the mask belongs to (stream, global head, global query token, global key token). A rank that holds some of
  the heads, or some of the queries and all keys of their documents, gets exactly its part of the whole.
- The causal mask compares global token numbers, so the queries may be any part of a document in any order.
- One document at a time, all of its scores at once: plain, and quadratic in the length of the longest document.
  Backward computes probabilities and mask again; only the inputs are saved. As in `ops.attention`, the G = N/K query
  heads that share a key head are G more rows of the same GEMM.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtmegatron.batch import Bounds
from mtmegatron.ops.dropout import Stream, keep_mask

HEAD = 1 << 40  # query token i of head n is row n * HEAD + i of the mask: no batch has more tokens


def attention_dropout(
    query_TNH: Tensor,
    key_TKH: Tensor,
    value_TKH: Tensor,
    bounds: Bounds,
    stream: Stream,
    tokens: Tensor,
    heads: range | Tensor,
    p: float,
    causal: bool = True,
    scale: float | None = None,
    key_bounds: Bounds | None = None,
    key_tokens: Tensor | None = None,
) -> Tensor:
    """dropout(softmax(scale * Q KT + mask)) V within each document; scale is H^-1/2 when None.

    `tokens` are global numbers in the step's whole batch, rising along a document, and `heads` global numbers of query
    heads. Where keys are not those of the queries (context parallel, an encoder's), `key_bounds` gives the keys of the
    same documents in the same order and `key_tokens` their numbers, below 2^32. Every query must see a key.

    Softmax and its sums are at least fp32. The mask acts on normalised probabilities, so a row no longer sums to 1, as
    in GPT-2 (Radford et al. 2019) and BERT (Devlin et al. 2019).

    Shapes: query [T, N, H], tokens [T], heads [N], key [T', K, H], value [T', K, Hv], key_tokens [T'], K divides N;
    result [T, N, Hv].
    """
    key_bounds = bounds if key_bounds is None else key_bounds
    key_tokens = tokens if key_tokens is None else key_tokens
    assert bounds.total == len(query_TNH) == len(tokens), "bounds must cover the queries and their numbers"
    assert key_bounds.total == len(key_TKH) == len(value_TKH) == len(key_tokens), "key bounds must cover the keys"
    assert query_TNH.shape[1] == len(heads) and len(heads) % key_TKH.shape[1] == 0, "key heads must divide query heads"
    scale = query_TNH.shape[-1] ** -0.5 if scale is None else scale
    heads = torch.as_tensor(heads, device=tokens.device)
    lengths = bounds.lengths, key_bounds.lengths
    return _AttentionDropout.apply(
        query_TNH, key_TKH, value_TKH, tokens, key_tokens, lengths, (stream, heads, p), causal, scale
    )


class _AttentionDropout(torch.autograd.Function):
    """Per document P = softmax(scale Q KT), M = keep / (1 - p), O = (P * M) V. With dP = M * (dO VT):

    dV = (P * M)T dO, dS = P * (dP - rowsum(P * dP)), dQ = scale dS K, dK = scale dST Q."""

    @staticmethod
    def forward(ctx, query, key, value, tokens, key_tokens, lengths, random, causal, scale):
        ctx.save_for_backward(query, key, value, tokens, key_tokens)
        ctx.rest = lengths, random, causal, scale
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for q, o, number, k, v, key_number in _documents(lengths, (query, out, tokens), (key, value, key_tokens)):
            q, k, v = _merged(q, k.shape[1]), _merged(k, k.shape[1]), _merged(v, v.shape[1])
            probabilities = _probabilities(q, k, number, key_number, causal, scale)
            probabilities.mul_(_multiplier(probabilities, number, key_number, *random))
            _fill(o, torch.bmm(probabilities, v))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, tokens, key_tokens = ctx.saved_tensors
        lengths, random, causal, scale = ctx.rest
        dquery, dkey, dvalue = (torch.empty_like(t) for t in (query, key, value))
        of_queries, of_keys = (query, grad, dquery, tokens), (key, value, dkey, dvalue, key_tokens)
        for q, g, dq, number, k, v, dk, dv, key_number in _documents(lengths, of_queries, of_keys):
            q, g, k, v = (_merged(t, key.shape[1]) for t in (q, g, k, v))
            probabilities = _probabilities(q, k, number, key_number, causal, scale)
            multiplier = _multiplier(probabilities, number, key_number, *random)
            _fill(dv, torch.bmm((probabilities * multiplier).mT, g))
            ds = torch.bmm(g, v.mT).mul_(multiplier)
            ds.sub_((probabilities * ds).sum(-1, keepdim=True)).mul_(probabilities).mul_(scale)
            _fill(dq, torch.bmm(ds, k))
            _fill(dk, torch.bmm(ds.mT, q))
        return dquery, dkey, dvalue, *[None] * 6


def _documents(
    lengths: tuple[Sequence[int], Sequence[int]], of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """Each document's piece of all tensors, one document after another."""
    sides = zip(lengths, (of_queries, of_keys), strict=True)
    return zip(*(t.split(sizes) for sizes, tensors in sides for t in tensors), strict=True)


def _merged(x_SNH: Tensor, key_heads: int) -> Tensor:
    """[K, G * S, H] in at least fp32: the rows that multiply one key head; query head n belongs to key head n // G."""
    wide = x_SNH.to(torch.promote_types(x_SNH.dtype, torch.float32))
    return wide.unflatten(1, (key_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _fill(target_SNH: Tensor, merged: Tensor) -> None:
    """Writes [K, G * S, H] where `_merged` read it."""
    tokens, heads, size = target_SNH.shape
    target_SNH.copy_(merged.view(heads, tokens, size).transpose(0, 1))


def _probabilities(
    query: Tensor, key: Tensor, tokens: Tensor, key_tokens: Tensor, causal: bool, scale: float
) -> Tensor:
    """softmax(scale * Q KT) [K, G * S, S'], over the keys whose number is not above the query's when causal."""
    scores = torch.bmm(query * scale, key.mT)
    if causal and len(tokens) > 0:  # no queries, none of whose keys to hide: context parallel has such pieces
        scores.unflatten(1, (-1, len(tokens))).masked_fill_(key_tokens > tokens[:, None], -torch.inf)
    return torch.softmax(scores, -1)


def _multiplier(
    probabilities: Tensor, tokens: Tensor, key_tokens: Tensor, stream: Stream, heads: Tensor, p: float
) -> Tensor:
    """0 or 1 / (1 - p) for each probability."""
    rows = heads[:, None] * HEAD + tokens
    keep = keep_mask(stream, rows.flatten(), key_tokens, p)
    return keep.view(probabilities.shape).to(probabilities.dtype).mul_(1 / (1 - p))


def attention_dropout_reference(
    query: Tensor, key: Tensor, value: Tensor, visible_TT: Tensor, keep_NTT: Tensor, p: float, scale: float
) -> Tensor:
    """The formula over all tokens at once, with a given mask of what a query sees and of what is kept."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    q, k, v = (t.to(wide).transpose(0, 1) for t in (query, *(t.repeat_interleave(group, 1) for t in (key, value))))
    probabilities = torch.softmax((q @ k.mT * scale).masked_fill(~visible_TT, -torch.inf), -1)
    return (probabilities * keep_NTT / (1 - p) @ v).transpose(0, 1).to(query.dtype)
