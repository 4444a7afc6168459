"""The fp8 recipes: how large the blocks are that share a scale, in each of the three products of a linear layer.

Notable: every operand is seen as a matrix [kept, contracted]; a scale may vary along the kept dim without cost and along the contracted one in steps.
- Y = X Wᵀ contracts over inputs, dX = dY W over outputs, dW = dYᵀ X over tokens.
- Tokens of a micro-batch lie on several ranks under context parallel, in pieces that no block of tokens need fit. So where a recipe has finer scales
  than one for a tensor, the operands of dW have one scale per channel over all tokens of the micro-batch: the same in every layout.
- Which tokens meet at an expert depends on the layout, so there no scale is shared by tokens: each has its own in Y and dX, and dW, which contracts
  over tokens, is not made of 8-bit floats.
"""

from dataclasses import dataclass

import torch

from mtmegatron.precision.quantise import Block


@dataclass(frozen=True)
class Recipe:
    """Blocks (kept, contracted) of activations and their gradients in Y and dX, of weights, and of both operands of dW."""

    tokens: Block = (None, None)
    weight: Block = (None, None)
    channels: Block = (None, None)
    power_of_two: bool = False
    delayed: bool = False  # the scale comes from earlier steps

    @property
    def rows(self) -> Block:
        """Blocks of activations and their gradients at experts: each token for itself."""
        return 1, self.tokens[1]


RECIPES = {
    "tensorwise": Recipe(),
    "delayed": Recipe(delayed=True),
    "rowwise": Recipe((1, None), (1, None), (1, None)),
    "blockwise": Recipe((1, 128), (128, 128), (1, None)),  # DeepSeek-V3, 2412.19437, section 3.3.2
    "mxfp8": Recipe((1, 32), (1, 32), (1, None), power_of_two=True),
}

# types of (activations and weights, gradients of activations)
FORMATS = {"e4m3": (torch.float8_e4m3fn, torch.float8_e4m3fn), "hybrid": (torch.float8_e4m3fn, torch.float8_e5m2)}
PREFIX = "fp8-"


def recipe_of(precision: str) -> Recipe | None:
    """The recipe that `train.precision` names; None for those without fp8."""
    return RECIPES[precision.removeprefix(PREFIX)] if precision.startswith(PREFIX) else None
