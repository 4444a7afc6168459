"""The router's choice: which experts a token goes to and with what weights, for every combination of options.

Notable:
- Choice and weights are two things. The choice is made on selection scores (plus the balancing bias, within the groups kept) and has no gradient;
  the weights come from the logits of the chosen alone, so a bias never reaches them.
- Weights that are divided by their sum are one softmax over the logarithms of the chosen scores: no small number in a denominator, and a sum of 1
  at logits where every score underflows. For softmax scores that is the softmax over the chosen logits: before and after top-k are the same then.
- Sinkhorn balancing is one number per expert that is added to the logits. It is found with logarithms, so no logit is too large.
- The k best are found by k passes of argmax, which takes the first of equal values on every device (a sort of all experts was measured to cost 2 to
  4 times as much on a CPU, and the order of `torch.topk` is open). Nothing asks a device for a value.

Shapes: T tokens of this rank, E experts, k chosen, G groups of neighbouring experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtmegatron.config.model import MoEConfig
from mtmegatron.ops.cross_entropy import Axis

SINKHORN_ROUNDS = 24  # a fixed number: the choice then depends on the logits alone, and no rank waits to learn whether to go on


class Routing(NamedTuple):
    """Where tokens go.

    Shapes: experts [T, k] int64, best selection score first, ties to the lower number; weights [T, k], scores and logits [T, E] in the type of the
    logits, with gradient to them. `scores` are those of all experts before any bias, normalisation or scale: what the balance terms use."""

    experts: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


def route(logits_TE: Tensor, moe: MoEConfig, bias_E: Tensor | None = None, experts_Tk: Tensor | None = None) -> Routing:
    """k experts of each token: the best of s(z) + b in the groups kept, weighted by s(z) of the chosen.

    s is softmax or sigmoid of all logits. With `score_after` the choice is made on z + b, and a softmax takes the chosen k alone (Shazeer et al.
    2017, 1701.06538, eq. 3-5; Mixtral). Then w / sum(w) with `renormalise`, then times `scale` (DeepSeek-V3, 2412.19437, eq. 12-16).
    `experts_Tk`: a choice made before, such as `sinkhorn_choice`; only weights are computed then.

    Shapes: logits [T, E] in fp32 or fp64; bias [E]; experts [T, k]."""
    assert logits_TE.dtype in (torch.float32, torch.float64), "a rounded logit reorders experts"
    assert bias_E is None or experts_Tk is None, "a bias has no effect on a choice made before"
    scores = logits_TE.sigmoid() if moe.score == "sigmoid" else logits_TE.softmax(-1)
    if experts_Tk is None:
        selection = (logits_TE if moe.score_after else scores).detach()
        experts_Tk = choose(selection if bias_E is None else selection + bias_E, moe)
    return Routing(experts_Tk, _weights(logits_TE, scores, experts_Tk, moe), scores, logits_TE)


@torch.no_grad()
def choose(selection_TE: Tensor, moe: MoEConfig) -> Tensor:
    """The k best experts of each token, [T, k], among the experts of its `groups_kept` best groups (DeepSeek-V2, 2405.04434, section 2.2.2)."""
    kept = moe.groups_kept or moe.groups
    if kept < moe.groups:
        selection_TE = selection_TE.masked_fill(~_group_mask(selection_TE, moe, kept), -torch.inf)
    return _best(selection_TE, moe.top_k)


@torch.no_grad()
def sinkhorn_choice(logits_TE: Tensor, moe: MoEConfig, axis: Axis | None = None, mask_T: Tensor | None = None) -> Tensor:
    """The k best of z + v, [T, k]: exp(z + u + v) has equal row sums and equal column sums (Sinkhorn 1964; S-BASE, 2202.01169).

    Columns are summed over all tokens of the micro-batch: those of the ranks of `axis`, without padding (where `mask_T` is false). Logits must be
    finite. Shapes: logits [T, E], mask [T] bool."""
    potential = logits_TE.new_zeros(logits_TE.shape[1])
    for _ in range(SINKHORN_ROUNDS):
        shifted = logits_TE - (logits_TE + potential).logsumexp(-1, keepdim=True)
        if mask_T is not None:
            shifted = shifted.masked_fill(~mask_T[:, None], -torch.inf)
        potential = -_logsumexp_of_tokens(shifted, axis)
    return choose(logits_TE + potential, moe)


def _logsumexp_of_tokens(x_TE: Tensor, axis: Axis | None) -> Tensor:
    """log sum exp over the tokens of all ranks of the axis, [E]."""
    if axis is None or axis.size == 1:
        return x_TE.logsumexp(0)
    top = x_TE.new_full(x_TE.shape[1:], -torch.inf) if len(x_TE) == 0 else x_TE.amax(0)
    axis.all_reduce(top, "max")
    total = (x_TE - top).exp().sum(0)
    axis.all_reduce(total, "sum")
    return top + total.log()


def _group_mask(selection_TE: Tensor, moe: MoEConfig, kept: int) -> Tensor:
    """True for the experts of the groups a token may choose from, [T, E]."""
    size, counted = selection_TE.shape[1] // moe.groups, max(1, moe.top_k // kept)
    assert size * moe.groups == selection_TE.shape[1] and size * kept >= moe.top_k, "groups are equal, and those kept hold enough experts"
    groups_TGe = selection_TE.unflatten(1, (moe.groups, size))
    score_TG = groups_TGe.amax(-1) if moe.group_score == "max" else groups_TGe.topk(counted, -1).values.sum(-1)
    mask_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter_(1, _best(score_TG, kept), True)
    return mask_TG.repeat_interleave(size, 1)


def _best(x_TE: Tensor, k: int) -> Tensor:
    """Places of the k largest of each row, largest first, ties to the lower place. A chosen one falls below every finite value, -inf included."""
    assert k <= x_TE.shape[1], f"{k} of {x_TE.shape[1]} cannot be chosen"
    left, found = x_TE.clamp_min(torch.finfo(x_TE.dtype).min), []
    for _ in range(k):
        found.append(left.argmax(-1, keepdim=True))
        left.scatter_(1, found[-1], -torch.inf)
    return torch.cat(found, 1)


def _weights(logits: Tensor, scores: Tensor, experts: Tensor, moe: MoEConfig) -> Tensor:
    chosen = logits.gather(1, experts)
    if moe.score == "sigmoid":
        weights = F.logsigmoid(chosen).softmax(-1) if moe.renormalise else scores.gather(1, experts)
    else:
        weights = chosen.softmax(-1) if moe.renormalise or moe.score_after else scores.gather(1, experts)
    return weights * moe.scale
