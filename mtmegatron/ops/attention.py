"""Scaled dot-product attention, softmax(scale * Q KT) V, inside each of the documents that lie end to end.

Notable:
- On a CPU a document is cut into blocks of query rows that multiply only the keys they can see, so most of the upper
  triangle is never computed, and the probabilities are kept for backward: 1.2 to 1.5 times faster than torch's flash
  operator. That operator takes documents of one block, and those above LONGEST tokens, because its memory is linear.
  Other devices take torch's `scaled_dot_product_attention`.
- The G = N/K query heads that share a key head are G more rows of the same GEMM: keys and values are never repeated,
  and their gradients sum over the group by themselves.
- `attention_forward` and `attention_backward` work on blocks with a given log-sum-exp: what ring attention is made of.
- A causal mask is aligned at the end: query i of Sq sees keys up to i + Sk - Sq, as in generation with a cache of keys.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mtmegatron.batch import Bounds

ROWS = 64  # query rows per block: large enough for the GEMM, small enough that little of the upper triangle is computed
TOGETHER = 512  # tokens of short documents that share a batch of GEMMs: their probabilities stay in cache
LONGEST = 512  # tokens of the longest document whose probabilities are worth keeping (measured by benchmarks/ops.py)


def attention(
    query_TNH: Tensor,
    key_TKH: Tensor,
    value_TKH: Tensor,
    bounds: Bounds,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * Q KT + mask) V within each document; scale is H^-1/2 when None (Vaswani et al. 2017, eq. 1).

    Softmax and its sums are at least fp32. Inputs may be strided views; the value's head size may differ from H.

    Shapes: query [T, N, H], key [T, K, H], value [T, K, Hv], K divides N; result [T, N, Hv].
    """
    assert bounds.total == len(query_TNH) == len(key_TKH) == len(value_TKH), "bounds must cover the tokens"
    assert query_TNH.shape[1] % key_TKH.shape[1] == 0, "key heads must divide query heads"
    scale = _scale(query_TNH, scale)
    device = query_TNH.device.type
    if device not in ("cpu", "meta"):  # on meta, what is kept for backward is what counts
        return _attention_sdpa(query_TNH, key_TKH, value_TKH, bounds, causal, scale)
    kept = device == "cpu" and ROWS < max(bounds.lengths) <= LONGEST
    function = _BlockAttention if kept else _FlashAttention
    return function.apply(query_TNH, key_TKH, value_TKH, bounds, causal, scale)


def attention_cached(
    query_TNH: Tensor,
    key_TKH: Tensor,
    value_TKH: Tensor,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    scale: float | None = None,
) -> Tensor:
    """Causal attention where the queries of each sequence are the last of its keys, as in generation; no gradient.

    Shapes: query [sum(query_lengths), N, H], key and value [sum(key_lengths), K, H]; result as query.
    """
    assert all(q <= k for q, k in zip(query_lengths, key_lengths, strict=True)), "queries are the last of their keys"
    assert sum(query_lengths) == len(query_TNH) and sum(key_lengths) == len(key_TKH), "lengths must cover the tokens"
    scale, out = _scale(query_TNH, scale), query_TNH.new_empty(*query_TNH.shape[:2], value_TKH.shape[-1])
    of_queries = (t.detach()[None].split(list(query_lengths), 1) for t in (query_TNH, out))
    of_keys = (t.detach()[None].split(list(key_lengths), 1) for t in (key_TKH, value_TKH))
    for query, piece, key, value in zip(*of_queries, *of_keys):
        _group_forward(query, key, value, piece, True, scale)
    return out


