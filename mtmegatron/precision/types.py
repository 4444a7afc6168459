"""Which type each kind of number has in a run, from one word of the configuration.

Notable: with the fp8 recipes weights and activations are bf16, and products are made of 8-bit floats (`fp8.py`). `fp64` runs everything in double
precision; it is the yardstick of the parity proofs. With canonical numerics gradients are accumulated and reduced as integers (`parallel/canonical/exact.py`).
"""

from dataclasses import dataclass, replace

import torch

from mtmegatron.precision.recipes import PREFIX, RECIPES


@dataclass(frozen=True)
class Types:
    """`compute`: weights and activations; `sums`: what gradients accumulate and are reduced in; `gradient`: what the optimizer gets;
    `master`: weights and moments of the optimizer."""

    name: str
    compute: torch.dtype
    gradient: torch.dtype
    master: torch.dtype
    sums: torch.dtype


def types_of(precision: str, canonical: bool = False) -> Types:
    """The types of a run."""
    return replace(TYPES[precision], sums=torch.int64) if canonical else TYPES[precision]


TYPES = {
    "fp32": Types("fp32", torch.float32, torch.float32, torch.float32, torch.float32),
    "bf16": Types("bf16", torch.bfloat16, torch.float32, torch.float32, torch.float32),
    "fp16": Types("fp16", torch.float16, torch.float32, torch.float32, torch.float32),
    "fp64": Types("fp64", torch.float64, torch.float64, torch.float64, torch.float64),
}
TYPES |= {PREFIX + recipe: replace(TYPES["bf16"], name=PREFIX + recipe) for recipe in RECIPES}
