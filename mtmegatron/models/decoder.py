"""A decoder-only transformer, or the part of it that one pipeline stage holds.

Notable: a stage is the same class with fewer layers. `embedding` exists on the first stage, and on the last when it is also the output
projection or multi-token prediction looks tokens up; names of parameters are global (`layers.7.attention.query.weight`), whatever the stage.

Shapes: T tokens of the micro-batch, T' = T / tensor under sequence parallel; hidden states are [T', D]. Their type, that of the sums x + ..., is
`Decoder.stream`: fp32 beside 16-bit weights where `train.residual` says so. What reads them is a norm, which gives the type of the weights.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from mtmegatron.batch import Batch
from mtmegatron.config.model import ModelConfig
from mtmegatron.config.schema import Config
from mtmegatron.layers.attention import Attention, Cache, Rotary, Where
from mtmegatron.layers.build import Build
from mtmegatron.layers.dropout import Noise
from mtmegatron.layers.embedding import PositionEmbedding, TokenEmbedding
from mtmegatron.layers.latent import LatentAttention
from mtmegatron.layers.mlp import MLP
from mtmegatron.layers.moe import MoE
from mtmegatron.layers.norm import Norm
from mtmegatron.models.prediction import Depth
from mtmegatron.models.size import expert_blocks
from mtmegatron.ops.cross_entropy import linear_cross_entropy
from mtmegatron.parallel.canonical import head as canonical
from mtmegatron.parallel.canonical.linear import Cut
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
        self.attention = (LatentAttention if m.latent else Attention)(m, layer, build, out_std)
        self.mlp_norm = Norm(m.norm, m.width, m.norm_eps, build)
        experts = expert_blocks(m)[min(layer, m.layers - 1)]  # those of multi-token prediction are like the last
        self.mlp = MoE(config, layer, build, out_std) if experts else MLP(m, build, out_std)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        attended = self._dropped(self.attention(self.attention_norm(x), where), where, "attention out")
        x, normed = self.mlp_norm.after(x, attended)
        return x + self._dropped(self._feed_forward(normed, where), where, "mlp out")

    def _feed_forward(self, x: Tensor, where: Where) -> Tensor:
        return self.mlp(x, where) if isinstance(self.mlp, MoE) else self.mlp(x)

    def _dropped(self, x: Tensor, where: Where, site: str) -> Tensor:
        return x if where.noise is None else where.noise.drop(x, self.layer, site, self.dropout, self.build)


class Head(nn.Module):
    """The output projection of an untied model: W of global shape [V, D], split by rows over `tensor`."""

    forward_only = True  # `linear_cross_entropy` makes its gradients in forward

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
    """Stage of a decoder: blocks `layers`, the embedding when `first`; the depths of multi-token prediction, the final norm and the head when `last`.

    `embedding`: the first stage's, when it lies on this rank too; `two_stages`: the table is on two ranks."""

    def __init__(
        self, config: Config, build: Build, layers: range, first: bool, last: bool, *, embedding: TokenEmbedding | None = None,
        two_stages: bool = False,
    ):  # fmt: skip
        super().__init__()
        m = config.model
        self.config, self.build, self.first, self.last = config, build, first, last
        self.hooks: Hooks | None = None
        decay, std = config.optimizer.decay_embeddings, m.init_std
        if first or (last and table_at_both_ends(m)):
            self.embedding = embedding or TokenEmbedding(m.vocab, m.width, build, std=std, decay=decay, two_stages=two_stages)
        if first and m.positions == "learned":
            self.positions = PositionEmbedding(m.max_positions, m.width, build, std=std, decay=decay)
        self.rotary = Rotary(m, build.dtype) if m.positions == "rotary" else None
        self.layers = nn.ModuleDict({str(i): Block(config, i, build) for i in layers})
        depths = range(1, m.prediction.depth + 1) if last and m.prediction else ()
        self.prediction = nn.ModuleDict({str(k): Depth(m, Block(config, m.layers + k - 1, build), build) for k in depths})
        if last:
            self.norm = Norm(m.norm, m.width, m.norm_eps, build)
        if last and not m.tied:
            self.head = Head(m.vocab, m.width, build, std)

    def units(self) -> dict[str, list[nn.Module]]:
        """Modules that are used together, in the order of the forward pass. A tied table is in the first and in the last, and one that looks up
        tokens for multi-token prediction is in each of its depths."""
        found: dict[str, list[nn.Module]] = {}
        if self.first:
            found["embedding"] = [self.embedding] + ([self.positions] if hasattr(self, "positions") else [])
        found |= {name: [block] for name, block in self.layers.items()}
        found |= {f"prediction.{k}": [*depth.chain, self.embedding] for k, depth in self.prediction.items()}
        if self.last:
            found["head"] = [*self._norms, self.head if hasattr(self, "head") else self.embedding]
        return found

    def forward(self, x: Tensor | None, batch: Batch, cache: Cache | None = None, step: int | None = None) -> Tensor:
        """Hidden states after this stage's blocks; `x` are those of the stage before (None on the first).

        `step`: of training, for dropout; None: no dropout."""
        where = self._where(batch, cache, step)
        if self.first:
            x = self._run("embedding", lambda _: self._embed(batch, where), None)
        for number, (name, block) in enumerate(self.layers.items()):
            x = self._run(name, self._kept(number, partial(block, where=where)), x)
        return x

    def _kept(self, number: int, block: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A block, by its number in this chunk, that keeps for backward what `recompute` says, and where."""
        block = partial(recomputed, block) if self._again(number) else block
        return block if self.build.offload is None else partial(self.build.offload.call, block, number == 0)

    def _again(self, number: int) -> bool:
        """Whether a block, by its number in this chunk, is computed again in backward as a whole."""
        r = self.config.recompute
        return r.mode == "full" and number % r.every == 0 and (r.first is None or number < r.first)

    def loss(self, hidden: Tensor, batch: Batch, scale: float, ahead: Sequence[float] = (), step: int | None = None) -> tuple[Tensor, ...]:
        """(scale x summed loss, for backward; summed cross entropy; summed z term) over the valid tokens of the micro-batch.

        `ahead`: the factors on the losses of the depths of multi-token prediction: these losses are in the first number, too, and the summed cross
        entropy of each depth comes last. Without them the depths are not run. `step` is that of the forward."""
        states = [hidden, *(self._chain(hidden, batch, step) if ahead else ())]
        labels = [batch.labels, *(batch.ahead_labels if ahead else ())]
        sums: list[Tensor] = []

        def head(x: Tensor) -> Tensor:
            parts = x.unbind() if ahead else (x,)
            found = [self._head(norm(part), *rest) for norm, part, *rest in zip(self._norms, parts, labels, (scale, *ahead))]
            losses, ce, z = zip(*found)
            sums.extend((ce[0], z[0], *ce[1:]))
            return sum(losses)

        return self._run("head", head, torch.stack(states) if ahead else hidden), *sums

    def _chain(self, hidden: Tensor, batch: Batch, step: int | None) -> Iterator[Tensor]:
        """h^1, h^2, .. of multi-token prediction."""
        where = self._where(batch, None, step)
        for number, (k, depth) in enumerate(self.prediction.items(), len(self.layers)):
            hidden = self._run(f"prediction.{k}", partial(self._further, number, depth, batch.ahead_tokens[int(k) - 1], where), hidden)
            yield hidden

    def _further(self, number: int, depth: Depth, tokens: Tensor, where: Where, hidden: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        if where.noise is not None:
            embedded = where.noise.drop(embedded, depth.block.layer, "embedding", self.config.model.dropout_embedding, self.build)
        return self._kept(number, partial(depth, where=where))(hidden, embedded)  # the table is read once: backward has not gathered it

    def _head(self, normed: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        train, weight = self.config.train, self.output_weight
        if self.build.exact:
            return self._canonical_head(normed, labels, scale)
        return linear_cross_entropy(
            self.build.whole_tokens(normed), weight, labels, scale, self._accumulate if weight.requires_grad and accumulates([weight]) else None,
            axis=self.build.tensor, start=weight.placement.offset_and_size(self.build.layout, self.build.mesh.rank)[0][0],
            vocab=self.config.model.vocab, smoothing=train.label_smoothing, z_loss=train.z_loss, matmul=self.build.gemm.product,
        )  # fmt: skip

    def _canonical_head(self, normed: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        build, train = self.build, self.config.train
        cut = Cut.of(self.output_weight, build.exact, build.layout, build.mesh.rank)
        start = self.output_weight.placement.offset_and_size(build.layout, build.mesh.rank)[0][0]
        loss = canonical.Loss(build.tensor, build.exact, build.layout.sequence, start, self.config.model.vocab, train.label_smoothing, train.z_loss)
        return canonical.linear_cross_entropy(normed, cut, labels, scale, loss)

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
    def stream(self) -> torch.dtype:
        """What hidden states between blocks, and stages, are kept in."""
        dtype = self.build.dtype
        return torch.promote_types(dtype, torch.float32) if self.config.train.residual == "fp32" else dtype

    @property
    def output_weight(self) -> nn.Parameter:
        """This rank's rows of the output projection: the head, or the embedding table of a tied model."""
        return self.head.weight if hasattr(self, "head") else self.embedding.weight

    def _accumulate(self, dlogits: Tensor, hidden: Tensor) -> None:
        self.build.gemm.weight_gradient(self.output_weight.grad_sum, dlogits, hidden)

    @property
    def _norms(self) -> list[Norm]:
        """The norms before the head: the model's and that of each depth of multi-token prediction."""
        return [self.norm, *(depth.norm for depth in self.prediction.values())]

    def _where(self, batch: Batch, cache: Cache | None, step: int | None) -> Where:
        return Where(batch.bounds, self.config.data.sequence, self._rotary(batch, cache), cache, self._noise(batch, step), batch.numbers)

    def _noise(self, batch: Batch, step: int | None) -> Noise | None:
        m = self.config.model
        if step is None or not (m.dropout_embedding or m.dropout_attention or m.dropout_residual or m.moe):
            return None
        return Noise(self.config.train.seed, step, batch.numbers)

    def _embed(self, batch: Batch, where: Where) -> Tensor:
        x = self.embedding(batch.tokens).to(self.stream)
        if hasattr(self, "positions"):
            axis, positions = self.build.tensor, batch.positions
            own = positions.chunk(axis.size)[axis.rank] if self.build.layout.sequence else positions
            x = x + self.positions(own)
        if where.noise is not None:
            x = where.noise.drop(x, -1, "embedding", self.config.model.dropout_embedding, self.build)
        return x.requires_grad_() if torch.is_grad_enabled() else x  # backward comes by here though the tables be frozen

    def _rotary(self, batch: Batch, cache: Cache | None) -> tuple[Tensor, Tensor] | None:
        if self.rotary is None or not (self.layers or self.prediction):
            return None
        return self.rotary(batch.positions, max(batch.bounds.lengths) + (cache.longest if cache else 0))


def table_at_both_ends(model: ModelConfig) -> bool:
    """Whether the last stage uses the embedding table too: to project, or to look up tokens for multi-token prediction."""
    return model.tied or model.prediction is not None


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