def attention_forward(
    query_BSNH: Tensor, key_BSKH: Tensor, value_BSKH: Tensor, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """One block of attention and the log-sum-exp of its scores; no autograd.

    Two blocks over different keys merge by l = logaddexp(l1, l2), o = o1 e^(l1-l) + o2 e^(l2-l).

    Shapes: query [B, Sq, N, H], key and value [B, Sk, K, H]; out as query, lse [B, Sq, N] in at least fp32.
    """
    scale = _scale(query_BSNH, scale)
    if not _flash_fits(query_BSNH, key_BSKH, causal):
        return attention_reference(query_BSNH, key_BSKH, value_BSKH, causal, scale)
    heads = _flash_heads(query_BSNH, key_BSKH, value_BSKH)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal, scale=scale)
    return out.transpose(1, 2)[..., : value_BSKH.shape[-1]], lse.transpose(1, 2)


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of one block, given out and lse of the whole row, which may span other blocks.

    P = exp(scale Q KT - lse), dV = PT dO, dS = P * (dO VT - rowsum(dO * O)), dQ = scale dS K, dK = scale dST Q
    (Dao et al. 2022, algorithm 4).

    Shapes: grad and out [B, Sq, N, H], lse [B, Sq, N], the rest as in `attention_forward`.
    """
    scale = _scale(query, scale)
    if not _flash_fits(query, key, causal):
        return attention_backward_reference(grad, query, key, value, out, lse, causal, scale)
    grad, out, q, k, v = _flash_heads(grad, out, query, key, value)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse.transpose(1, 2), 0.0, causal, scale=scale
    )
    return tuple(d.transpose(1, 2)[..., : t.shape[-1]] for d, t in zip(grads, (query, key, value)))


class _BlockAttention(torch.autograd.Function):
    """All documents by row blocks; keeps the probabilities."""

    @staticmethod
    def forward(ctx, query, key, value, bounds, causal, scale):
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        kept = []
        for piece in _groups(bounds, query, key, value, out):
            kept += _group_forward(*piece, causal, scale)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.rest = bounds, causal, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, *kept = ctx.saved_tensors
        bounds, causal, scale = ctx.rest
        kept = iter(kept)
        grads = [t.new_empty(t.shape) for t in (query, key, value)]
        for piece in _groups(bounds, grad, query, key, value, *grads):
            _group_backward(kept, *piece, causal, scale)
        return *grads, None, None, None


class _FlashAttention(torch.autograd.Function):
    """Equal documents as one batch, else one after another, through `attention_forward` and `attention_backward`."""

    @staticmethod
    def forward(ctx, query, key, value, bounds, causal, scale):
        results = [attention_forward(*piece, causal, scale) for piece in _batches(bounds, query, key, value)]
        out, lse = (_end_to_end(pieces) for pieces in zip(*results))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest = bounds, causal, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        bounds, *rest = ctx.rest
        pieces = _batches(bounds, grad, *ctx.saved_tensors)
        results = [attention_backward(*piece, *rest) for piece in pieces]
        return *(_end_to_end(pieces) for pieces in zip(*results)), None, None, None


def _group_forward(query, key, value, out, causal, scale) -> list[Tensor]:
    """Fills `out` [B, S, N, Hv]; returns the probabilities, [B * K, G * rows, keys seen] for each block of rows."""
    heads, k, v = key.shape[2], _heads_first(key), _heads_first(value)
    q = _rows_first(query, heads).mul_(scale)
    mask = torch.full((ROWS, ROWS), -torch.inf, dtype=k.dtype, device=k.device).triu_(1)
    kept = []
    for rows, seen in _row_blocks(query.shape[1], key.shape[1], causal):
        scores = torch.bmm(q[:, :, rows].flatten(1, 2), k[:, :seen].mT)
        if causal:
            size = rows.stop - rows.start
            scores.unflatten(1, (-1, size))[..., -size:].add_(mask[:size, :size])
        kept.append(torch.softmax(scores, -1, out=scores))
        target = _by_key_head(out[:, rows], heads)
        target.copy_(torch.bmm(scores, v[:, :seen]).view(target.shape))
    return kept


def _group_backward(kept: Iterator[Tensor], grad, query, key, value, dquery, dkey, dvalue, causal, scale) -> None:
    """Fills the gradients of some documents from the probabilities that their forward kept."""
    heads, k, v = key.shape[2], _heads_first(key), _heads_first(value)
    q, g = _rows_first(query, heads).mul_(scale), _rows_first(grad, heads)
    dk, dv, blocks = None, None, list(_row_blocks(query.shape[1], key.shape[1], causal))
    probabilities = [next(kept) for _ in blocks]
    for (rows, seen), p in zip(reversed(blocks), reversed(probabilities)):  # the last sees all keys: its products begin the sums
        mine, g_rows = q[:, :, rows].flatten(1, 2), g[:, :, rows].flatten(1, 2)
        dv = _add(dv, torch.bmm(p.mT, g_rows))
        ds = torch.bmm(g_rows, v[:, :seen].mT)
        torch.ops.aten._softmax_backward_data.out(ds, p, -1, ds.dtype, grad_input=ds)
        dk = _add(dk, torch.bmm(ds.mT, mine))
        target = _by_key_head(dquery[:, rows], heads)
        torch.mul(torch.bmm(ds, k[:, :seen]).view(target.shape), scale, out=target)
    for d, whole in ((dk, dkey), (dv, dvalue)):
        whole.copy_(d.unflatten(0, (-1, heads)).transpose(1, 2))


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    """Adds a product over the first keys to the sum over all."""
    if total is None:
        return part
    total[:, : part.shape[1]] += part
    return total


def _row_blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, int]]:
    """(rows, number of keys that the last of them sees)."""
    for start in range(0, queries, ROWS):
        stop = min(start + ROWS, queries)
        yield slice(start, stop), stop + keys - queries if causal else keys


def _by_key_head(x_BSNH: Tensor, heads: int) -> Tensor:
    """[B, S, N, H] -> [B, K, G, S, H], a view: query head n belongs to key head n // G."""
    return x_BSNH.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)


