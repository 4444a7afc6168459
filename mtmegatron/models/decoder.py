"""A decoder-only transformer, or the part of it that one pipeline stage holds.

Notable: a stage is the same class with fewer layers. `embedding` exists on the first stage, and on the last when it is also the output
projection; names of parameters are global (`layers.7.attention.query.weight`), whatever the stage.

Shapes: T tokens of the micro-batch, T' = T / tensor under sequence parallel; hidden states are [T', D].
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from mtmegatron.batch import Batch
from mtmegatron.config.schema import Config
from mtmegatron.layers.attention import Attention, Cache, Rotary, Where
from mtmegatron.layers.build import Build
from mtmegatron.layers.dropout import Noise
from mtmegatron.layers.embedding import PositionEmbedding, TokenEmbedding
from mtmegatron.layers.mlp import MLP
from mtmegatron.layers.norm import Norm
from mtmegatron.ops.cross_entropy import linear_cross_entropy
from mtmegatron.parallel.gradient import accumulates
from mtmegatron.parallel.recompute import recomputed
from mtmegatron.placement import Init


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Shapes: [T', D] -> [T', D]."""

    def __init__(self, config: Config, layer: int, build: Build):
        super().__init__()
        m = config.model
        out_std = m.init_std / (2 * m.layers) ** 0.5 if m.init_scaled else m.init_std
        self.layer, self.build, self.dropout = layer, build, m.dropout_residual
        self.attention_norm = Norm(m.norm, m.width, m.norm_eps, build)
        self.attention = Attention(m, layer, build, out_std)
        self.mlp_norm = Norm(m.norm, m.width, m.norm_eps, build)
        self.mlp = MLP(m, build, out_std)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        attended = self._dropped(self.attention(self.attention_norm(x), where), where, "attention out")
        x, normed = self.mlp_norm.after(x, attended)
        return x + self._dropped(self.mlp(normed), where, "mlp out")

    def _dropped(self, x: Tensor, where: Where, site: str) -> Tensor:
        return x if where.noise is None else where.noise.drop(x, self.layer, site, self.dropout, self.build)


class Head(nn.Module):
    """The output projection of an untied model: W of global shape [V, D], split by rows over `tensor`."""

    def __init__(self, vocab: int, width: int, build: Build, std: float):
        super().__init__()
        self.weight = build.parameter((vocab, width), Init(std), True, ((0, "tensor"),))


class Hooks(Protocol):
    """What is told before and after each unit (embedding, each block, head), forward and backward."""

    def before_forward(self, unit: str) -> None: ...

    def after_forward(self, unit: str) -> None: ...

    def before_backward(self, unit: str) -> None: ...

    def after_backward(self, unit: str) -> None: ...


