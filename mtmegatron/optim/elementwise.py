"""Optimizers whose update of an element needs that element alone: AdamW, Adam, SGD, Lion.

Notable: each function takes one run of elements, so a caller may cut the state anywhere. Besides torch's fused Adam they are made of single
operations, each exactly rounded, so a layout that cuts the elements elsewhere gets the same bits. `n.single` asks that of Adam, too
(canonical numerics), and where the moments have seen different numbers of updates, for which the fused one has no place.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mtmegatron.config.schema import OptimizerConfig


@dataclass(frozen=True)
class Numbers:
    """One update. `count`: updates made, this one included; `clip`: a factor on gradients that a fused update takes along.
    `variances`: of the updates made, those that took part in the second moment; 0: all."""

    config: OptimizerConfig
    lr: float
    decay: float
    count: int
    single: bool = False
    clip: float = 1.0
    variances: int = 0

    @property
    def decays(self) -> bool:
        """Whether there is a decay."""
        return self.decay != 0

    @property
    def first(self) -> float:
        """1 - beta1^count, without which the first moment is biased to zero."""
        return 1 - self.config.beta1**self.count

    @property
    def second(self) -> float:
        """sqrt(1 - beta2^count), the same of the root of the second."""
        return math.sqrt(1 - self.config.beta2 ** (self.variances or self.count))

    def fuses(self, kind: str) -> bool:
        """Whether the update of a kind is one function of torch's, which scales the gradient itself."""
        return kind in ("adamw", "adam") and not self.single


def adamw(n: Numbers, w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """w -= lr (m^ / (sqrt(v^) + eps) + decay w); m^, v^ the moments without their bias (Loshchilov & Hutter 2019, algorithm 2)."""
    if not n.single:
        return _fused(torch._fused_adamw_, n, w, g, m, v)
    w.mul_(1 - n.lr * n.decay)
    _adam_step(n, w, g, m, v)


def adam(n: Numbers, w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """The same with decay as a part of the gradient, g + decay w (Kingma & Ba 2015, algorithm 1, with L2)."""
    if not n.single:
        return _fused(torch._fused_adam_, n, w, g, m, v)
    _adam_step(n, w, coupled(n, w, g), m, v)


def sgd(n: Numbers, w: Tensor, g: Tensor, m: Tensor | None = None) -> None:
    """m = momentum m + g + decay w; w -= lr m, or with Nesterov lr (g + decay w + momentum m)."""
    w.sub_(ahead(n, coupled(n, w, g), m) * n.lr)


def lion(n: Numbers, w: Tensor, g: Tensor, m: Tensor) -> None:
    """w -= lr (sign(beta1 m + (1 - beta1) g) + decay w); m = beta2 m + (1 - beta2) g (Chen et al. 2023, 2302.06675, algorithm 2)."""
    c = n.config
    direction = (m * c.beta1).add_(g * (1 - c.beta1)).sign_()
    w.mul_(1 - n.lr * n.decay).sub_(direction.mul_(n.lr))
    m.mul_(c.beta2).add_(g * (1 - c.beta2))


def coupled(n: Numbers, w: Tensor, g: Tensor) -> Tensor:
    """g + decay w."""
    return g + w * n.decay if n.decays else g


def ahead(n: Numbers, g: Tensor, m: Tensor | None) -> Tensor:
    """The direction of momentum m = momentum m + g: m, or g + momentum m with Nesterov."""
    if m is None:
        return g
    momentum, nesterov = momentum_of(n.config)
    m.mul_(momentum).add_(g)
    return (m * momentum).add_(g) if nesterov else m


def momentum_of(c: OptimizerConfig) -> tuple[float, bool]:
    """(momentum, Nesterov) of sgd; of muon where that is the optimizer of the run."""
    muon = c.kind == "muon"
    return (0.95 if muon else 0.9) if c.momentum is None else c.momentum, muon if c.nesterov is None else c.nesterov


def direction(n: Numbers, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """m^ / (sqrt(v^) + eps), with the moments brought up to date."""
    c = n.config
    m.mul_(c.beta1).add_(g * (1 - c.beta1))
    v.mul_(c.beta2).add_(g.square() * (1 - c.beta2))
    return m / v.sqrt().mul_(1 / n.second).add_(c.eps)


def _adam_step(n: Numbers, w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    w.sub_(direction(n, g, m, v) * (n.lr / n.first))


def _fused(kernel, n: Numbers, w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    count = torch.tensor(float(n.count), device=w.device)
    scale = None if n.clip == 1.0 else torch.tensor(1.0 / n.clip, device=w.device)
    kernel(
        [w], [g], [m], [v], [], [count], lr=n.lr, beta1=n.config.beta1, beta2=n.config.beta2, weight_decay=n.decay, eps=n.config.eps,
        amsgrad=False, maximize=False, grad_scale=scale, found_inf=None,
    )  # fmt: skip


def follow(c: OptimizerConfig, w: Tensor, values: Tensor | None, average: Tensor | None) -> None:
    """After an update of w: its average, and the weights that the model computes with, where there are some apart from w."""
    if average is not None:
        average.mul_(c.ema).add_(w.to(average.dtype) * (1 - c.ema))
    if values is not None:
        values.copy_(w)


ELEMENTWISE = {"adamw": adamw, "adam": adam, "sgd": sgd, "lion": lion}


def moments_of(kind: str, c: OptimizerConfig) -> tuple[str, ...]:
    """Names of the tensors that an optimizer keeps for each element, in the order in which it takes them."""
    if kind == "sgd" and momentum_of(c)[0] == 0:
        return ()
    return {"sgd": ("momentum",), "muon": ("momentum",), "lion": ("exp_avg",), "frozen": ()}.get(kind, ("exp_avg", "exp_avg_sq"))
