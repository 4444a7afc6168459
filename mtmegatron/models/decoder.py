"""A decoder-only transformer, or the part of it that one pipeline stage holds.

Notable: a stage is the same class with fewer layers. `embedding` exists on the first stage, and on the last when it is also the output
projection; names of parameters are global (`layers.7.attention.query.weight`), whatever the stage.

Shapes: T tokens of the micro-batch, T' = T / tensor under sequence parallel; hidden states are [T', D].
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mtmegatron.batch import Batch
from mtmegatron.config.schema import Config
from mtmegatron.layers.attention import Attention, Cache, Rotary, Where
from mtmegatron.layers.build import Build
from mtmegatron.layers.embedding import PositionEmbedding, TokenEmbedding
from mtmegatron.layers.mlp import MLP
from mtmegatron.layers.norm import Norm
from mtmegatron.ops.cross_entropy import linear_cross_entropy
from mtmegatron.parallel.gradient import accumulates
from mtmegatron.placement import Init


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Shapes: [T', D] -> [T', D]."""

    def __init__(self, config: Config, layer: int, build: Build):
        super().__init__()
        m = config.model
        out_std = m.init_std / (2 * m.layers) ** 0.5 if m.init_scaled else m.init_std
        self.attention_norm = Norm(m.norm, m.width, m.norm_eps, build)
        self.attention = Attention(m, layer, build, out_std)
        self.mlp_norm = Norm(m.norm, m.width, m.norm_eps, build)
        self.mlp = MLP(m, build, out_std)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        x = x + self.attention(self.attention_norm(x), where)
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """The output projection of an untied model: W of global shape [V, D], split by rows over `tensor`."""

    def __init__(self, vocab: int, width: int, build: Build, std: float):
        super().__init__()
        self.weight = build.parameter((vocab, width), Init(std), True, ((0, "tensor"),))


class Decoder(nn.Module):
    """Stage of a decoder: blocks `layers`, the embedding when `first`, the final norm and the head when `last`.

    `unit_done(name)`, when set, is called in backward as soon as all gradients of a block or of the head are there."""

    def __init__(self, config: Config, build: Build, layers: range, first: bool, last: bool):
        super().__init__()
        m = config.model
        self.config, self.build, self.first, self.last = config, build, first, last
        self.unit_done: Callable[[str], None] | None = None
        decay, std = config.optimizer.decay_embeddings, m.init_std
        if first or (last and m.tied):
            self.embedding = TokenEmbedding(m.vocab, m.width, build, std=std, decay=decay, tied=m.tied)
        if first and m.positions == "learned":
            self.positions = PositionEmbedding(m.max_positions, m.width, build, std=std, decay=decay)
        self.rotary = Rotary(m, build.dtype) if m.positions == "rotary" else None
        self.layers = nn.ModuleDict({str(i): Block(config, i, build) for i in layers})
        if last:
            self.norm = Norm(m.norm, m.width, m.norm_eps, build)
        if last and not m.tied:
            self.head = Head(m.vocab, m.width, build, std)

    def units(self) -> dict[str, list[nn.Module]]:
        """Modules whose gradients are complete together, in the order of the forward pass."""
        start = [self.embedding] if hasattr(self, "embedding") else []
        start += [self.positions] if hasattr(self, "positions") else []
        end = [self.norm] if self.last else []
        end += [self.head] if hasattr(self, "head") else []
        return {"embedding": start} | {name: [block] for name, block in self.layers.items()} | {"head": end}

    def forward(self, x: Tensor | None, batch: Batch, cache: Cache | None = None) -> Tensor:
        """Hidden states after this stage's blocks; `x` are those of the stage before (None on the first)."""
        where = Where(batch.bounds, self._rotary(batch, cache), cache)
        if self.first:
            x = self._embed(batch)
        for name, block in self.layers.items():
            x = block(self._mark(x, name), where)
        return x

    def loss(self, hidden: Tensor, batch: Batch, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """(scale x summed loss, for backward; summed cross entropy; summed z term) over the valid tokens of the micro-batch."""
        train = self.config.train
        hidden = self.build.whole_tokens(self.norm(self._mark(hidden, "head")))
        weight = self.output_weight
        return linear_cross_entropy(
            hidden, weight, batch.labels, scale, self._accumulate if accumulates([weight]) else None, axis=self.build.tensor,
            start=weight.placement.offset_and_size(self.build.layout, self.build.mesh.rank)[0][0], vocab=self.config.model.vocab,
            smoothing=train.label_smoothing, z_loss=train.z_loss, matmul=self.build.gemm.product,
        )  # fmt: skip

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of all tokens over the whole vocabulary, on every tensor rank. Shapes: [T', D] -> [T, V]."""
        axis, weight = self.build.tensor, self.output_weight
        hidden = self.build.whole_tokens(self.norm(hidden))
        local = self.build.gemm.forward(hidden, weight)
        if axis.size == 1:
            return local
        most = -(-self.config.model.vocab // axis.size)
        parts = axis.all_gather(nn.functional.pad(local, (0, most - local.shape[1]), value=-torch.inf).t().contiguous())
        sizes = [weight.placement.offset_and_size(self.build.layout, r)[1][0] for r in axis.ranks]
        return torch.cat([part[:n] for part, n in zip(parts.split(most), sizes)]).t()

    @property
    def output_weight(self) -> nn.Parameter:
        """This rank's rows of the output projection: the head, or the embedding table of a tied model."""
        return self.head.weight if hasattr(self, "head") else self.embedding.weight

    def _accumulate(self, dlogits: Tensor, hidden: Tensor) -> None:
        self.build.gemm.weight_gradient(self.output_weight.grad_sum, dlogits, hidden)

    def _embed(self, batch: Batch) -> Tensor:
        x = self.embedding(batch.tokens)
        if hasattr(self, "positions"):
            axis, positions = self.build.tensor, batch.positions
            own = positions.chunk(axis.size)[axis.rank] if self.build.layout.sequence else positions
            x = x + self.positions(own)
        return x

    def _rotary(self, batch: Batch, cache: Cache | None) -> tuple[Tensor, Tensor] | None:
        if self.rotary is None or not self.layers:
            return None
        return self.rotary(batch.positions, max(batch.bounds.lengths) + (cache.longest if cache else 0))

    def _mark(self, x: Tensor, unit: str) -> Tensor:
        if self.unit_done is None or not x.requires_grad:
            return x
        return _Mark.apply(x, self.unit_done, unit)


class _Mark(torch.autograd.Function):
    """Identity that tells in backward that everything after it has been done."""

    @staticmethod
    def forward(ctx, x, tell, unit):
        ctx.tell, ctx.unit = tell, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.tell(ctx.unit)
        return dy, None, None