class Decoder(nn.Module):
    """Stage of a decoder: blocks `layers`, the embedding when `first`, the final norm and the head when `last`.

    `embedding`: the first stage's, when it lies on this rank too; `two_stages`: a tied table is on two ranks."""

    def __init__(
        self, config: Config, build: Build, layers: range, first: bool, last: bool, *, embedding: TokenEmbedding | None = None,
        two_stages: bool = False,
    ):  # fmt: skip
        super().__init__()
        m = config.model
        self.config, self.build, self.first, self.last = config, build, first, last
        self.hooks: Hooks | None = None
        decay, std = config.optimizer.decay_embeddings, m.init_std
        if first or (last and m.tied):
            self.embedding = embedding or TokenEmbedding(m.vocab, m.width, build, std=std, decay=decay, two_stages=two_stages)
        if first and m.positions == "learned":
            self.positions = PositionEmbedding(m.max_positions, m.width, build, std=std, decay=decay)
        self.rotary = Rotary(m, build.dtype) if m.positions == "rotary" else None
        self.layers = nn.ModuleDict({str(i): Block(config, i, build) for i in layers})
        if last:
            self.norm = Norm(m.norm, m.width, m.norm_eps, build)
        if last and not m.tied:
            self.head = Head(m.vocab, m.width, build, std)

    def units(self) -> dict[str, list[nn.Module]]:
        """Modules that are used together, in the order of the forward pass. A tied table is in the first and in the last."""
        found: dict[str, list[nn.Module]] = {}
        if self.first:
            found["embedding"] = [self.embedding] + ([self.positions] if hasattr(self, "positions") else [])
        found |= {name: [block] for name, block in self.layers.items()}
        if self.last:
            found["head"] = [self.norm, self.head if hasattr(self, "head") else self.embedding]
        return found

    def forward(self, x: Tensor | None, batch: Batch, cache: Cache | None = None, step: int | None = None) -> Tensor:
        """Hidden states after this stage's blocks; `x` are those of the stage before (None on the first).

        `step`: of training, for dropout; None: no dropout."""
        where = Where(batch.bounds, self.config.data.sequence, self._rotary(batch, cache), cache, self._noise(batch, step))
        if self.first:
            x = self._run("embedding", lambda _: self._embed(batch, where), None)
        for number, (name, block) in enumerate(self.layers.items()):
            run = partial(recomputed, block) if self._again(number) else block
            x = self._run(name, lambda x: run(x, where), x)
        return x

    def _again(self, number: int) -> bool:
        """Whether a block, by its number in this chunk, is computed again in backward as a whole."""
        r = self.config.recompute
        return r.mode == "full" and number % r.every == 0 and (r.first is None or number < r.first)

    def loss(self, hidden: Tensor, batch: Batch, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """(scale x summed loss, for backward; summed cross entropy; summed z term) over the valid tokens of the micro-batch."""
        sums = []

        def head(hidden: Tensor) -> Tensor:
            loss, *rest = self._head(hidden, batch, scale)
            sums.extend(rest)
            return loss

        return self._run("head", head, hidden), *sums

    def _head(self, hidden: Tensor, batch: Batch, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        train, weight = self.config.train, self.output_weight
        return linear_cross_entropy(
            self.build.whole_tokens(self.norm(hidden)), weight, batch.labels, scale, self._accumulate if accumulates([weight]) else None,
            axis=self.build.tensor, start=weight.placement.offset_and_size(self.build.layout, self.build.mesh.rank)[0][0],
            vocab=self.config.model.vocab, smoothing=train.label_smoothing, z_loss=train.z_loss, matmul=self.build.gemm.product,
        )  # fmt: skip

    def _run(self, unit: str, function: Callable[[Tensor | None], Tensor], x: Tensor | None) -> Tensor:
        """Runs a unit and tells the hooks before and after it, forward and backward."""
        hooks = self.hooks
        if hooks is None:
            return function(x)
        hooks.before_forward(unit)
        y = function(_mark(x, hooks.after_backward, unit))
        hooks.after_forward(unit)
        return _mark(y, hooks.before_backward, unit)

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

    def _noise(self, batch: Batch, step: int | None) -> Noise | None:
        m = self.config.model
        if step is None or not (m.dropout_embedding or m.dropout_attention or m.dropout_residual):
            return None
        return Noise(self.config.train.seed, step, batch.numbers)

    def _embed(self, batch: Batch, where: Where) -> Tensor:
        x = self.embedding(batch.tokens)
        if hasattr(self, "positions"):
            axis, positions = self.build.tensor, batch.positions
            own = positions.chunk(axis.size)[axis.rank] if self.build.layout.sequence else positions
            x = x + self.positions(own)
        return x if where.noise is None else where.noise.drop(x, -1, "embedding", self.config.model.dropout_embedding, self.build)

    def _rotary(self, batch: Batch, cache: Cache | None) -> tuple[Tensor, Tensor] | None:
        if self.rotary is None or not self.layers:
            return None
        return self.rotary(batch.positions, max(batch.bounds.lengths) + (cache.longest if cache else 0))


def _mark(x: Tensor | None, tell: Callable[[str], None], unit: str) -> Tensor | None:
    """x, and `tell(unit)` when backward comes by here: everything after x is done then, and nothing before it."""
    return x if x is None or not x.requires_grad else _Mark.apply(x, tell, unit)


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
