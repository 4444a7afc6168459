"""The feed-forward layer: columns in, rows out, with or without a gate."""

from functools import partial

from torch import Tensor, nn

from mtmegatron.config.model import ModelConfig
from mtmegatron.layers.build import Build
from mtmegatron.layers.linear import Linear, project
from mtmegatron.ops.activation import ACTIVATIONS
from mtmegatron.parallel.canonical.rows import wide
from mtmegatron.parallel.recompute import dropped, recomputed


class MLP(nn.Module):
    """Y = act(X W_upᵀ) W_downᵀ, or act(X W_gateᵀ, X W_upᵀ) W_downᵀ. Shapes: [T', D] -> [T', D]."""

    def __init__(self, model: ModelConfig, build: Build, out_std: float):
        super().__init__()
        self.recompute = build.recompute
        activation, gated = ACTIVATIONS[model.activation]
        self.activation = partial(wide, activation) if build.exact else activation
        width, ffn, bias, std = model.width, model.ffn, model.bias_mlp, model.init_std
        self.gate = Linear(width, ffn, build, split="columns", bias=bias, std=std) if gated else None
        self.up = Linear(width, ffn, build, split="columns", bias=bias, std=std)
        self.down = Linear(ffn, width, build, split="rows", bias=bias, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        if "up" in self.recompute:
            product = recomputed(self._inner, x)
            again = self._inner, x
        else:
            inner = self._up(x)
            product, again = self.activation(inner), (self.activation, inner)
        if "activation" in self.recompute:
            product = dropped(product, *again)
        return self.down(product)

    def _up(self, x: Tensor) -> Tensor:
        return project(x, self.gate, self.up) if self.gate is not None else self.up(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.activation(self._up(x))
