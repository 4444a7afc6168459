"""What the operator tests share: leaves of a dtype, gradients of two functions side by side, and a rounding bound."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Standard normal values that require a gradient; a dtype changes their rounding, not the draw."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def gradients(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    """[results..., gradients...] under fixed incoming gradients."""
    outs = function(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    outs = [o for o in outs if o.requires_grad]
    incoming = [leaf(*o.shape, dtype=o.dtype, seed=7).detach() for o in outs]
    return [o.detach() for o in outs] + list(torch.autograd.grad(outs, inputs, incoming))


def assert_near(actual: list[Tensor], expected: list[Tensor], roundings: float, size: float = 0.0) -> None:
    """Each pair differs by at most `roundings` half-ulps of its dtype at the size of its largest value.

    `size` is a lower bound of that size, for a result that is a difference of larger terms.
    """
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        error = (a.double() - e.double()).abs().max().item()
        bound = roundings * torch.finfo(a.dtype).eps / 2 * max(size, e.double().abs().max().item())
        assert error <= bound, f"pair {i}: error {error:.3g} above {bound:.3g}"


def double(*tensors: Tensor | None) -> list[Tensor | None]:
    """float64 copies of the (already rounded) values, as fresh leaves."""
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
