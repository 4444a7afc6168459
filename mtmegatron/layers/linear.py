"""A linear layer that says how its matrix is split.

Notable: Y = X Wᵀ + b.
- columns: W = [W_0; W_1; ..] by outputs; this rank computes Y_i = X W_iᵀ from all tokens;
- rows: W = [W_0 W_1 ..] by inputs; this rank computes X_i W_iᵀ, and the ranks' results are summed;
- None: every rank holds W.

`project` multiplies one input with several column layers as one matrix.
"""

from torch import Tensor, nn

from mtmegatron.layers.build import Build
from mtmegatron.parallel.tensor import Moves, linear
from mtmegatron.placement import GRADIENT_AXES, Init


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

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self)


def project(x: Tensor, *layers: Linear) -> Tensor:
    """One input times several layers of the same split, their outputs side by side. Shapes: [T', in] -> [T, sum of local outputs]."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers)), "layers that are used together have a bias all or none"
    return linear(x, [layer.weight for layer in layers], biases, layers[0].moves)
