"""What every layer is given when it is made: the mesh, the types, the products, the queue of weight gradients.

Notable: this is an object and not a global, so two models on two meshes live side by side in one process.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from mtmegatron.layout import Layout
from mtmegatron.mesh import Axis, Mesh
from mtmegatron.parallel.canonical.exact import Exact
from mtmegatron.parallel.gradient import WeightQueue
from mtmegatron.parallel.offload import Offload
from mtmegatron.parallel.tensor import copy, gather_tokens, reduce, scatter_sum
from mtmegatron.placement import GRADIENT_AXES, Init, Placement, parameter
from mtmegatron.precision.gemm import Gemm
from mtmegatron.precision.scaling import LossScale


@dataclass
class Build:
    """Makes parameters and moves activations for the layers of one rank."""

    mesh: Mesh
    dtype: torch.dtype = torch.float32
    gemm: Gemm = field(default_factory=Gemm)
    queue: WeightQueue = field(default_factory=WeightQueue)
    context_kind: str = "allgather"
    recompute: frozenset[str] = frozenset()  # parts of a block that backward computes again
    offload: Offload | None = None  # of what blocks keep
    exact: Exact | None = None  # with canonical numerics
    loss_scale: LossScale | None = None  # in fp16

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def tensor(self) -> Axis:
        return self.mesh["tensor"]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes over which the gradient of a parameter used on this rank's tokens is a partial sum."""
        return GRADIENT_AXES + ("tensor",) if self.layout.sequence else GRADIENT_AXES

    def parameter(self, shape: tuple[int, ...], init: Init, decay: bool, split=(), summed=GRADIENT_AXES) -> nn.Parameter:
        return parameter(Placement(shape, init, decay, split, summed), self.layout, self.mesh.rank, self.dtype)

    def own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of what describes tokens: T -> T / tensor under sequence parallel."""
        return x.chunk(self.tensor.size)[self.tensor.rank] if self.layout.sequence else x

    def whole_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Activations of all tokens, for a layer whose weights are split: T / tensor -> T under sequence parallel."""
        return gather_tokens(x, self.tensor) if self.layout.sequence else copy(x, self.tensor)

    def sum_of_parts(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what the tensor ranks hold, on each rank's tokens: T -> T / tensor under sequence parallel."""
        return scatter_sum(x, self.tensor) if self.layout.sequence else reduce(x, self.tensor)
