"""Output projection and cross entropy with the same bits in every layout.

Notable: one chunk of tokens at a time, as the fused form in `ops/cross_entropy.py`, with the gradients made in forward. The vocabulary is cut in cells;
sums over the vocabulary (of exponentials, of the logits, of the hidden states' gradient) and over tokens are integers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtmegatron.batch import IGNORE
from mtmegatron.mesh import Axis
from mtmegatron.parallel.canonical.exact import (
    ACTIVATION,
    GRADIENT,
    LOSS,
    Exact,
    number,
    product,
)
from mtmegatron.parallel.canonical.linear import Cut


@dataclass
class Loss:
    """What loss it is and where: `start`: this rank's first row of the vocabulary; `sequence`: whether tensor ranks share the tokens."""

    axis: Axis
    exact: Exact
    sequence: bool
    start: int
    vocab: int
    smoothing: float
    z_loss: float


def linear_cross_entropy(hidden: Tensor, cut: Cut, labels: Tensor, scale: float, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """(scale * (ce_sum + z_sum) for backward, ce_sum, z_sum); the two sums are integers with LOSS bits.

    Shapes: hidden [T', D] (T / tensor with `sequence`), labels [T] -> 0-d each."""
    return _LinearCrossEntropy.apply(hidden, cut.weight, cut, labels, scale, loss)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, _, cut: Cut, labels, scale, loss: Loss):
        exact, record = loss.exact, ctx.needs_input_grad[0]
        whole = loss.axis.all_gather(hidden) if loss.sequence else hidden
        dhidden = torch.zeros(whole.shape, dtype=torch.int64, device=hidden.device)
        sums = torch.zeros(2, dtype=torch.int64, device=hidden.device)
        blocks = cut.blocks()
        for rows in exact.chunks(whole.shape[0]):
            logits = torch.cat([product(whole[rows], block.t()) for _, block in blocks], 1)
            ce, z, dlogits = _rows(logits.double(), labels[rows], loss)
            sums += torch.stack([exact.integers(x, LOSS).sum() for x in (ce, z)])
            if record:
                dlogits = (dlogits * scale).to(hidden.dtype)
                for cell, block in blocks:
                    dhidden[rows] += exact.integers(product(dlogits[:, cell], block), GRADIENT)
                    if cut.weight.requires_grad:
                        cut.weight.grad_sum[cell] += exact.integers(product(dlogits[:, cell].t(), whole[rows]), GRADIENT)
        if record:
            total = loss.axis.reduce_scatter(dhidden) if loss.sequence else loss.axis.all_reduce(dhidden)
            ctx.save_for_backward(number(total, GRADIENT, hidden.dtype))
        ctx.mark_non_differentiable(ce_sum := sums[0].clone(), z_sum := sums[1].clone())
        return number(sums.sum(), LOSS, torch.float32) * scale, ce_sum, z_sum

    @staticmethod
    def backward(ctx, grad, *_):
        return ctx.saved_tensors[0], *[None] * 5


def _rows(logits: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """(cross entropy, z term, gradient to the local logits) of each token; zeros where it has no label. Shapes: [C, V], [C] -> [C], [C], [C, V]."""
    valid, column = labels != IGNORE, labels - loss.start
    here = valid & (column >= 0) & (column < logits.shape[1])
    index = column.where(here, 0)[:, None]
    top = loss.axis.all_reduce(logits.amax(-1), "max")
    shifted = logits - top[:, None]
    exponentials = shifted.exp()
    target = shifted.gather(1, index)[:, 0].where(here, 0.0)
    parts = ((exponentials, ACTIVATION), (target[:, None], LOSS), (shifted, LOSS))
    summed = loss.axis.all_reduce(torch.stack([loss.exact.integers(x, bits).sum(-1) for x, bits in parts]))
    total, target, mean = (number(x, bits, torch.float64) for x, (_, bits) in zip(summed, parts))
    log_sum, mean = total.log(), mean / loss.vocab
    log_z = log_sum + top
    ce = log_sum - (1 - loss.smoothing) * target - loss.smoothing * mean
    z = loss.z_loss * log_z.square()
    slope = exponentials / total[:, None] * (1 + 2 * loss.z_loss * log_z)[:, None] - loss.smoothing / loss.vocab
    slope = slope.scatter_add(1, index, (here * (loss.smoothing - 1.0)).double()[:, None])
    return ce.where(valid, 0.0), z.where(valid, 0.0), slope * valid[:, None]
