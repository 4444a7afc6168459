"""Attention whose keys lie on other ranks: planned as blocks, computed block by block, merged by online softmax.

Notable:
- The tokens a rank holds are pieces: of one chunk and of one document. Between two pieces of a document everything is
  visible (the keys are earlier), the lower triangle (the same piece) or nothing. So a plan is a list of full and square
  causal blocks, whatever the documents.
- Kept for backward are a rank's own queries, keys, values, results and log-sum-exps; visiting keys are fetched again.
- `Ring`: keys and values go round, the next transfer under way while a block is computed (Liu et al. 2023, 2310.01889);
  in backward the sums of their gradients follow one step behind, and are at home after a full round.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mtmegatron.batch import Bounds
from mtmegatron.mesh import Axis, Pending
from mtmegatron.ops.attention import attention_backward, attention_forward


@dataclass(frozen=True)
class Piece:
    """Tokens of one document and chunk: where they begin in the micro-batch, and the rows where a rank holds them."""

    document: int
    start: int
    rows: slice


@dataclass(frozen=True)
class Block:
    """Rows of queries that see rows of keys: all of them, or as a causal square."""

    queries: slice
    keys: slice
    causal: bool

    @property
    def products(self) -> int:
        """Pairs of a query and a key that it sees: the work of the block."""
        queries, keys = (rows.stop - rows.start for rows in (self.queries, self.keys))
        return queries * (queries + 1) // 2 if self.causal else queries * keys


def pieces(bounds: Bounds, runs: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """Runs of tokens (start, stop), held one after another, cut where documents begin."""
    row = 0
    for start, stop in runs:
        document = bisect_right(bounds.starts, start) - 1
        while start < stop:
            end = min(stop, bounds.starts[document + 1])
            yield Piece(document, start, slice(row, row + end - start))
            row, start, document = row + end - start, end, document + 1


def plan(queries: Iterable[Piece], keys: Iterable[Piece], causal: bool) -> list[Block]:
    """The blocks in which these queries see these keys; each visible pair is in exactly one.

    Pieces must be cut at the same tokens in both, so that two are the same or disjoint."""
    documents = defaultdict(list)
    for piece in keys:
        documents[piece.document].append(piece)
    blocks: list[Block] = []
    for query in queries:
        for key in documents.get(query.document, ()):
            if not causal or key.start <= query.start:
                _append(blocks, Block(query.rows, key.rows, causal and key.start == query.start))
    return blocks


def _append(blocks: list[Block], new: Block) -> None:
    """Adds a block, as one with those before it where they make a larger rectangle: few large products are faster."""
    while blocks and (larger := _rectangle(blocks[-1], new)):
        new = larger
        blocks.pop()
    blocks.append(new)


def _rectangle(a: Block, b: Block) -> Block | None:
    if a.causal or b.causal:
        return None
    if a.queries == b.queries and a.keys.stop == b.keys.start:
        return Block(a.queries, slice(a.keys.start, b.keys.stop), False)
    if a.keys == b.keys and a.queries.stop == b.queries.start:
        return Block(slice(a.queries.start, b.queries.stop), a.keys, False)
    return None


class Source(Protocol):
    """Where keys come from. `kv` is [T, K, H + Hv], this rank's keys and values side by side."""

    def visits(self, kv: Tensor) -> Iterator[tuple[list[Block], Tensor]]:
        """The kv of all ranks, in turn or at once, each with the blocks in which this rank's queries see it."""

    def sums(self, kv: Tensor, gradient: Callable[[list[Block], Tensor], Tensor]) -> Tensor:
        """The sum, over all ranks, of their `gradient(blocks, kv)` with respect to the kv of this rank."""


