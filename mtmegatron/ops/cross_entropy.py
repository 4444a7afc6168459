"""Cross entropy over a vocabulary that may be split over an axis, alone and fused with the output projection.

Notable:
- One softmax kernel per row block does nearly all the work. The log-sum-exp comes from it without an exponential of its
  own: the largest probability is 1/S with S = sum of exp(z - max), so log S = -log(max p), exact at any scale of the
  logits.
- With the vocabulary split, shares may be uneven. One all-reduce finds the maximum, one packed all-reduce carries S,
  the target's logit and, for label smoothing, the sum of the logits. Every rank computes the same loss, equal to that
  of the whole vocabulary.
- The fused form never holds [T, V]: token chunks go through projection, loss, and both gradient GEMMs while they are in
  cache. That works in forward because the factor on the loss (one over the tokens of the global batch) is known before
  (as in Liger and Cut Cross Entropy).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mtmegatron.batch import IGNORE

CACHED_LOGITS = 2**20  # of one chunk on a CPU, which stay in its cache: 4 MB in fp32; benchmarks/ops.py
CHUNK_LOGITS = 2**26  # elsewhere, where a chunk has to fill the device: 256 MB


class Axis(Protocol):
    """What the loss needs of a mesh axis."""

    size: int

    def all_reduce(self, tensor: Tensor, op: str) -> object:
        """In place, over the ranks of the axis; op is "sum" or "max"."""


def cross_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    axis: Axis | None = None,
    start: int = 0,
    vocab: int | None = None,
    ignore: int = IGNORE,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(loss, lse) per token: loss = lse - (1 - s) z_y - s mean(z) + z_loss lse^2 with lse = log sum exp z, detached.

    The loss is 0 where the label is `ignore`.

    s is the label smoothing of `torch.nn.functional.cross_entropy`; the z term is that of PaLM (Chowdhery et al. 2022,
    section 5). With an `axis` the logits are ids start .. start + V of `vocab` (the global size), every rank passes the
    same labels, and each share needs one finite logit per token. Logits are never changed.

    Shapes: logits [T, V] with V local, labels [T] global ids; both results [T] in at least fp32.
    """
    spec = _Spec.of(logits_TV.shape[1], axis, start, vocab, ignore, smoothing, z_loss)
    return _CrossEntropy.apply(logits_TV, labels_T, spec)


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    scale: float | Tensor,
    accumulate: Callable[[Tensor, Tensor], None] | None = None,
    bias_V: Tensor | None = None,
    axis: Axis | None = None,
    start: int = 0,
    vocab: int | None = None,
    ignore: int = IGNORE,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> tuple[Tensor, Tensor, Tensor]:
    """(scale * (ce_sum + z_sum), ce_sum, z_sum) of logits = hidden weightT + bias; detached sums over valid tokens.

    The first is for backward: its gradients are made in forward, chunk by chunk (only when autograd records), and its
    `scale` is in them. `accumulate(dlogits_CV, hidden_CD)` is called for each chunk: the caller adds dlogitsT hidden to
    its gradient of the weight and the column sums of dlogits to that of the bias; autograd then gives neither, and the
    gradient that comes in must be 1. Without it autograd returns both. The gradient of hidden is this rank's part: its
    sum over `axis` is the caller's. `chunk` is tokens per chunk (None: by the device's type); `matmul(a, b)`
    multiplies all three GEMMs.

    Shapes: hidden [T, D], weight [V, D] and bias [V] with V local, labels [T] global ids; three 0-d results in at least
    fp32.
    """
    spec = _Spec.of(weight_VD.shape[0], axis, start, vocab, ignore, smoothing, z_loss)
    chunk = chunk or _chunk(hidden_TD.device, weight_VD.shape[0])
    differentiable = [t for t in (hidden_TD, weight_VD, bias_V) if t is not None and t.requires_grad]
    record = torch.is_grad_enabled() and bool(differentiable or accumulate)
    plan = _Plan(spec, scale, accumulate, chunk, matmul, record)
    return _LinearCrossEntropy.apply(hidden_TD, weight_VD, bias_V, labels_T, plan)


