"""Which type each kind of number has in a run, from one word of the configuration.

Notable: `fp64` runs everything in double precision; it is the yardstick of the parity proofs.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Types:
    """`compute`: weights and activations; `gradient`: accumulated gradients and their reduction; `master`: weights and moments of the optimizer."""

    name: str
    compute: torch.dtype
    gradient: torch.dtype
    master: torch.dtype


TYPES = {
    "fp32": Types("fp32", torch.float32, torch.float32, torch.float32),
    "bf16": Types("bf16", torch.bfloat16, torch.float32, torch.float32),
    "fp64": Types("fp64", torch.float64, torch.float64, torch.float64),
}
