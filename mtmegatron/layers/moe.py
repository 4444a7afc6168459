"""Mixture of experts in place of the feed-forward layer: router, experts on the ranks of `expert` x `expert_tensor`, shared experts.

Notable:
- The router is whole on every rank, sees this rank's own tokens and works in fp32 or fp64: a rounded logit would reorder experts.
- What only backward may count, backward counts: balance terms enter it, and loads are added up, where the gradient of the layer's output comes by.
  That happens once for each micro-batch, with recomputation too, and never in evaluation.
- The weights of all experts are one parameter per matrix, split over both axes of experts: initial values, ZeRO, checkpoints and clipping see
  parameters as all others.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mtmegatron.config.model import ModelConfig, MoEConfig
from mtmegatron.config.schema import Config
from mtmegatron.layers.attention import Where
from mtmegatron.layers.build import Build
from mtmegatron.layers.linear import Linear
from mtmegatron.layers.mlp import MLP
from mtmegatron.ops.activation import ACTIVATIONS
from mtmegatron.ops.balance import (
    Batchwide,
    balance_losses,
    expert_counts,
    sequence_numbers,
    sums,
    updated_bias,
)
from mtmegatron.ops.capacity import capacity, keep
from mtmegatron.ops.dropout import Stream, uniform
from mtmegatron.ops.grouped import grouped
from mtmegatron.ops.permute import fill_runs, reorder
from mtmegatron.ops.router import Routing, route, sinkhorn_choice
from mtmegatron.parallel import expert
from mtmegatron.parallel.recompute import dropped, recomputed, remake_of
from mtmegatron.parallel.tensor import Moves, linear
from mtmegatron.placement import Init
from mtmegatron.precision.fp8 import Fp8, Fp8Experts
from mtmegatron.precision.gemm import Gemm

TERMS = ("aux_loss", "sequence_loss", "global_loss", "device_loss", "communication_loss", "z_loss")
PRECISION = {"fp32": torch.float32, "fp64": torch.float64}


class MoE(nn.Module):
    """y_t = sum_j w_tj expert_{e_tj}(x_t) [+ shared(x_t)]. Shapes: [T', D] -> [T', D].

    `record`: sums of this step on this rank, see `observe`; `bias`, `load` [E]: the selection bias, and the counts of the step before."""

    def __init__(self, config: Config, layer: int, build: Build, out_std: float):
        super().__init__()
        m, moe = config.model, config.model.moe
        self.config, self.moe, self.layer, self.build = config, moe, layer, build
        self.router = Router(m, layer, build)
        self.experts = Experts(m, build, out_std)
        ffn = moe.shared_ffn or moe.shared * self.experts.ffn
        self.shared = MLP(m.model_copy(update={"ffn": ffn}), build, out_std) if ffn else None
        self.shared_gate = Linear(m.width, 1, build, split=None, bias=False, std=m.init_std) if moe.shared_gate else None
        self.register_buffer("bias", torch.zeros(moe.experts) if moe.bias_rate else None)
        self.register_buffer("load", torch.zeros(moe.experts, dtype=torch.int64) if moe.global_loss else None)
        self.record = torch.zeros(observed(moe), dtype=torch.float64)
        view = expert.Experts(build.mesh, moe.experts)
        if config.parallel.dispatcher == "alltoall":
            self.dispatch = partial(expert.alltoall, experts=view, parts=config.parallel.dispatch_parts)
        else:
            self.dispatch = partial(expert.allgather, experts=view)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        training = where.noise is not None
        routing = self._route(x, where)
        chosen = self._within_capacity(routing, where)
        beside: list[Tensor] = []
        compute = partial(self.experts, fill=self._fill(where))
        y = self.dispatch(x, routing.weights, chosen, compute=compute, meanwhile=lambda: beside.append(self._shared(x)))
        if self.shared is not None:
            y = y + beside[0]
        return self._observed(y, routing, chosen) if training else y

    @torch.no_grad()
    def update(self, counts: Tensor) -> None:
        """After an applied step: `counts` of its global batch, [E] int64."""
        if self.bias is not None:
            self.bias.copy_(updated_bias(self.bias, counts, self.moe.bias_rate))
        if self.load is not None:
            self.load.copy_(counts)

    def _route(self, x: Tensor, where: Where) -> Routing:
        logits, moe = self.router(x, where), self.moe
        if moe.sinkhorn and where.noise is not None:
            return route(logits, moe, experts_Tk=sinkhorn_choice(logits.detach(), moe, self._micro_batch))
        return route(logits, moe, self.bias)

    @property
    def _micro_batch(self):
        """The ranks that share the tokens of a micro-batch."""
        return self.build.mesh["context", "tensor"]

    def _shared(self, x: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        y = self.shared(x)
        return y if self.shared_gate is None else y * self.shared_gate(x).sigmoid()

    def _within_capacity(self, routing: Routing, where: Where) -> Tensor:
        """The chosen experts, E for a choice that was dropped. A sequence being generated is never cut."""
        if self.moe.capacity is None or where.numbers is None:
            return routing.experts
        axis, own = self._micro_batch, self.build.own_tokens(where.numbers)
        order = axis.all_gather(own).argsort()  # as one process has the tokens
        experts, weights = (axis.all_gather(t.detach())[order] for t in (routing.experts, routing.weights))
        kept = torch.empty_like(experts, dtype=torch.bool)
        kept[order] = keep(experts, weights, self.moe).kept
        return routing.experts.masked_fill(~kept.chunk(axis.size)[axis.rank], self.moe.experts)

    def _fill(self, where: Where) -> int | None:
        """To how many rows each expert is filled up: the capacity, from each micro-batch of the experts' group."""
        if not self.moe.pad or where.numbers is None:
            return None
        sharing = self._micro_batch.size
        batches = {rank // sharing for rank in self.build.mesh["expert", "expert_tensor"].ranks}
        return len(batches) * capacity(self.build.own_tokens(where.numbers).shape[0] * sharing, self.moe)

    def _observed(self, y: Tensor, routing: Routing, chosen: Tensor) -> Tensor:
        """y, with the balance terms and the record of this micro-batch in its backward."""
        moe, train, axis = self.moe, self.config.train, self._micro_batch
        losses: dict[str, Tensor] = {}
        if any(getattr(moe, name) for name in TERMS):
            tensor, (tokens, _) = self.build.tensor, routing.experts.shape
            numbers = sequence_numbers(train.micro_batch, tokens, tensor.size, tensor.rank, y.device)
            batch = Batchwide(train.global_batch * self.config.data.sequence, train.global_batch, self.load)
            losses = balance_losses(sums(routing, moe, train.micro_batch, numbers, axis=axis), moe, batch)
        seen = observe(routing, chosen, moe, losses, axis.rank == 0)
        scale = self.build.loss_scale.scale if self.build.loss_scale else 1.0
        return _Observed.apply(y, sum(losses.values()) if losses else None, self.record, seen, scale)


class Router(nn.Module):
    """z = x Wᵀ in fp32 or wider, W of global shape [E, D], whole on every rank. Shapes: [T', D] -> [T', E]."""

    def __init__(self, model: ModelConfig, layer: int, build: Build):
        super().__init__()
        self.layer, self.build, self.jitter = layer, build, model.moe.jitter
        self.weight = build.parameter((model.moe.experts, model.width), Init(model.init_std), True, (), build.token_axes)
        precision = torch.promote_types(PRECISION[model.moe.logits], build.dtype)
        self.moves = Moves(build.tensor, _WideGemm(build.gemm.native, precision=precision), build.queue)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        if self.jitter and where.noise is not None:
            noise, own = where.noise, self.build.own_tokens(where.noise.numbers)
            x = x * _jitter(noise.stream(self.layer, "router"), own, x, self.jitter)
        return linear(x, [self.weight], [], self.moves)


def _jitter(stream: Stream, numbers: Tensor, x: Tensor, size: float) -> Tensor:
    """Factors from [1 - size, 1 + size], by token and channel (Switch, 2101.03961, section 2.4)."""
    return (1 - size + 2 * size * uniform(stream, numbers, range(x.shape[1]))).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class _WideGemm(Gemm):
    """Products in at least `precision`, whatever the operands are in."""

    precision: torch.dtype = torch.float32

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.to(self.precision) @ weight.to(self.precision).t()

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        return (dy @ weight.to(self.precision)).to(weight.dtype)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b.to(self.precision)


class Experts(nn.Module):
    """act(X_e W_gateᵀ, X_e W_upᵀ) W_downᵀ for the rows X_e of each expert of this rank; this rank's part of the sum over its columns.

    Global shapes: gate, up [E, F, D], down [E, D, F], split by experts and by F. Shapes: [R, D] -> [R, D]."""

    def __init__(self, model: ModelConfig, build: Build, out_std: float):
        super().__init__()
        self.build, self.ffn = build, model.moe.ffn or model.ffn
        self.activation, gated = ACTIVATIONS[model.activation]
        up, down = (model.moe.experts, self.ffn, model.width), (model.moe.experts, model.width, self.ffn)
        self.gate = self._matrix(up, 1, model.init_std) if gated else None
        self.up = self._matrix(up, 1, model.init_std)
        self.down = self._matrix(down, 2, out_std)
        self.gemms: dict[nn.Parameter, Gemm] = {}  # of matrices that have another than the rest of the model

    def multiply_in_fp8(self, fp8: Fp8, matrix: str) -> None:
        """From now on products with "gate", "up" or "down" are made of 8-bit floats, but for weight gradients."""
        plain = self.build.gemm
        self.gemms[getattr(self, matrix)] = Fp8Experts(plain.native, plain.mixed, common=fp8, columns=self.build.mesh["expert_tensor"])

    def _matrix(self, shape: tuple[int, ...], dim: int, std: float) -> nn.Parameter:
        return self.build.parameter(shape, Init(std), True, ((0, "expert"), (dim, "expert_tensor")), ("expert_data",))

    def forward(self, rows: Tensor, counts: list[int], fill: int | None = None) -> Tensor:
        """`counts`: rows of each expert, end to end; `fill`: to how many each is filled up with zeros."""
        if fill is None:
            return self._apply(rows, counts)
        index, back = fill_runs(counts, fill, rows.device)
        return reorder(self._apply(reorder(rows, index, back), [fill] * len(counts)), back, index)

    def _apply(self, rows: Tensor, counts: list[int]) -> Tensor:
        up = partial(self._up, counts=counts)
        if "up" in self.build.recompute:
            product, again = recomputed(lambda x: self.activation(up(x)), rows), lambda: self.activation(up(rows))
        else:
            inner = up(rows)
            product, again = self.activation(inner), lambda: self.activation(inner)
        if "activation" in self.build.recompute:
            product = dropped(product, again)
        return self._grouped(product, [self.down], counts)

    def _up(self, rows: Tensor, counts: list[int]) -> Tensor:
        return self._grouped(rows, [self.up] if self.gate is None else [self.gate, self.up], counts)

    def _grouped(self, x: Tensor, weights: list[nn.Parameter], counts: list[int]) -> Tensor:
        gemm, *others = (self.gemms.get(w, self.build.gemm) for w in weights)
        if any(other != gemm for other in others):
            return torch.cat([self._grouped(x, [w], counts) for w in weights], dim=1)
        return grouped(x, weights, counts, gemm, self.build.queue, remake_of(x))


def observed(moe: MoEConfig) -> int:
    """Columns of a record: choices of each expert (E), choices dropped, entropy of the scores, each of TERMS."""
    return moe.experts + 2 + len(TERMS)


@torch.no_grad()
def observe(routing: Routing, chosen: Tensor, moe: MoEConfig, losses: dict[str, Tensor], counted: bool) -> Tensor:
    """The record of one micro-batch on this rank: sums over its tokens, choices before dropping, entropy in nats.

    `counted`: whether this is the rank that tells the terms, which all that share the micro-batch know."""
    counts, shares = expert_counts(routing.experts, moe.experts), routing.scores / routing.scores.sum(-1, keepdim=True)
    lost, entropy = (chosen == moe.experts).sum(), torch.special.entr(shares).sum()
    terms = [losses[name].detach() if counted and name in losses else torch.zeros_like(entropy) for name in TERMS]
    return torch.cat([counts.double(), torch.stack([number.double() for number in (lost, entropy, *terms)])])


class _Observed(torch.autograd.Function):
    """y; its backward begins that of the balance loss, with the factor of all losses, and adds what was seen to the record."""

    @staticmethod
    def forward(ctx, y, loss, record, seen, scale):
        ctx.record, ctx.seen, ctx.slope = record, seen, None if loss is None else torch.full_like(loss, scale)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        ctx.record.add_(ctx.seen)
        return dy, ctx.slope, None, None, None
