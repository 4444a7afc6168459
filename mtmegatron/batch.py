"""One micro-batch as the model sees it: tokens first, all sequences end to end, with document bounds beside them.

Notable: bounds are Python integers, not a tensor: attention on a CPU loops over documents without asking a device, and a kernel that wants
`cu_seqlens` on its device gets it from `Bounds.tensor`. A micro-batch of equal sequences is the case `Bounds.uniform` is not None.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

IGNORE = -100  # a label that takes no part in the loss, as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class Bounds:
    """Where documents begin and end in the `T` tokens: starts[i] <= token < starts[i + 1]; attention never crosses a bound."""

    starts: tuple[int, ...]

    @classmethod
    def equal(cls, sequences: int, length: int) -> "Bounds":
        return cls(tuple(range(0, sequences * length + 1, length)))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.starts, self.starts[1:]))

    @cached_property
    def uniform(self) -> int | None:
        """The common length when all documents are equally long, else None."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    @property
    def total(self) -> int:
        return self.starts[-1]

    def tensor(self, device: torch.device | str) -> torch.Tensor:
        """`cu_seqlens`, int32, on a device."""
        return torch.tensor(self.starts, dtype=torch.int32, device=device)


@dataclass
class Batch:
    """One micro-batch on this rank.

    Shapes: tokens, labels, positions, numbers: T (int64). A label of IGNORE takes no part in the loss. `numbers`: the place of each token in its
    step's whole batch, the same in every layout; dropout is drawn from it. `ahead_tokens`, `ahead_labels`: [depth, T], for multi-token prediction:
    row k - 1 has for place i of a sequence t_{i+k}, and t_{i+k+1} or IGNORE.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    bounds: Bounds
    numbers: torch.Tensor | None = None
    ahead_tokens: torch.Tensor | None = None
    ahead_labels: torch.Tensor | None = None
