"""Normalisation layers: parameters around the operators of `ops/norm.py`."""

from torch import Tensor, nn

from mtmegatron.layers.build import Build
from mtmegatron.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from mtmegatron.parallel.canonical import rows
from mtmegatron.parallel.recompute import dropped
from mtmegatron.placement import Init


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with bias, over the last dim. `summed`: axes over which its gradient is a partial sum; default: those of tokens.

    Shapes: [T', D] -> [T', D], or heads [T, N, H] -> [T, N, H]."""

    def __init__(self, kind: str, width: int, eps: float, build: Build, summed: tuple[str, ...] | None = None):
        super().__init__()
        summed = summed or build.token_axes
        self.eps, self.again, self.exact = eps, "norm" in build.recompute, build.exact
        self.weight = build.parameter((width,), Init(constant=1.0), False, (), summed)
        self.bias = build.parameter((width,), Init(), False, (), summed) if kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self._norm(x)
        return dropped(y, self._norm, x) if self.again else y

    def after(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(s, norm(s)) of the residual sum s = x + delta, one operator forward and backward."""
        if self.exact:
            total = x + delta
            y = self._norm(total)
        elif self.bias is None:
            total, y = add_rms_norm(x, delta, self.weight, self.eps)
        else:
            total, y = add_layer_norm(x, delta, self.weight, self.bias, self.eps)
        return total, dropped(y, self._norm, total) if self.again else y

    def _norm(self, x: Tensor) -> Tensor:
        if self.exact:
            return rows.norm(x, self.weight, self.bias, self.eps, self.exact)
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)
