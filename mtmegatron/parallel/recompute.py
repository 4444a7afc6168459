"""Recomputation: what forward does not keep, backward makes again.

Notable: two tools for two places.
- `recomputed(function, ...)`: nothing inside a region is kept, only its inputs (torch's non-reentrant checkpoint). For whole blocks, the attention core,
  the up-projections.
- `dropped(value, remake)`: a value that only a linear layer would keep, its input, is made again when its weight gradient needs it. For what is cheap:
  norms and activations. The linear function looks for the mark (see `tensor.py`).

Nothing here draws random numbers, so there is no state to save, and gradients have the same bits as without.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """function(*inputs), of which only the inputs are kept for backward."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def dropped(value: Tensor, remake: Callable[[], Tensor]) -> Tensor:
    """The same value; a linear layer that takes it keeps `remake` instead, which must give the same bits."""
    if value.requires_grad:
        value.remake = torch.no_grad()(remake)
    return value


def remake_of(value: Tensor) -> Callable[[], Tensor] | None:
    """How to make a value again, when it was dropped."""
    return getattr(value, "remake", None)
