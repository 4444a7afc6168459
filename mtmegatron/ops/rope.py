"""Rotary position embedding: the angle tables, their long-context scalings, and the rotation of heads.

Notable: angles are computed in float64 and rounded once, so that a table does not depend on the device or on how
positions were split. A rotation is linear, so its backward is the opposite rotation and needs no activation.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mtmegatron.errors import UserError


def inverse_frequencies(size: int, base: float, scaling: dict | None = None) -> tuple[Tensor, float]:
    """(frequencies [size/2] in radians per position, float64; factor on cos and sin), base^(-2i/size) before scaling.

    `scaling` is the dictionary `rope_scaling` (`rope_parameters`) of a Hugging Face configuration, with `rope_type` one
    of SCALINGS; None is the plain embedding (Su et al. 2021, arXiv 2104.09864). Raises UserError for an unknown type or
    a missing entry.
    """
    plain = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if scaling is None:
        return plain, 1.0
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SCALINGS:
        raise UserError(f"rope scaling type {kind!r} is not known: use one of {', '.join(SCALINGS)}")
    try:
        return SCALINGS[kind](plain, base, scaling)
    except KeyError as missing:
        raise UserError(f"rope scaling {kind!r} lacks the entry {missing}: add it to the configuration") from None


def score_factor(scaling: dict | None) -> float:
    """Factor on the scores of latent attention: (0.1 m ln(factor) + 1)^2 where the scaling has m = `mscale_all_dim`, else 1.

    With it all channels of query and key have the temperature m, and cos and sin carry the rest, `mscale` over it
    (DeepSeek-V2's model code; the paper, 2405.04434, 3.1.4, has the factor as sqrt(t))."""
    mscale = (scaling or {}).get("mscale_all_dim")
    return _temperature(scaling["factor"], mscale) ** 2 if mscale else 1.0


def rope_table(
    positions_T: Tensor, size: int, base: float, dtype: torch.dtype = torch.float32, scaling: dict | None = None
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of position times frequency.

    Shapes: positions T, any integer or float type; both results [T, size/2] on the device of positions.
    """
    frequencies, factor = inverse_frequencies(size, base, scaling)
    angles = positions_T.to("cpu", torch.float64)[:, None] * frequencies
    return tuple((f(angles) * factor).to(positions_T.device, dtype) for f in (torch.cos, torch.sin))


def rope(x_TNH: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates channel pairs of every head, (a, b) -> (a cos - b sin, b cos + a sin); further channels pass through.

    A pair is (i, i + size/2), Hugging Face's order for Llama, or with `interleaved` (2i, 2i + 1) as in the paper. The
    products are at least fp32 and rounded once. Backward rotates by the negative angle and saves the tables alone.

    Shapes: x [T, N, H] of any strides, query and key heads together if they lie together; cos and sin [T, size/2];
    result as x.
    """
    return _Rope.apply(x_TNH, cos, sin, interleaved)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    wide, size = torch.promote_types(x.dtype, torch.float32), 2 * cos.shape[-1]
    turned = (_rotate_pairs if interleaved else _rotate_halves)(x[..., :size].to(wide), cos.to(wide), sin.to(wide))
    if size == x.shape[-1]:
        return turned.to(x.dtype)
    return torch.cat((turned.to(x.dtype), x[..., size:]), dim=-1)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One pass over whole heads, then one over each half: fewer short inner loops than four products of halves."""
    out = torch.mul(x, torch.cat((cos, cos), -1)[:, None])
    (first, second), (out_first, out_second), sin = x.chunk(2, -1), out.chunk(2, -1), sin[:, None]
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return out


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A pair is a complex number and the rotation a complex product."""
    pairs = x.unflatten(-1, (-1, 2))
    if any(step % 2 for step in (x.storage_offset(), *x.stride()[:-1])) or x.stride(-1) != 1:
        pairs = pairs.contiguous()  # a complex view needs whole pairs
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin)[:, None]).flatten(-2)


def rope_reference(x_TNH: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`rope` by its formula and autograd."""
    wide, size = torch.promote_types(x_TNH.dtype, torch.float32), 2 * cos.shape[-1]
    turned, rest = x_TNH[..., :size].to(wide), x_TNH[..., size:]
    cos, sin = cos[:, None].to(wide), sin[:, None].to(wide)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((out.to(x_TNH.dtype), rest), -1)


def _plain(plain: Tensor, base: float, scaling: dict) -> tuple[Tensor, float]:
    return plain, 1.0


def _linear(plain: Tensor, base: float, scaling: dict) -> tuple[Tensor, float]:
    """Positions divided by a factor (Chen et al. 2023, arXiv 2306.15595)."""
    return plain / scaling["factor"], 1.0


def _llama3(plain: Tensor, base: float, scaling: dict) -> tuple[Tensor, float]:
    """Long waves slowed by `factor`, short ones kept, a linear blend between (Llama 3.1)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / scaling["factor"]), 1.0


def _yarn(plain: Tensor, base: float, scaling: dict) -> tuple[Tensor, float]:
    """Blend by the turns inside the original context, and a temperature (Peng et al. 2023, arXiv 2309.00071)."""
    factor, size = scaling["factor"], 2 * len(plain)
    original = scaling["original_max_position_embeddings"]

    def dim_of(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001  # a step, not a division by zero
    slow = ((torch.arange(size // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return plain * (1 - slow + slow / factor), _yarn_temperature(factor, scaling)


def _yarn_temperature(factor: float, scaling: dict) -> float:
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return _temperature(factor, scaling["mscale"]) / _temperature(factor, scaling["mscale_all_dim"])
    return _temperature(factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


SCALINGS: dict[str, Callable[[Tensor, float, dict], tuple[Tensor, float]]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
