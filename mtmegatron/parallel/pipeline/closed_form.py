"""Idle time of a rank as a formula, for the kinds and sizes where there is one; the simulator agrees exactly.

Notable: each formula is listed with the condition under which it holds. Messages that take time, and sizes outside the
condition, have no closed form here: then only the simulation tells.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """p ranks, v chunks on each, m micro-batches; F, I, W: costs of a full stage."""

    p: int
    v: int
    m: int
    F: float
    I: float  # noqa: E741, the letter of the schedule's action
    W: float

    @property
    def in_groups(self) -> bool:
        return self.v == 1 or self.m % self.p == 0

    @property
    def weights_fit(self) -> bool:
        return self.m >= self.p and self.W <= min(self.F, self.I)

    @property
    def equal(self) -> bool:
        return self.m >= self.p and self.F == self.I == self.W


@dataclass(frozen=True)
class _Form:
    text: str
    idle: Callable[[Sizes], float]
    holds: Callable[[Sizes], bool] = lambda sizes: True


_FLUSH = _Form("(p-1)(F+I+W)", lambda s: (s.p - 1) * (s.F + s.I + s.W))
_SKEW = _Form("(p-1)F/2", lambda s: (s.p - 1) * s.F / 2, lambda s: s.equal)
FORMS = {
    "gpipe": _FLUSH,
    "1f1b": _FLUSH,
    "interleaved": _Form("(p-1)(F+I+W)/v", lambda s: (s.p - 1) * (s.F + s.I + s.W) / s.v, lambda s: s.in_groups),
    "zb-h1": _Form("(p-1)(F+I-W)", lambda s: (s.p - 1) * (s.F + s.I - s.W), lambda s: s.weights_fit),
    "zb-v": _SKEW,
    "dualpipe-v": _SKEW,
    "forward_only": _Form("(p-1)F/v", lambda s: (s.p - 1) * s.F / s.v, lambda s: s.in_groups),
}


def idle_time(kind: str, sizes: Sizes) -> tuple[str, float] | None:
    """(formula, value) of each rank's idle time when messages take no time; None where no formula holds.

    gpipe and 1f1b 2104.04473 section 2.1, interleaved section 2.2 (p divides m); zb-h1 2401.10241 (m >= p, W no longer
    than F and I); zb-v 2405.15362 and dualpipe-v (m >= p, F = I = W).
    """
    form = FORMS[kind]
    return (form.text, form.idle(sizes)) if form.holds(sizes) else None
