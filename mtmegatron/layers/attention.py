"""Multi-head and grouped-query attention, heads split over the tensor axis.

Notable: the only layer that looks at sequences. What it needs to know of them comes in one `Where`: document bounds, rotary tables, and in
generation the cache of earlier keys and values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mtmegatron.batch import Bounds
from mtmegatron.config.derived import rotated
from mtmegatron.config.model import ModelConfig
from mtmegatron.layers.build import Build
from mtmegatron.layers.dropout import Noise
from mtmegatron.layers.linear import Linear, project
from mtmegatron.layers.norm import Norm
from mtmegatron.ops.attention import attention, attention_cached
from mtmegatron.ops.attention_dropout import attention_dropout
from mtmegatron.ops.rope import rope, rope_table
from mtmegatron.parallel.canonical import attention as canonical
from mtmegatron.parallel.canonical.rows import wide
from mtmegatron.parallel.context import context_attention
from mtmegatron.parallel.recompute import recomputed
from mtmegatron.placement import GRADIENT_AXES


@dataclass
class _Rows:
    """A tensor that grows along dim 0. Its storage doubles when it is full, so appending copies only what is new."""

    storage: Tensor
    length: int

    def append(self, rows: Tensor) -> None:
        end = self.length + rows.shape[0]
        if end > self.storage.shape[0]:
            larger = rows.new_empty(max(end, 2 * self.storage.shape[0]), *rows.shape[1:])
            larger[: self.length] = self.filled
            self.storage = larger
        self.storage[self.length : end] = rows
        self.length = end

    @property
    def filled(self) -> Tensor:
        return self.storage[: self.length]


@dataclass
class Cache:
    """Keys and values, in this stage's layers, of the sequences being generated: the first documents of a micro-batch.

    Documents after those (tokens that only fill a micro-batch up) are not kept."""

    sequences: int
    entries: dict[int, list[tuple[_Rows, _Rows]]] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence so far."""
        return max((keys.length for entry in self.entries.values() for keys, _ in entry), default=0)

    def extend(self, layer: int, key: Tensor, value: Tensor, lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Adds this step's keys and values; returns for each document all that it has, without a copy.

        Shapes: [T, K, H] -> per document [tokens so far, K, H]."""
        new = list(zip(key.split(lengths), value.split(lengths)))
        kept, others = new[: self.sequences], new[self.sequences :]
        if layer not in self.entries:
            self.entries[layer] = [(_Rows(k, k.shape[0]), _Rows(v, v.shape[0])) for k, v in kept]
        else:
            for (keys, values), (k, v) in zip(self.entries[layer], kept, strict=True):
                keys.append(k)
                values.append(v)
        return [(keys.filled, values.filled) for keys, values in self.entries[layer]] + others

    def keep(self, places: list[int]) -> None:
        """Only the sequences at these places go on, in this order; the memory of the others is freed."""
        self.sequences = len(places)
        self.entries = {layer: [entry[place] for place in places] for layer, entry in self.entries.items()}


@dataclass
class Where:
    """Where the tokens of a micro-batch stand: document bounds of the whole micro-batch, tokens of a sequence, rotary (cos, sin) [T, R/2] or
    None, cache of a generation or None, in training what dropout is drawn from, and outside generation the places of the tokens in the batch [T]."""

    bounds: Bounds
    length: int
    rotary: tuple[Tensor, Tensor] | None = None
    cache: Cache | None = None
    noise: Noise | None = None
    numbers: Tensor | None = None


class Rotary(nn.Module):
    """Table of rotary angles, looked up by position and grown on demand."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.size = rotated(model)
        self.base, self.scaling = model.rope_base, model.rope_scaling
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.table: tuple[Tensor, Tensor] | None = None

    def forward(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [T, R/2] of positions below `end`."""
        if self.table is None or self.table[0].shape[0] < end:
            cos, sin = rope_table(torch.arange(2 * end), self.size, self.base, self.dtype, self.scaling)
            self.table = cos.to(positions.device), sin.to(positions.device)
        return self.table[0].index_select(0, positions), self.table[1].index_select(0, positions)


class Heads(nn.Module):
    """This rank's query heads, and for each of them softmax(scale Q Kᵀ) V; scale is H^-1/2 when None."""

    def __init__(self, model: ModelConfig, layer: int, build: Build, scale: float | None = None):
        super().__init__()
        self.mesh, self.kind, self.exact = build.mesh, build.context_kind, build.exact
        self.layer, self.scale, self.again = layer, scale, "attention" in build.recompute
        self.heads = model.heads // build.tensor.size
        self.dropout, first = model.dropout_attention, build.tensor.rank * self.heads
        self.numbers = range(first, first + self.heads)  # of this rank's heads in the whole

    def _attended(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """function(*inputs), which backward makes again where "attention" is recomputed."""
        return recomputed(function, *inputs) if self.again else function(*inputs)

    def _core(self, query: Tensor, key: Tensor, value: Tensor, where: Where) -> Tensor:
        """All keys are those of the micro-batch itself. Shapes: [T, N, H], [T, K, H], [T, K, Hv] -> [T, N, Hv]."""
        if self.exact:
            return canonical.attention(query, key, value, where.bounds, where.length, self.mesh["context"], self.exact, self.scale)
        if where.noise is not None and self.dropout:
            stream, tokens = where.noise.stream(self.layer, "attention"), where.noise.numbers
            return attention_dropout(query, key, value, where.bounds, stream, tokens, self.numbers, self.dropout, scale=self.scale)
        return context_attention(query, key, value, where.bounds, where.length, mesh=self.mesh, kind=self.kind, scale=self.scale)


class Attention(Heads):
    """Causal attention: Y = concat_heads(softmax(Q Kᵀ / sqrt(H)) V) W_outᵀ.

    Each tensor rank holds N / t query heads and K / t key/value heads; with K < t a key/value head is held by t / K ranks, whose gradients of it
    add up. Shapes: [T', D] -> [T', D]."""

    def __init__(self, model: ModelConfig, layer: int, build: Build, out_std: float):
        super().__init__(model, layer, build)
        self.head_size = model.head_size
        self.kv_heads = model.kv_heads // build.layout.key_value if build.layout.key_value else model.kv_heads // build.tensor.size
        std, bias, width, size = model.init_std, model.bias_qkv, model.width, model.head_size
        self.query = Linear(width, model.heads * size, build, split="columns", bias=bias, std=std)
        self.key = Linear(width, model.kv_heads * size, build, split="columns", bias=bias, std=std, axis="key_value")
        self.value = Linear(width, model.kv_heads * size, build, split="columns", bias=bias, std=std, axis="key_value")
        self.out = Linear(model.heads * size, width, build, split="rows", bias=model.bias_attention_out, std=out_std)
        self.query_norm = self.key_norm = None
        if model.qk_norm:
            summed = GRADIENT_AXES + ("tensor",) if build.tensor.size > 1 else GRADIENT_AXES  # each rank normalises its own heads
            self.query_norm, self.key_norm = (Norm("rmsnorm", size, model.norm_eps, build, summed) for _ in range(2))

    def forward(self, x: Tensor, where: Where) -> Tensor:
        heads = project(x, self.query, self.key, self.value).unflatten(1, (-1, self.head_size))
        turned, value = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.query_norm is not None:
            query, key = turned.split([self.heads, self.kv_heads], dim=1)
            turned = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        if where.rotary is not None:
            turned = wide(rope, turned, *where.rotary) if self.exact else rope(turned, *where.rotary)
        query, key = turned.split([self.heads, self.kv_heads], dim=1)
        return self.out(self._attended(self._attend, query, key, value, where).flatten(1))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, where: Where) -> Tensor:
        if where.cache is None:
            return self._core(query, key, value, where)
        lengths = where.bounds.lengths
        documents = where.cache.extend(self.layer, key, value, lengths)
        if all(n == k.shape[0] for n, (k, _) in zip(lengths, documents)):  # nothing came before
            return attention(query, key, value, where.bounds)
        # one by one: end to end, all keys would have to be copied at every step
        parts = zip(query.split(lengths), documents)
        return torch.cat([attention_cached(q, k, v, [q.shape[0]], [k.shape[0]]) for q, (k, v) in parts])
