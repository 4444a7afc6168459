"""Balance terms of a router, from one set of sums, and the selection bias that balances without a loss.

Notable:
- All terms are functions of a few sums per sequence (`Sums`): one matrix product over this rank's tokens and one all-reduce per layer and
  micro-batch, whatever terms are on. Tokens of a sequence may be spread over ranks in any way.
- Every term is normalised by what is known of the whole global batch before its first forward, so the terms of its micro-batches add up: the value
  does not depend on their number, nor on who holds them. Only `aux_loss` depends on `train.micro_batch`, by its definition.
- Each rank of the axis has the same, whole value. Backward gives each rank the gradient of that value to its OWN tokens: there is no collective
  in backward, and the term enters backward once, with factor 1, on every rank. The gradient of the router's weight, summed over the ranks that hold
  different tokens like that of any parameter, is then that of one process. For a log, take the value from one rank of the axis.
- Counts are those of the choice, before anything is dropped, and carry no gradient. Padding (where the mask is false) counts nowhere.

Shapes: T tokens of this rank, B sequences of the micro-batch, E experts, k chosen, G groups. With f_e = E / k times the share of tokens that chose
e (1 when balanced) and P_e = the mean score of e, a term is a sum of f P with coefficients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mtmegatron.config.model import MoEConfig
from mtmegatron.ops.cross_entropy import Axis
from mtmegatron.ops.router import Routing


class Sums(NamedTuple):
    """Sums over the tokens of each sequence, on all ranks that share the micro-batch. What no term asks for is None."""

    tokens: Tensor  # [B, 1]
    counts: Tensor  # [B, E], tokens that chose an expert
    scores: Tensor  # [B, E], with gradient
    shares: Tensor | None = None  # [B, E], scores divided by the sum of the token's, with gradient
    sent: Tensor | None = None  # [B, G], tokens that chose some expert of a group
    z: Tensor | None = None  # [B, 1], squared log-sum-exp of the logits, with gradient


class Batchwide(NamedTuple):
    """What a term needs to know of the global batch, all data ranks and micro-batches: tokens without padding, sequences, and the number of tokens
    that chose each expert in the PREVIOUS step's global batch ([E]; zeros before the first step)."""

    tokens: float | Tensor
    sequences: float | Tensor
    previous_E: Tensor | None = None