def _heads_first(x_BSKH: Tensor) -> Tensor:
    """[B * K, S, H] in at least fp32, contiguous: batched products of strided matrices are half as fast."""
    return _widened(x_BSKH).transpose(1, 2).flatten(0, 1).contiguous()


def _rows_first(x_BSNH: Tensor, heads: int) -> Tensor:
    """[B * K, G, S, H] in at least fp32, a new contiguous tensor."""
    wide = torch.promote_types(x_BSNH.dtype, torch.float32)
    return _by_key_head(x_BSNH, heads).flatten(0, 1).to(wide, memory_format=torch.contiguous_format, copy=True)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _groups(bounds: Bounds, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces [B, S, ...] of equally long documents, about TOGETHER tokens of them where all are equal, else one."""
    documents = max(1, TOGETHER // (bounds.uniform or TOGETHER))
    for piece in _batches(bounds, *tensors):
        yield from zip(*(t.split(documents) for t in piece))


def _batches(bounds: Bounds, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """[T, ...] -> pieces [B, S, ...] of equally long documents: one piece when all are, else one per document."""
    if bounds.uniform is not None:
        return [tuple(t.unflatten(0, (-1, bounds.uniform)) for t in tensors)]
    return [tuple(t[None] for t in piece) for piece in zip(*(t.split(bounds.lengths) for t in tensors))]


def _end_to_end(pieces_BS: Sequence[Tensor]) -> Tensor:
    """[B, S, ...] pieces -> [T, ...]; a single one is not copied."""
    flat = [t.flatten(0, 1) for t in pieces_BS]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _flash_fits(query_BSNH: Tensor, key_BSKH: Tensor, causal: bool) -> bool:
    """Whether torch's CPU flash operator computes this block; its causal mask is aligned at the start."""
    lengths = query_BSNH.shape[1], key_BSKH.shape[1]
    assert not causal or lengths[0] <= lengths[1], "a causal block needs a key for every query"
    return query_BSNH.device.type in ("cpu", "meta") and (not causal or lengths[0] == lengths[1])


def _flash_heads(*tensors_BSNH: Tensor) -> list[Tensor]:
    """[B, S, N, H] -> [B, N, S, H], heads padded with zeros to one size, as the operator wants: no product changes."""
    size = max(t.shape[-1] for t in tensors_BSNH)
    padded = (t if t.shape[-1] == size else F.pad(t, (0, size - t.shape[-1])) for t in tensors_BSNH)
    return [t.transpose(1, 2) for t in padded]


def _attention_sdpa(query, key, value, bounds, causal, scale) -> Tensor:
    """Torch's choice of kernel for the device, one call for equal documents."""
    outs = []
    for piece in _batches(bounds, query, key, value):
        q, k, v = (t.transpose(1, 2) for t in piece)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        outs.append(out.transpose(1, 2))
    return _end_to_end(outs)


def attention_reference(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the formula, all scores at once; shapes as in `attention_forward`."""
    scores = _scores(query, key, causal, _scale(query, scale))
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse[..., None]) @ _repeated(value, query)
    return out.transpose(1, 2).to(query.dtype), lse.transpose(1, 2)


def attention_backward_reference(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula of `attention_backward`, all scores at once."""
    g, o, q = (_widened(t).transpose(1, 2) for t in (grad, out, query))
    p = torch.exp(_scores(query, key, causal, scale) - lse.transpose(1, 2)[..., None])
    ds = p * (g @ _repeated(value, query).mT - (g * o).sum(-1, keepdim=True)) * scale
    dq, dk, dv = ds @ _repeated(key, query), ds.mT @ q, p.mT @ g
    dk, dv = (t.unflatten(1, (key.shape[2], -1)).sum(2) for t in (dk, dv))
    return tuple(d.transpose(1, 2).to(t.dtype) for d, t in ((dq, query), (dk, key), (dv, value)))


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """scale * Q KT [B, N, Sq, Sk], -inf where a causal mask hides the key."""
    scores = _widened(query).transpose(1, 2) @ _repeated(key, query).mT * scale
    if not causal:
        return scores
    queries, keys = scores.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    return scores.masked_fill(hidden, -torch.inf)


def _repeated(x_BSKH: Tensor, query_BSNH: Tensor) -> Tensor:
    """[B, N, S, H]: each key head once for every query head of its group."""
    return _widened(x_BSKH).repeat_interleave(query_BSNH.shape[2] // x_BSKH.shape[2], 2).transpose(1, 2)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale
