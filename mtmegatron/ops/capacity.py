"""Capacity: which choices stay when an expert, or a group of experts, is chosen by more tokens than it may take.

Notable:
- A pure function of the choices and weights of a whole micro-batch, gathered from the ranks that share it, so every rank of every layout keeps the
  same ones. Counts for balance are taken elsewhere, before this.
- Two stable sorts order the choices by expert, then by policy, then by token: ties go to the earliest token.
- Who is not kept adds nothing: a dropped token goes on through the residual. The weights of the others stay as they are.

Shapes: T tokens of the micro-batch, E experts, k chosen, C capacity.
"""

from fractions import Fraction
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from mtmegatron.config.model import MoEConfig


class Kept(NamedTuple):
    """`kept` [T, k] bool; `dropped`: the part of the choices that was dropped, a scalar of the type of the weights."""

    kept: Tensor
    dropped: Tensor


def capacity(tokens: int, moe: MoEConfig) -> int:
    """C = ceil(T k / E * factor) tokens for each expert, at most T. The factor is taken as the decimal number it is written as."""
    return min(tokens, ceil(Fraction(repr(moe.capacity)) * tokens * moe.top_k / moe.experts))


@torch.no_grad()
def keep(experts_Tk: Tensor, weights_Tk: Tensor, moe: MoEConfig, mask_T: Tensor | None = None) -> Kept:
    """The choices that stay: of each expert the C best, or of each group of experts the C E / G best together (`capacity_of: group`).

    Best is the highest weight, or the earliest token (`drop`). Padding, where `mask_T` is false, is not kept and takes nobody's place; C itself
    counts all T tokens, so that shapes do not depend on values. Shapes: experts and weights [T, k], mask [T] bool."""
    pooled = moe.experts // moe.groups if moe.capacity_of == "group" else 1
    owners, most = moe.experts // pooled, capacity(len(experts_Tk), moe) * pooled
    owner = experts_Tk.flatten() // pooled
    real = torch.ones_like(experts_Tk, dtype=torch.bool) if mask_T is None else mask_T[:, None].expand_as(experts_Tk)
    owner = owner.where(real.flatten(), owners)  # padding queues apart, behind all
    order = torch.arange(len(owner), device=owner.device)
    if moe.drop == "weight":
        order = weights_Tk.flatten().sort(descending=True, stable=True).indices
    order = order[owner[order].sort(stable=True).indices]
    kept = (_places(owner, order, owners + 1) < most).view_as(experts_Tk) & real
    return Kept(kept, (real & ~kept).sum() / real.sum().clamp_min(1).to(weights_Tk.dtype))


def _places(owner: Tensor, order: Tensor, owners: int) -> Tensor:
    """The place of each choice among those of its owner, where `order` lists choices owner by owner."""
    lengths = owner.new_zeros(owners).scatter_add_(0, owner, torch.ones_like(owner))
    starts = lengths.cumsum(0) - lengths
    places = torch.arange(len(owner), device=owner.device) - starts[owner[order]]
    return torch.empty_like(places).scatter_(0, order, places)
