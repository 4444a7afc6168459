"""Moments in fp8: codes in e4m3 of one scale for each parameter, as in FP8-LM (Peng et al. 2023, 2310.18313, section 2.2).

Notable:
- Scales are powers of two. So what is between 2^-6 and 448 scales has the same two neighbours whatever the scale; bf16 holds every code times its
  scale; and numbers that one scale holds are held by each smaller one that reaches the largest of them. That is why a checkpoint needs no scales:
  any part of a parameter finds, from its own largest number, one that holds it as it was.
- e4m3 has neither infinities nor a code beyond 448 but NaN, which is not made here.
"""

import torch
from torch import Tensor

from mtmegatron.precision.quantise import decoded, scale_of

FP8 = torch.float8_e4m3fn
SMALLEST_NORMAL, LAST = 2.0**-6, 0x7E  # below the first the codes are 2^-9 apart; the second is that of 448
LEAST_SCALE = 2.0**-100  # of which 2^-9, the smallest code, is well in the range of bf16


def scale_for(most: Tensor) -> Tensor:
    """2^ceil(log2(most / 448)), the least power of two with which codes reach `most`; NaN where that is not finite."""
    return scale_of(most, FP8, power_of_two=True).clamp_min(LEAST_SCALE)


def largest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """max |x| of numbers, or of codes; none of them takes more memory."""
    if x.dtype != FP8:
        return torch.stack(torch.aminmax(x)).abs().amax().to(dtype)
    # patterns rise with the size: those of negative numbers are the last without a sign, and the first with one
    positive, negative = x.view(torch.int8).max(), x.view(torch.uint8).max().to(torch.int16) - 128
    return decoded(torch.maximum(positive, negative).clamp_min(0).to(torch.uint8).view(FP8), dtype)


def coded(x: Tensor, bits: Tensor) -> Tensor:
    """x in e4m3: of its two neighbours the larger with the probability of how far x is on the way to it, by the lowest 16 of `bits`.

    e4m3 has the pattern of fp32 from its seventh exponent on, without the last 20 bits: random ones are added to them, as in `rounded`; half a
    step of 2^-16 centres what 16 bits leave open. Numbers below the smallest normal one are moved up by it, where fp32 has their steps. Codes
    stay as they are; |x| above 448 becomes that."""
    size = x.abs().to(torch.float32)
    small = (size < SMALLEST_NORMAL).view(torch.uint8)
    pattern = size.add(small, alpha=SMALLEST_NORMAL).view(torch.int32).add_((bits.to(torch.int32) << 4 | 8).bitwise_and_(0xFFFFF))
    code = (pattern >> 20).sub_(120 << 3).sub_(small, alpha=8).clamp_(max=LAST)
    return (code.to(torch.uint8) | (x < 0).view(torch.uint8) << 7).view(FP8)
