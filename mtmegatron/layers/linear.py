"""A linear layer that says how its matrix is split.

Notable: Y = X Wᵀ + b.
- columns: W = [W_0; W_1; ..] by outputs; this rank computes Y_i = X W_iᵀ from all tokens;
- rows: W = [W_0 W_1 ..] by inputs; this rank computes X_i W_iᵀ, and the ranks' results are summed;
- None: every rank holds W.

`project` multiplies one input with several column layers as one matrix.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from mtmegatron.layers.build import Build
from mtmegatron.parallel.canonical import linear as canonical
from mtmegatron.parallel.canonical.linear import Cut
from mtmegatron.parallel.tensor import Moves, linear
from mtmegatron.placement import GRADIENT_AXES, Init
from mtmegatron.precision.amax import KINDS
from mtmegatron.precision.fp8 import Fp8, Fp8Gemm


class Linear(nn.Module):
    """Y = X Wᵀ + b, W of global shape [outputs, inputs].

    split: "columns", "rows" or None; `axis`: the axis that splits columns when it is not `tensor` (key/value heads fewer than ranks).
    Shapes: columns: [T', inputs] -> [T, outputs / t]; rows: [T, inputs / t] -> [T', outputs]; T' = T / t under sequence parallel, else T.
    """

    def __init__(self, inputs: int, outputs: int, build: Build, *, split: str | None, bias: bool, std: float, axis: str = "tensor"):
        super().__init__()
        sequence, many = build.layout.sequence, build.tensor.size > 1
        weight_split = {"columns": ((0, axis),), "rows": ((1, axis),), None: ()}[split]
        copies = ("key_value_copies",) if axis == "key_value" and build.layout.size("key_value_copies") > 1 else ()
        summed = build.token_axes if split is None else GRADIENT_AXES + copies
        self.weight = build.parameter((outputs, inputs), Init(std), True, weight_split, summed)
        self.bias = None
        if bias:
            own = ((0, axis),) if split == "columns" else ()
            self.bias = build.parameter((outputs,), Init(), False, own, summed if split == "columns" else build.token_axes)
        before = ("gather" if sequence else "copy") if split == "columns" and many else None
        after = ("scatter" if sequence else "reduce") if split == "rows" and many else None
        self.moves = Moves(build.tensor, build.gemm, build.queue, before, after)
        self.split, self.build, self.exact = split, build, build.exact
        self.cut = Cut.of(self.weight, build.exact, build.layout, build.mesh.rank) if build.exact else None

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self)

    def multiply_in_fp8(self, fp8: Fp8) -> None:
        """From now on this layer's products are made of 8-bit floats."""
        build, tensor = self.build, (self.build.tensor,)
        ways = {"columns": ((), tensor, ()), "rows": (tensor, (), ()), None: ((), (), tensor if build.layout.sequence else ())}
        inputs, outputs, tokens = ways[self.split]
        self.moves = replace(self.moves, gemm=Fp8Gemm(fp8, inputs, outputs, (*tokens, build.mesh["context"])))
        if fp8.histories is not None:
            self.register_buffer("amax_history", torch.zeros(KINDS, fp8.histories.steps, device=build.mesh.device))
            fp8.histories.add(self.weight, self.amax_history)


def project(x: Tensor, *layers: Linear) -> Tensor:
    """One input times several layers of the same split, their outputs side by side. Shapes: [T', in] -> [T, sum of local outputs]."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers)), "layers that are used together have a bias all or none"
    if layers[0].exact:
        return canonical.linear(x, [layer.cut for layer in layers], biases, layers[0].moves, layers[0].exact)
    if any(layer.moves != layers[0].moves for layer in layers):  # some of them in fp8
        return torch.cat([project(x, layer) for layer in layers], dim=1)
    return linear(x, [layer.weight for layer in layers], biases, layers[0].moves)