def _chunk(device: torch.device, vocab: int) -> int:
    """Tokens of a chunk whose logits, `vocab` for each, suit a type of device. Meta tensors stand for an accelerator's."""
    return max(1, (CACHED_LOGITS if device.type == "cpu" else CHUNK_LOGITS) // vocab)


@dataclass(frozen=True)
class _Spec:
    """What loss it is, and which part of the vocabulary is here."""

    axis: Axis | None
    start: int
    vocab: int
    ignore: int
    smoothing: float
    z_loss: float

    @classmethod
    def of(cls, local: int, axis: Axis | None, start: int, vocab: int | None, *rest) -> "_Spec":
        axis = axis if axis is not None and axis.size > 1 else None
        vocab = local if vocab is None and axis is None else vocab
        assert vocab is not None, "a split vocabulary needs its global size"
        whole = local == vocab
        assert whole == (axis is None), "whole logits take no axis, and a share of them needs one"
        assert 0 <= start <= vocab - local, "the share lies outside the vocabulary"
        return cls(axis, start, vocab, *rest)


@dataclass(frozen=True)
class _Plan:
    """How the fused loss runs."""

    spec: _Spec
    scale: float | Tensor
    accumulate: Callable[[Tensor, Tensor], None] | None
    chunk: int
    matmul: Callable[[Tensor, Tensor], Tensor]
    record: bool


class _Rows(NamedTuple):
    """What is known of some tokens after forward; [T] in the dtype of the softmax unless said."""

    ce: Tensor  # 0 where ignored, as z
    z: Tensor
    lse: Tensor
    slope: "_Slope"


class _Slope(NamedTuple):
    """Gradient to the local logits: share * softmax - smoothing / vocab * valid - (1 - smoothing) * onehot * here."""

    share: Tensor  # 0 where ignored
    valid: Tensor  # 1 where the label counts
    here: Tensor  # 1 where it also lies in the local share
    index: Tensor  # [T, 1], int64: column of the label, 0 where it is not here


def _forward(spec: _Spec, logits: Tensor, labels: Tensor, softmax: Tensor) -> _Rows:
    """Writes the softmax of the local logits, [T, V] in at least fp32, into `softmax`, which may be `logits` itself."""
    valid, here, index = _locate(spec, labels, logits.shape[1])
    top, target = logits.amax(-1), logits.gather(1, index)[:, 0]
    total = logits.sum(-1) if spec.smoothing else None
    torch.softmax(logits, -1, out=softmax)
    log_sum = -softmax.amax(-1).log()  # of exp(z - top), over the local logits
    shift, log_all, target, mean = _over_axis(spec, logits.shape[1], top, log_sum, target, here, total)
    ce, lse = log_all - (1 - spec.smoothing) * target, shift + log_all
    if spec.smoothing:
        ce = ce - spec.smoothing * mean
    share = torch.exp(top - shift + log_sum - log_all) if spec.axis else torch.ones_like(lse)
    if spec.z_loss:
        share = share * (1 + 2 * spec.z_loss * lse)
    z = spec.z_loss * lse.square()
    slope = _Slope(share.where(valid, 0), valid.to(lse.dtype), here.to(lse.dtype), index)
    return _Rows(ce.where(valid, 0), z.where(valid, 0), lse, slope)


def _locate(spec: _Spec, labels: Tensor, local: int) -> tuple[Tensor, Tensor, Tensor]:
    """(valid, here, index) of `_Slope`, the first two as booleans."""
    valid = labels != spec.ignore
    if labels.device.type == "cpu":  # elsewhere the question would wait for the device
        assert bool(((labels >= 0) & (labels < spec.vocab) | ~valid).all()), "a label lies outside the vocabulary"
    column = labels.long() - spec.start
    here = valid & (column >= 0) & (column < local)
    return valid, here, column.where(here, 0)[:, None]


def _over_axis(
    spec: _Spec, local: int, top: Tensor, log_sum: Tensor, target: Tensor, here: Tensor, total: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(shift, log sum exp(z - shift), z_y - shift, mean(z) - shift) of the whole vocabulary, shift its maximum."""
    if spec.axis is None:
        return top, log_sum, target - top, None if total is None else total / spec.vocab - top
    shift = top.clone()
    spec.axis.all_reduce(shift, "max")
    parts = [torch.exp(top - shift + log_sum), (target - shift).where(here, 0)]
    parts += [] if total is None else [total - local * shift]
    packed = torch.stack(parts)
    spec.axis.all_reduce(packed, "sum")
    return shift, packed[0].log(), packed[1], None if total is None else packed[2] / spec.vocab


def _gradient(spec: _Spec, slope: _Slope, softmax: Tensor, scale: Tensor | float, out: Tensor) -> Tensor:
    """The gradient of scale * loss to the local logits, written into `out`, which may be `softmax` itself."""
    torch.mul(softmax, (slope.share * scale)[:, None], out=out)
    if spec.smoothing:
        out.sub_((slope.valid * (scale * spec.smoothing / spec.vocab))[:, None])
    onehot = slope.here * (scale * (spec.smoothing - 1))
    return out.scatter_add_(1, slope.index, onehot[:, None])


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, spec):
        ctx.spec, ctx.dtype, logits = spec, logits.dtype, _widened(logits)
        softmax = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        rows = _forward(spec, logits, labels, softmax)
        ctx.save_for_backward(softmax, *rows.slope)
        ctx.mark_non_differentiable(rows.lse)
        return rows.ce + rows.z if spec.z_loss else rows.ce, rows.lse

    @staticmethod
    def backward(ctx, grad, _):
        softmax, *slope = ctx.saved_tensors
        gradient = _gradient(ctx.spec, _Slope(*slope), softmax, grad, torch.empty_like(softmax))
        return gradient.to(ctx.dtype), None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, plan):
        own = plan.record and plan.accumulate is None
        dhidden = torch.empty_like(hidden) if plan.record else None
        dweight, dbias = (
            torch.zeros_like(t, dtype=_wide(t)) if own and needed else None
            for t, needed in zip((weight, bias), ctx.needs_input_grad[1:])
        )
        parts = []
        for h, y, dh in zip(*(t.split(plan.chunk) for t in (hidden, labels)), _split(dhidden, plan.chunk)):
            logits = _project(h, weight, bias, plan.matmul)
            rows = _forward(plan.spec, logits, y, logits)
            parts.append((rows.ce, rows.z))
            if plan.record:
                dlogits = _gradient(plan.spec, rows.slope, logits, plan.scale, logits)
                _deliver(plan, dlogits.to(h.dtype), h, weight, dh, dweight, dbias)
        ce_sum, z_sum = (torch.cat(t).sum() for t in zip(*parts))
        ctx.save_for_backward(dhidden, *(d if d is None else d.to(weight.dtype) for d in (dweight, dbias)))
        ctx.accumulates = plan.accumulate is not None
        ctx.mark_non_differentiable(ce_sum, z_sum)
        return (ce_sum + z_sum) * plan.scale, ce_sum, z_sum

    @staticmethod
    def backward(ctx, grad, *_):
        on_host = grad.device.type == "cpu"  # elsewhere reading the factor would wait for the device
        if on_host and grad.item() == 1:
            return *ctx.saved_tensors, None, None
        assert not (on_host and ctx.accumulates), "the weight's gradient is already accumulated: use `scale`"
        return *(d if d is None else (d * grad).to(d.dtype) for d in ctx.saved_tensors), None, None


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, matmul: Callable) -> Tensor:
    """Logits [C, V] in at least fp32, in memory of their own."""
    logits = _widened(matmul(hidden, weight.t()))
    return logits if bias is None else logits.add_(bias)


def _deliver(plan: _Plan, dlogits: Tensor, hidden: Tensor, weight: Tensor, dhidden, dweight, dbias) -> None:
    """The two gradient GEMMs of a chunk, and the sums of the bias."""
    dhidden.copy_(plan.matmul(dlogits, weight))
    if plan.accumulate is not None:
        plan.accumulate(dlogits, hidden)
    if dweight is not None:
        dweight.add_(plan.matmul(dlogits.t(), hidden))
    if dbias is not None:
        dbias.add_(dlogits.sum(0, dtype=dbias.dtype))


def _split(x: Tensor | None, chunk: int) -> Iterable[Tensor | None]:
    return repeat(None) if x is None else x.split(chunk)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _widened(x: Tensor) -> Tensor:
    return x.to(_wide(x))


def cross_entropy_reference(
    logits_TV: Tensor, labels_T: Tensor, ignore: int = IGNORE, smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`cross_entropy` of the whole vocabulary by its formula and autograd."""
    logits, valid = _widened(logits_TV), labels_T != ignore
    top = logits.detach().amax(-1, keepdim=True)
    shifted = logits - top
    log_sum = shifted.exp().sum(-1).log()
    lse = top[:, 0] + log_sum
    target = shifted.gather(1, labels_T.where(valid, 0)[:, None])[:, 0]
    loss = log_sum - (1 - smoothing) * target + z_loss * lse.square()
    if smoothing:
        loss = loss - smoothing * shifted.mean(-1)
    return loss.where(valid, 0), lse.detach()
