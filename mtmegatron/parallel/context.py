"""Context parallel: the tokens of each sequence are cut over ranks, and attention still sees whole documents.

Notable:
- A sequence is cut in 2c chunks and rank i holds chunks i and 2c-1-i (zigzag): under a causal mask all ranks have the
  same work. Labels and positions are cut like tokens, after the labels have been shifted, so nothing else in the model
  needs to know.
- "allgather": keys and values of all ranks, gathered anew in backward (Dubey et al. 2024, 2407.21783, 3.3.2).
  "ring": they go round (`parallel/ring.py`). "ulysses": an all-to-all exchanges tokens for heads, so each rank attends
  over whole sequences with some of the heads (Jacobs et al. 2023, 2309.14509). "ring-ulysses": heads are exchanged
  among the inner ranks, and keys go round the outer ones (Fang and Zhao 2024, 2405.07719).
- What the inner ranks hold together is again a zigzag, of fewer, longer chunks: with and without exchange a ring is the
  same code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

import torch
from torch import Tensor

from mtmegatron.batch import Batch, Bounds
from mtmegatron.errors import UserError
from mtmegatron.mesh import Axis, Mesh
from mtmegatron.ops.attention import attention
from mtmegatron.parallel.ring import Block, Ring, blockwise_attention, pieces, plan

Kind = Literal["allgather", "ring", "ulysses", "ring-ulysses"]


def valid_lengths(length: int, degree: int) -> list[int]:
    """The length itself if it can be cut in 2 * degree equal chunks, else the nearest that can, below and above."""
    step = 2 * degree if degree > 1 else 1
    below = length // step * step
    return [length] if below == length else [n for n in (below, below + step) if n > 0]


@dataclass(frozen=True)
class ContextSplit:
    """Which tokens of a micro-batch, some sequences of equal length end to end, rank `rank` of `degree` holds.

    Chunks rank and 2 * degree - 1 - rank of the 2 * degree chunks of each sequence, sequence by sequence. Raises
    UserError where 2 * degree does not divide the length."""

    degree: int
    rank: int

    def runs(self, sequences: int, length: int) -> list[tuple[int, int]]:
        """(first, end) of each chunk, as numbers of tokens in the micro-batch, in the order in which they are held."""
        if length not in (valid := valid_lengths(length, self.degree)):
            raise UserError(
                f"a sequence of {length} tokens cannot be cut in 2 x {self.degree} equal chunks for context parallel: "
                f"use a length of {' or '.join(map(str, valid))}, or another context degree"
            )
        if self.degree == 1:
            return [(sequence * length, (sequence + 1) * length) for sequence in range(sequences)]
        size = length // (2 * self.degree)
        chunks = self.rank, 2 * self.degree - 1 - self.rank
        starts = [sequence * length + chunk * size for sequence in range(sequences) for chunk in chunks]
        return [(start, start + size) for start in starts]

    def indices(self, sequences: int, length: int) -> torch.LongTensor:
        """Numbers, in the micro-batch, of the tokens held. Shapes: [sequences * length / degree]."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.runs(sequences, length)])

    def select(self, batch: Batch, sequences: int) -> Batch:
        """This rank's part of all that is one a token; the bounds stay those of the whole micro-batch."""
        if self.degree == 1:
            return batch
        held = self.indices(sequences, batch.bounds.total // sequences).to(batch.tokens.device)
        names = ("tokens", "labels", "positions", "numbers", "ahead_tokens", "ahead_labels")
        parts = {name: whole[..., held] for name in names if (whole := getattr(batch, name)) is not None}
        return replace(batch, **parts)


def context_attention(
    query_TNH: Tensor, key_TKH: Tensor, value_TKH: Tensor, bounds: Bounds, length: int, *,
    mesh: Mesh, kind: Kind, causal: bool = True, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale * Q KT + mask) V within each document, for the tokens of this rank of `mesh["context"]`.

    Tokens are in the order of `ContextSplit`; `bounds` are those of the whole micro-batch, B sequences of `length` = S
    tokens; scale is H^-1/2 when None. Kinds with "ulysses" exchange heads over `mesh["ulysses"]`, whose size divides N;
    kinds with "ring" send keys round `mesh["ring"]`; an axis that the kind does not name has size 1.

    Shapes: query [T, N, H], key [T, K, H], value [T, K, Hv], T = B * S / context; result [T, N, Hv]."""
    axis = mesh["context"]
    if axis.size == 1:
        return attention(query_TNH, key_TKH, value_TKH, bounds, causal, scale)
    assert bounds.total == len(query_TNH) * axis.size, "bounds must cover the micro-batch"
    assert bounds.total % length == 0, "a micro-batch is whole sequences"
    if kind == "allgather":
        source, periods = _gathered(axis, bounds, length, causal)
        return blockwise_attention(query_TNH, key_TKH, value_TKH, source, periods, scale)
    inner, outer, sequences = mesh["ulysses"], mesh["ring"], bounds.total // length
    assert (inner.size > 1, outer.size > 1) == ("ulysses" in kind, "ring" in kind), f"{kind} on {inner} and {outer}"
    query, key, value = _tokens_for_heads(query_TNH, key_TKH, value_TKH, inner, sequences)
    if outer.size == 1:
        out = attention(query, key, value, bounds, causal, scale)
    else:
        source, periods = _ring(outer, bounds, length, causal)
        out = blockwise_attention(query, key, value, source, periods, scale)
    return _heads_for_tokens(out, inner, sequences)


def _period(bounds: Bounds, length: int) -> tuple[Bounds, int]:
    """The bounds of one sequence and how often they repeat, if documents are equal and end with it; else all, once."""
    uniform = bounds.uniform
    if uniform is None or length % uniform:
        return bounds, 1
    return Bounds.equal(length // uniform, uniform), bounds.total // length


def _ring(axis: Axis, bounds: Bounds, length: int, causal: bool) -> tuple[Ring, int]:
    bounds, periods = _period(bounds, length)
    runs = [ContextSplit(axis.size, rank).runs(bounds.total // length, length) for rank in range(axis.size)]
    held = [list(pieces(bounds, own)) for own in runs]
    return Ring(axis, [plan(held[axis.rank], keys, causal) for keys in held]), periods


def _gathered(axis: Axis, bounds: Bounds, length: int, causal: bool) -> tuple["_Gathered", int]:
    sequences = bounds.total // length
    bounds, periods = _period(bounds, length)
    own = pieces(bounds, ContextSplit(axis.size, axis.rank).runs(bounds.total // length, length))
    size = length // (2 * axis.size)
    whole = pieces(bounds, [(start, start + size) for start in range(0, bounds.total, size)])
    return _Gathered(axis, plan(own, whole, causal), sequences), periods


@dataclass(frozen=True)
class _Gathered:
    """Keys and values of all ranks at once, in the order of the sequences: the past of a query is one stretch."""

    axis: Axis
    plan: list[Block]
    sequences: int

    def visits(self, kv: Tensor) -> Iterator[tuple[list[Block], Tensor]]:
        yield self.plan, sequence_order(self.axis.all_gather(kv), self.axis.size, self.sequences)

    def sums(self, kv: Tensor, gradient: Callable[[list[Block], Tensor], Tensor]) -> Tensor:
        ((blocks, whole),) = self.visits(kv)
        return self.axis.reduce_scatter(rank_order(gradient(blocks, whole), self.axis.size, self.sequences))


def sequence_order(x: Tensor, degree: int, sequences: int) -> Tensor:
    """What the ranks of a zigzag hold, rank after rank along dim 0, as whole sequences."""
    first, second = x.unflatten(0, (degree, sequences, 2, -1)).transpose(0, 1).unbind(2)  # [B, degree, chunk, ..]
    return torch.cat((first, second.flip(1)), 1).flatten(0, 2)


def rank_order(x: Tensor, degree: int, sequences: int) -> Tensor:
    """The inverse of `sequence_order`."""
    first, second = x.unflatten(0, (sequences, 2, degree, -1)).unbind(1)
    return torch.stack((first, second.flip(1)), 2).transpose(0, 1).flatten(0, 3)


def _tokens_for_heads(query: Tensor, key: Tensor, value: Tensor, axis: Axis, sequences: int) -> list[Tensor]:
    """This rank's part of the heads, of all tokens that the u ranks of `axis` hold, in the order of the sequences.

    One exchange for the three. Key heads that u does not divide are repeated until it does; their gradients add up.
    Shapes: [T, N, H], [T, K, H], [T, K, Hv] -> [T * u, N / u, ..], [T * u, lcm(K, u) / u, ..] twice."""
    u, heads = axis.size, key.shape[1]
    if u == 1:
        return [query, key, value]
    assert query.shape[1] % u == 0, f"{u} ranks cannot share {query.shape[1]} query heads"
    if heads % u:
        key, value = (t.repeat_interleave(lcm(heads, u) // heads, 1) for t in (key, value))
    parts = [t.unflatten(1, (u, -1)).transpose(0, 1) for t in (query, key, value)]  # [u, T, heads / u, H]
    exchanged = _AllToAll.apply(torch.cat([t.flatten(2) for t in parts], 2).flatten(0, 1), axis)
    received = sequence_order(exchanged, u, sequences).split([t.shape[2] * t.shape[3] for t in parts], 1)
    return [r.unflatten(1, t.shape[2:]) for r, t in zip(received, parts)]


def _heads_for_tokens(out: Tensor, axis: Axis, sequences: int) -> Tensor:
    """This rank's tokens again, with all heads. Shapes: [T * u, N / u, H] -> [T, N, H]."""
    if axis.size == 1:
        return out
    received = _AllToAll.apply(rank_order(out, axis.size, sequences), axis)
    return received.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Part i along dim 0 to rank i; the gradient takes the same way, which leads back."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_to_all(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_to_all(grad), None