def sequence_numbers(sequences: int, tokens: int, parts: int = 1, part: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """To which sequence of the micro-batch each of this rank's tokens belongs, [T] int64.

    A context rank holds as many tokens of each sequence, end to end; the `tokens` here are part `part` of `parts` equal ones of them (the tensor
    ranks')."""
    return (torch.arange(tokens, device=device) + part * tokens) * sequences // (tokens * parts)


def expert_counts(experts_Tk: Tensor, experts: int, mask_T: Tensor | None = None) -> Tensor:
    """Tokens of this rank that chose each expert, before dropping, [E] int64."""
    ones = torch.ones_like(experts_Tk) if mask_T is None else mask_T.to(experts_Tk.dtype)[:, None].expand_as(experts_Tk)
    return experts_Tk.new_zeros(experts).scatter_add_(0, experts_Tk.flatten(), ones.flatten())


def sums(
    routing: Routing, moe: MoEConfig, sequences: int = 1, numbers_T: Tensor | None = None, mask_T: Tensor | None = None, axis: Axis | None = None
) -> Sums:
    """The sums of one layer and micro-batch over the ranks of `axis`, which hold different tokens of it.

    `numbers_T`: the sequence of each token, below `sequences` (`sequence_numbers`); None: one sequence. `mask_T`: false for padding."""
    logits = routing.logits
    columns = {"tokens": torch.ones_like(logits[:, :1]), "counts": _chosen(routing.experts, logits), "scores": routing.scores}
    if moe.complementary:
        columns["shares"] = routing.scores / (routing.scores.sum(-1, keepdim=True) + torch.finfo(logits.dtype).tiny)
    if moe.communication_loss:
        columns["sent"] = columns["counts"].unflatten(1, (moe.groups, -1)).amax(-1)
    if moe.z_loss:
        columns["z"] = logits.logsumexp(-1, keepdim=True).square()
    packed = _membership(logits, sequences, numbers_T, mask_T) @ torch.cat(list(columns.values()), 1)
    parts = _SumOver.apply(packed, axis).split([column.shape[1] for column in columns.values()], 1)
    return Sums(**dict(zip(columns, parts)))


def balance_losses(s: Sums, moe: MoEConfig, batch: Batchwide) -> dict[str, Tensor]:
    """The terms that have a coefficient, times it, by name; their sum joins the loss of the global batch, of which this is one micro-batch's part."""
    terms = {
        "aux_loss": aux_loss, "sequence_loss": sequence_loss, "global_loss": global_loss, "device_loss": device_loss,
        "communication_loss": communication_loss, "z_loss": z_loss,
    }  # fmt: skip
    return {name: getattr(moe, name) * term(s, moe, batch) for name, term in terms.items() if getattr(moe, name)}


def aux_loss(s: Sums, moe: MoEConfig, batch: Batchwide) -> Tensor:
    """sum_e f_e P_e over the tokens of one micro-batch, weighted by its share of the global batch's tokens (Switch, 2101.03961, eq. 4-6; GShard).

    1 for softmax scores in balance. A micro-batch is `train.micro_batch` sequences, whatever ranks hold them: another such number is another term,
    another layout is not."""
    tokens, counts, scores = s.tokens.sum(), s.counts.sum(0), s.scores.sum(0)
    return (_load(counts, tokens, moe) * scores).sum() / batch.tokens


def sequence_loss(s: Sums, moe: MoEConfig, batch: Batchwide) -> Tensor:
    """Mean over the sequences of the global batch of sum_e f_e P_e within each (DeepSeek-V2, 2405.04434, eq. 23-25).

    `complementary`: P_e is the mean of s_e / sum_e s_e (DeepSeek-V3, 2412.19437, eq. 17-20), which differs for sigmoid scores."""
    scores = s.shares if moe.complementary else s.scores
    return (_load(s.counts, s.tokens, moe) * _mean(scores, s.tokens)).sum() / batch.sequences


def global_loss(s: Sums, moe: MoEConfig, batch: Batchwide) -> Tensor:
    """sum_e f_e P_e over all tokens of the global batch (2501.11873), with the f_e of the PREVIOUS step's global batch.

    The f_e of this step are known only after its last forward. Counts of what has been seen so far would depend on the order of micro-batches and
    ranks; those of the step before are exact in every layout. Before the first step f_e = 1."""
    previous = torch.zeros_like(s.counts[0]) if batch.previous_E is None else batch.previous_E.to(s.counts.dtype)
    load = torch.where(previous.sum() > 0, previous * len(previous) / previous.sum().clamp_min(1), torch.ones_like(previous))
    return (load * s.scores.sum(0)).sum() / batch.tokens


def device_loss(s: Sums, moe: MoEConfig, batch: Batchwide) -> Tensor:
    """Mean over sequences of sum_g (mean of f_e in group g) (sum of P_e in group g) (DeepSeek-V2, eq. 26-28); groups are the model's."""
    load_BG = _load(s.counts, s.tokens, moe).unflatten(1, (moe.groups, -1)).mean(-1)
    return (load_BG * _group_scores(s, moe)).sum() / batch.sequences


def communication_loss(s: Sums, moe: MoEConfig, batch: Batchwide) -> Tensor:
    """Mean over sequences of sum_g (G / M times the share of tokens sent to group g) (sum of P_e in g), M groups kept (DeepSeek-V2, eq. 29-31)."""
    sent_BG = _mean(s.sent, s.tokens) * moe.groups / (moe.groups_kept or moe.groups)
    return (sent_BG * _group_scores(s, moe)).sum() / batch.sequences


def z_loss(s: Sums, moe: MoEConfig, batch: Batchwide) -> Tensor:
    """Mean over the tokens of the global batch of (log sum_e exp z_e)^2 (ST-MoE, 2202.08906, eq. 5)."""
    return s.z.sum() / batch.tokens


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """b_e + rate * sign(mean load - load of e), after an applied step, with the counts of its global batch (2408.15664, algorithm 1).

    Integer counts are compared exactly. Shapes: bias and result [E], at least fp32; counts [E] int64."""
    return bias_E + rate * (counts_E.sum() - len(counts_E) * counts_E).sign().to(bias_E.dtype)


def _load(counts: Tensor, tokens: Tensor, moe: MoEConfig) -> Tensor:
    """f_e: the share of the tokens that chose e, in units of k / E."""
    return _mean(counts, tokens) * (moe.experts / moe.top_k)


def _mean(total: Tensor, tokens: Tensor) -> Tensor:
    """Per token; a sequence of padding alone has none, and sums of 0."""
    return total / tokens.clamp_min(1)


def _group_scores(s: Sums, moe: MoEConfig) -> Tensor:
    """Sum over the experts of a group of P_e, [B, G]."""
    return _mean(s.scores, s.tokens).unflatten(1, (moe.groups, -1)).sum(-1)


def _chosen(experts_Tk: Tensor, logits_TE: Tensor) -> Tensor:
    """1 where a token chose an expert, else 0, [T, E]."""
    return torch.zeros_like(logits_TE).scatter_(1, experts_Tk, 1.0)


def _membership(logits: Tensor, sequences: int, numbers_T: Tensor | None, mask_T: Tensor | None) -> Tensor:
    """1 where a token is of a sequence and no padding, [B, T]."""
    assert numbers_T is not None or sequences == 1, "several sequences need the number of each token's"
    if numbers_T is None:
        member = logits.new_ones(1, len(logits))
    else:
        member = (torch.arange(sequences, device=logits.device)[:, None] == numbers_T).to(logits.dtype)
    return member if mask_T is None else member * mask_T


class _SumOver(torch.autograd.Function):
    """The sum over the ranks of an axis; each gets the gradient of the one value that all of them have."""

    @staticmethod
    def forward(ctx, x, axis):
        x = x.clone(memory_format=torch.contiguous_format)
        if axis is not None and axis.size > 1:
            axis.all_reduce(x, "sum")
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, None