class Ring:
    """Keys and values travel from rank to rank, all the way round. `plans[i]`: the blocks with the keys of rank i."""

    def __init__(self, axis: Axis, plans: list[list[Block]]):
        self.axis, self.plans = axis, plans

    def visits(self, kv: Tensor) -> Iterator[tuple[list[Block], Tensor]]:
        for hop in range(self.axis.size):
            arriving = self.axis.start_shift(kv) if hop + 1 < self.axis.size else None
            yield self.plans[(self.axis.rank - hop) % self.axis.size], kv
            kv = arriving.wait() if arriving else kv

    def sums(self, kv: Tensor, gradient: Callable[[list[Block], Tensor], Tensor]) -> Tensor:
        arriving: Pending | None = None
        for blocks, visiting in self.visits(kv):
            own = gradient(blocks, visiting)
            arriving = self.axis.start_shift(arriving.wait().add_(own) if arriving else own)
        return arriving.wait()


def blockwise_attention(
    query: Tensor, key: Tensor, value: Tensor, source: Source, periods: int = 1, scale: float | None = None
) -> Tensor:
    """Attention of this rank's queries to all keys that `source` brings.

    Blocks merge by l = logaddexp(l1, l2), o = o1 e^(l1-l) + o2 e^(l2-l); that and the sums of gradients are at least
    fp32. `periods`: the plan holds for each of so many equal parts of the tokens, which are computed as one batch.

    Shapes: query [T, N, H], key [T, K, H], value [T, K, Hv]; result [T, N, Hv]."""
    return _Blockwise.apply(query, key, value, source, periods, scale)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, source: Source, periods: int, scale: float | None):
        wide = torch.promote_types(query.dtype, torch.float32)
        queries = query.unflatten(0, (periods, -1))
        out = queries.new_zeros(*queries.shape[:3], value.shape[-1], dtype=wide)
        lse = queries.new_full(queries.shape[:3], -torch.inf, dtype=wide)
        for blocks, kv in source.visits(torch.cat((key, value), -1)):
            keys, values = kv.unflatten(0, (periods, -1)).split((key.shape[-1], value.shape[-1]), -1)
            for block in blocks:
                rows, seen = block.queries, block.keys
                part = attention_forward(queries[:, rows], keys[:, seen], values[:, seen], block.causal, scale)
                _merge(out[:, rows], lse[:, rows], *part)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest = source, periods, scale
        return out.flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        source, periods, scale = ctx.rest
        grads, queries = grad.unflatten(0, (periods, -1)), query.unflatten(0, (periods, -1))
        dquery = torch.zeros_like(queries, dtype=lse.dtype)
        sizes = key.shape[-1], value.shape[-1]

        def gradient(blocks: list[Block], kv: Tensor) -> Tensor:
            keys, values = kv.unflatten(0, (periods, -1)).split(sizes, -1)
            dkv = kv.new_zeros(kv.shape, dtype=lse.dtype)
            dkeys, dvalues = dkv.unflatten(0, (periods, -1)).split(sizes, -1)
            for block in blocks:
                rows, seen = block.queries, block.keys
                grad_rows, query_rows, out_rows, lse_rows = (t[:, rows] for t in (grads, queries, out, lse))
                operands = grad_rows, query_rows, keys[:, seen], values[:, seen], out_rows, lse_rows
                parts = attention_backward(*operands, block.causal, scale)
                for total, part in zip((dquery[:, rows], dkeys[:, seen], dvalues[:, seen]), parts):
                    total.add_(part)
            return dkv

        dkey, dvalue = source.sums(torch.cat((key, value), -1), gradient).split(sizes, -1)
        return dquery.flatten(0, 1).to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds one block's softmax average to that of the blocks before, in place.

    A row that has seen nothing yet has an lse of -inf; every block shows each of its rows a key, so the common one is
    finite and no -inf is subtracted from another.

    Shapes: out and part [B, S, N, H], lse and part_lse [B, S, N]."""
    common = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - common)[..., None]).add_(part * torch.exp(part_lse - common)[..., None])
    lse.copy_(common)
