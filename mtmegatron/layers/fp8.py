"""Which products of a model are made of 8-bit floats: those of linear layers and of the matrices of experts, by name."""

from collections.abc import Iterable, Sequence

from torch import nn

from mtmegatron.config.derived import fits
from mtmegatron.layers.linear import Linear
from mtmegatron.layers.moe import Experts
from mtmegatron.precision.fp8 import Fp8


def use_fp8(modules: Iterable[tuple[str, nn.Module]], fp8: Fp8, high: Sequence[str]) -> None:
    """Lets linear layers and experts among named modules multiply in fp8, but for those whose names match a pattern of `high`."""
    for name, module in modules:
        if isinstance(module, Linear) and not fits(name, high):
            module.multiply_in_fp8(fp8)
        elif isinstance(module, Experts):
            for matrix, _ in module.named_parameters():
                if not fits(f"{name}.{matrix}", high):
                    module.multiply_in_fp8(fp8, matrix)
