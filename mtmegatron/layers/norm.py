"""Normalisation layers: parameters around the operators of `ops/norm.py`."""

from torch import Tensor, nn

from mtmegatron.layers.build import Build
from mtmegatron.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from mtmegatron.parallel.recompute import dropped
from mtmegatron.placement import Init


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with bias, over the width. Shapes: [T', D] -> [T', D]."""

    def __init__(self, kind: str, width: int, eps: float, build: Build):
        super().__init__()
        self.eps, self.again = eps, "norm" in build.recompute
        self.weight = build.parameter((width,), Init(constant=1.0), False, (), build.token_axes)
        self.bias = build.parameter((width,), Init(), False, (), build.token_axes) if kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self._norm(x)
        return dropped(y, lambda: self._norm(x)) if self.again else y

    def after(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(s, norm(s)) of the residual sum s = x + delta, one operator forward and backward."""
        if self.bias is None:
            total, y = add_rms_norm(x, delta, self.weight, self.eps)
        else:
            total, y = add_layer_norm(x, delta, self.weight, self.bias, self.eps)
        return total, dropped(y, lambda: self._norm(total)) if self.again else y

    def _norm(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)
