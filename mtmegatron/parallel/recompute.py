"""Recomputation: what forward does not keep, backward makes again.

Notable: two tools for two places.
- `recomputed(function, ...)`: nothing inside a region is kept, only its inputs (torch's non-reentrant checkpoint). For whole blocks, the attention core,
  the up-projections.
- `dropped(value, remake)`: a value that only a linear layer would keep, its input, is made again when its weight gradient needs it. For what is cheap:
  norms and activations. The linear function looks for the mark (see `tensor.py`).

Nothing here draws random numbers, so there is no state to save, and gradients have the same bits as without.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """function(*inputs), of which only the inputs are kept for backward, whole: the mark of `dropped` does not reach inside."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    plain = [x.view_as(x) if isinstance(x, Tensor) and remake_of(x) else x for x in inputs]
    return checkpoint(function, *plain, use_reentrant=False, preserve_rng_state=False)


def dropped(value: Tensor, remake: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The same value; a linear layer that takes it keeps `inputs` instead, of which `remake` must give the same bits."""
    if value.requires_grad:
        value.remake = partial(torch.no_grad()(remake), *(x.detach() for x in inputs))
    return value


def remake_of(value: Tensor) -> partial[Tensor] | None:
    """How to make a value again, and of which tensors (`args`), when it was dropped."""
    return getattr(value, "remake", None)
