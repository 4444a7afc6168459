"""Multi-head latent attention: keys and values of all heads are made from one short vector per token (DeepSeek-V2, 2405.04434, 2.1).

Notable:
- The projections to the short vectors are whole on every tensor rank and see this rank's tokens; what travels between ranks is short. The
  projections from them are split by heads.
- A head's query and key have a part without position and a rotated part; the key of the latter is one for all heads.
- In generation the short vectors are the cache. The projections from them are then applied to the query and to the result, which is attention
  with one key head: softmax(q W_ukᵀ c) c, W_uk and W_uv never multiplying what came before.
- Recomputation of "up" keeps short vectors in place of queries, keys and values, and attention itself is not repeated (DeepSeek-V3, 2412.19437,
  3.2.3).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mtmegatron.config.model import ModelConfig
from mtmegatron.layers.attention import Heads, Where
from mtmegatron.layers.build import Build
from mtmegatron.layers.linear import Linear, project
from mtmegatron.layers.norm import Norm
from mtmegatron.ops.attention import attention, attention_cached
from mtmegatron.ops.rope import rope, score_factor
from mtmegatron.parallel.recompute import recomputed


class LatentAttention(Heads):
    """Y = concat_heads(softmax(scale Q Kᵀ) V) W_outᵀ with

        c_q = norm(W_dq x), [q_nope | q_rope] = W_uq c_q (without `query_rank`: = W_q x), Q = [q_nope | R q_rope],
        [c | k_rope] = W_dkv x, c_kv = norm(c), [k_nope | V] = W_ukv c_kv, K = [k_nope | R k_rope],

    R the rotation by the token's position, scale = score_factor / sqrt(nope + rope). Each tensor rank holds N / t heads.
    Shapes: [T', D] -> [T', D]; c_q has `query_rank` channels, c and c_kv `kv_rank`."""

    def __init__(self, model: ModelConfig, layer: int, build: Build, out_std: float):
        sizes = model.latent
        channels = sizes.nope + sizes.rope
        super().__init__(model, layer, build, score_factor(model.rope_scaling) / channels**0.5)
        self.sizes, self.build, self.up_again = sizes, build, "up" in build.recompute

        def part(inputs: int, outputs: int, split: str | None) -> Linear:
            return Linear(inputs, outputs, build, split=split, bias=False, std=model.init_std)

        width, rank = model.width, sizes.query_rank
        self.query_down = part(width, rank, None) if rank else None
        self.kv_down = part(width, sizes.kv_rank + sizes.rope, None)  # after query_down: the two are multiplied as one matrix
        self.query_norm = Norm(model.norm, rank, model.norm_eps, build) if rank else None
        self.kv_norm = Norm(model.norm, sizes.kv_rank, model.norm_eps, build)
        self.query_up = part(rank, model.heads * channels, "columns") if rank else None
        self.query = None if rank else part(width, model.heads * channels, "columns")
        self.kv_up = part(sizes.kv_rank, model.heads * (sizes.nope + sizes.value), "columns")
        self.out = Linear(model.heads * sizes.value, width, build, split="rows", bias=model.bias_attention_out, std=out_std)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        short = self._down(x)
        if where.cache is not None:
            heads = self._cached(*short, where)
        elif not self.up_again:
            heads = self._attended(self._core, *self._up(*short, where), where)
        elif self.again or self.mesh["ulysses"].size > 1:  # where heads are exchanged, attention keeps other tensors than these
            heads = recomputed(self._attend, *short, where)
        else:
            heads = _remade(lambda *qkv: self._core(*qkv, where), lambda: self._up(*short, where))
        return self.out(heads.flatten(1))

    def _down(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(what queries are made from, c, k_rope before the rotation). Shapes: [T', D] -> [T', query_rank] or x itself, [T', kv_rank], [T', rope]."""
        own = [self.sizes.kv_rank, self.sizes.rope]
        if self.query_down is None:
            return x, *project(x, self.kv_down).split(own, dim=1)
        return project(x, self.query_down, self.kv_down).split([self.sizes.query_rank, *own], dim=1)

    def _attend(self, for_query: Tensor, c: Tensor, key_rope: Tensor, where: Where) -> Tensor:
        return self._core(*self._up(for_query, c, key_rope, where), where)

    def _up(self, for_query: Tensor, c: Tensor, key_rope: Tensor, where: Where) -> tuple[Tensor, Tensor, Tensor]:
        """Q [T, N, nope + rope], K [T, N, nope + rope], V [T, N, value] of this rank's heads."""
        return self._queries(for_query, where), *self._keys(self.kv_norm(c), self._turned_key(key_rope, where))

    def _queries(self, for_query: Tensor, where: Where) -> Tensor:
        flat = self.query(for_query) if self.query_up is None else self.query_up(self.query_norm(for_query))
        nope, turned = flat.unflatten(1, (self.heads, -1)).split([self.sizes.nope, self.sizes.rope], dim=-1)
        return torch.cat((nope, self._turn(turned, where)), dim=-1)

    def _keys(self, c_kv: Tensor, key_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: [T', kv_rank], [T, 1, rope] -> K, V."""
        nope, value = self.kv_up(c_kv).unflatten(1, (self.heads, -1)).split([self.sizes.nope, self.sizes.value], dim=-1)
        return torch.cat((nope, key_rope.expand(-1, self.heads, -1)), dim=-1), value

    def _turned_key(self, key_rope: Tensor, where: Where) -> Tensor:
        """Each rank uses it with its own heads, so its gradient is summed over ranks. Shapes: [T', rope] -> [T, 1, rope]."""
        return self._turn(self.build.whole_tokens(key_rope)[:, None], where)

    def _turn(self, heads: Tensor, where: Where) -> Tensor:
        return rope(heads, *where.rotary, self.sizes.interleaved)

    def _cached(self, for_query: Tensor, c: Tensor, key_rope: Tensor, where: Where) -> Tensor:
        """Attention of new tokens to all so far, of each of which [c_kv | R k_rope] is kept; no gradient. -> [T, N, value]."""
        query, key_rope, c_kv = self._queries(for_query, where), self._turned_key(key_rope, where), self.kv_norm(c)
        rows = torch.cat((self.build.whole_tokens(c_kv)[:, None], key_rope), dim=-1)
        lengths = where.bounds.lengths
        documents = [kept for kept, _ in where.cache.extend(self.layer, rows, rows[..., :0], lengths)]  # values are a part of the keys
        if all(n == kept.shape[0] for n, kept in zip(lengths, documents)):  # nothing came before
            return attention(query, *self._keys(c_kv, key_rope), where.bounds, scale=self.scale)
        return self._absorbed(query, documents, lengths)

    def _absorbed(self, query: Tensor, documents: list[Tensor], lengths: Sequence[int]) -> Tensor:
        """q_nope · W_uk c = (q_nope W_uk) · c and sum_i p_i W_uv c_i = W_uv sum_i p_i c_i. Products are at least fp32.

        Shapes: query [T, N, nope + rope], documents [tokens so far, 1, kv_rank + rope] -> [T, N, value]."""
        sizes, wide = self.sizes, torch.promote_types(query.dtype, torch.float32)
        to_key, to_value = self.kv_up.weight.to(wide).unflatten(0, (self.heads, -1)).split([sizes.nope, sizes.value], dim=1)
        nope, turned = query.to(wide).split([sizes.nope, sizes.rope], dim=-1)
        absorbed = torch.cat((torch.einsum("tnh,nhr->tnr", nope, to_key), turned), dim=-1)
        seen = [
            attention_cached(q, kept, kept[..., : sizes.kv_rank], [q.shape[0]], [kept.shape[0]], self.scale)
            for q, kept in zip(absorbed.split(lengths), documents)
        ]
        return torch.einsum("tnr,nhr->tnh", torch.cat(seen), to_value).to(query.dtype)


def _remade(function: Callable[..., Tensor], make: Callable[[], tuple[Tensor, ...]]) -> Tensor:
    """function(*make()), which keeps for backward how to make its inputs in place of the inputs; what else it keeps is not made again.

    Only for a function that keeps its inputs or views of them. `make` must give the same bits again."""
    inputs = make()
    places = {t.untyped_storage()._cdata: place for place, t in enumerate(inputs)}
    made: dict[int, Tensor] = {}
    others: list[Tensor] = []

    def pack(kept: Tensor) -> tuple:
        place = places.get(kept.untyped_storage()._cdata)
        if place is None:
            others.append(kept)
            return (len(others) - 1,)
        return place, kept.shape, kept.stride(), kept.storage_offset()

    def unpack(kept: tuple) -> Tensor:
        place, *view = kept
        if not view:
            return others[place]
        if place not in made:
            with torch.no_grad():
                made.update(enumerate(make()))
        return made.pop(place).as_strided(*view)

    with saved_tensors_hooks(pack, unpack):
        result = function(*inputs)
    return _Keep.apply(result, others)


class _Keep(torch.autograd.Function):
    """Identity that keeps `others` from here to backward, where hooks of the caller see them: those that count, or move to the host."""

    @staticmethod
    def forward(ctx, x: Tensor, others: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*others)
        ctx.others = others
        others.clear()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.others[:] = ctx.saved_tensors
        return grad, None
