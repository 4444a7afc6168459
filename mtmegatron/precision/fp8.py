"""The three products of a linear layer on operands in 8-bit floats, with scales that are the same in every layout.

Notable:
- Every operand is quantised as a matrix [kept, contracted] by the blocks of its recipe. Where ranks hold parts of one block they agree on its largest
  number first: over `tensor` for what a layer splits, over `context` (and `tensor`, where that shares the tokens) for what spans tokens. Data ranks
  do not: each micro-batch has its own scales, so it does not matter which rank has it.
- Weights that share an input are quantised one by one, and so are experts: a scale does not depend on what lies beside a matrix in memory.
- At experts tokens of several micro-batches meet, in other companies in other layouts. There each token has its own scales, and nothing is quantised
  along tokens: weight gradients are those of `Gemm`.
- Under sequence parallel the codes of activations travel in place of numbers of 16 bits, and their scales: what arrives is what would be made there.
- A weight is quantised once a step; with ZeRO 3, where whole weights come and go, its scales are kept and its codes are made again.
- Products are accumulated in fp32 or wider, and weight gradients go to the sums in their type.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from mtmegatron.layout import Layout
from mtmegatron.mesh import Axis
from mtmegatron.precision.amax import Histories
from mtmegatron.precision.gemm import Gemm
from mtmegatron.precision.multiply import multiply
from mtmegatron.precision.quantise import (
    Block,
    Cut,
    Grid,
    Quantised,
    amax,
    quantise,
    scale_of,
)
from mtmegatron.precision.recipes import FORMATS, Recipe


@dataclass(frozen=True)
class Dim:
    """A dim of an operand: the axes whose ranks hold parts of it, its whole size, where this part and the part of each rank begin."""

    axes: tuple[Axis, ...] = ()
    size: int = 0
    start: int = 0
    starts: tuple[int, ...] = ()

    def shared(self, block: int | None) -> bool:
        """Whether a block of so many elements lies on several ranks."""
        return any(start % block for start in self.starts) if block else any(axis.size > 1 for axis in self.axes)


@dataclass(frozen=True)
class Operand:
    """What is multiplied: its dims (kept, contracted), its blocks, its type; `history`: the layer and row of its maxima, if scales may be delayed."""

    dims: tuple[Dim, Dim]
    block: Block
    dtype: torch.dtype
    history: tuple[nn.Parameter, int] | None = None

    def grid(self, x: Tensor) -> Grid:
        return Grid(*(Cut.of(size, block, dim.start) for size, block, dim in zip(x.shape[-2:], self.block, self.dims)))

    def t(self) -> "Operand":
        return Operand(self.dims[::-1], self.block[::-1], self.dtype, self.history)


INPUT, WEIGHT, GRADIENT = range(3)  # rows of a history


@dataclass(eq=False)
class Fp8:
    """What the layers of a rank have in common: recipe, format, quantised weights of this step, maxima of earlier steps.

    `hardware`: the device multiplies 8-bit floats itself; `keep`: codes of weights are kept through a step."""

    recipe: Recipe
    format: str
    layout: Layout
    rank: int
    hardware: bool = False
    keep: bool = True
    histories: Histories | None = None
    weights: dict[tuple[nn.Parameter, bool], Quantised | Tensor] = field(default_factory=dict)

    def start(self, updates: int) -> None:
        """Before the first forward after weights may have changed."""
        self.weights.clear()
        if self.histories is not None:
            self.histories.start(updates)

    def quantised(self, x: Tensor, operand: Operand) -> Quantised:
        grid = operand.grid(x)
        return quantise(x, grid, self._scale(x, grid, operand), operand.dtype)

    def weight(self, w: nn.Parameter, operand: Operand, transposed: bool) -> Quantised:
        """W [out, in] or those of all experts [E, out, in], or the transpose: the same codes where blocks are square."""
        square = operand.block[0] == operand.block[1]
        key, turned = (w, transposed and not square), transposed and square
        found = self.weights.get(key)
        if not isinstance(found, Quantised):
            operand, x = (operand.t(), w.detach()) if turned else (operand, w.detach().mT if transposed else w.detach())
            grid = operand.grid(x)
            scale = self._scale(x, grid, operand) if found is None else found
            found = quantise(x, grid, scale, operand.dtype)
            self.weights[key] = found if self.keep else scale
        return found.t() if turned else found

    def dim(self, w: nn.Parameter, dim: int, axes: tuple[Axis, ...]) -> Dim:
        """A dim of a weight that these axes split, with what its placement says about the parts of the ranks."""
        if all(axis.size == 1 for axis in axes):
            return Dim()
        starts = tuple(w.placement.offset_and_size(self.layout, rank)[0][dim] for axis in axes for rank in axis.ranks)
        return Dim(axes, w.placement.shape[dim], w.placement.offset_and_size(self.layout, self.rank)[0][dim], starts)

    def _scale(self, x: Tensor, grid: Grid, operand: Operand) -> Tensor:
        found = amax(x, grid)
        if self.histories is not None and operand.history is not None:
            layer, row = operand.history
            earlier = self.histories.largest(layer, row, found)
            if earlier is not None:
                return scale_of(earlier, operand.dtype)
        return scale_of(agreed(found, grid, operand), operand.dtype, self.recipe.power_of_two)


def agreed(found: Tensor, grid: Grid, operand: Operand) -> Tensor:
    """The largest number of each local block over all ranks that hold a part of it."""
    for along, dim, block, cut in zip((-2, -1), operand.dims, operand.block, (grid.rows, grid.columns)):
        if not dim.shared(block) or not found.numel():  # no rows for these experts, on any of the ranks
            continue
        own = found.contiguous()
        if block is not None:
            shape = list(found.shape)
            shape[along] = -(-dim.size // block)
            found = found.new_zeros(shape)
            own = found.narrow(along, dim.start // block, cut.count).copy_(own)
        else:
            found = own
        for axis in dim.axes:
            axis.all_reduce(found, "max")
        found = own
    return found


def gathered(a: Quantised, axis: Axis) -> Quantised:
    """The rows of all ranks, which have either scales of their own or one in common."""
    codes, rows = axis.all_gather(a.codes.view(torch.uint8)).view(a.codes.dtype), a.grid.rows
    if rows.block == 1:
        return Quantised(codes, axis.all_gather(a.scale), replace(a.grid, rows=replace(rows, size=len(codes))))
    return Quantised(codes, a.scale, replace(a.grid, rows=Cut.of(len(codes), None)))


@dataclass(frozen=True)
class Fp8Gemm:
    """The products of one layer, or of some that share an input.

    `inputs`, `outputs`, `tokens`: the axes whose ranks hold parts of the weight's dims, and of the tokens that the layer sees."""

    common: Fp8
    inputs: tuple[Axis, ...]
    outputs: tuple[Axis, ...]
    tokens: tuple[Axis, ...]

    def products(self, x: Tensor, weights: Sequence[nn.Parameter], bias: Tensor | None, gather: Axis | None = None) -> Tensor:
        """Y = X [W_1; W_2; ..]ᵀ + b; with `gather`, X is that of all ranks of an axis: its codes travel. Shapes: x [T, in], weights [out, in] ->
        [T, sum of out], or [T ranks, ..]."""
        recipe, wide = self.common.recipe, torch.promote_types(x.dtype, torch.float32)
        tokens = Dim((gather, *self.tokens) if gather else self.tokens)
        a = self.common.quantised(x, self._operand((tokens, self._dim(weights[0], 1)), recipe.tokens, weights[0], INPUT))
        a = gathered(a, gather) if gather else a
        y = torch.cat([multiply(a, self._weight(w, False), wide, self.common.hardware) for w in weights], 1)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def input_gradients(self, dy: Tensor, weights: Sequence[nn.Parameter]) -> Tensor:
        """dX = dY_1 W_1 + dY_2 W_2 + .."""
        recipe, wide = self.common.recipe, torch.promote_types(dy.dtype, torch.float32)
        total = None
        for w, part in zip(weights, dy.split([w.shape[0] for w in weights], 1)):
            a = self.common.quantised(part, self._operand((Dim(self.tokens), self._dim(w, 0)), recipe.tokens, w, GRADIENT))
            dx = multiply(a, self._weight(w, True), wide, self.common.hardware)
            total = dx if total is None else total.add_(dx)
        return total.to(dy.dtype)

    def weight_gradients(self, sums: Sequence[Tensor], dy: Tensor, x: Tensor, weights: Sequence[nn.Parameter]) -> None:
        """sums_i += dY_iᵀ X, in their type."""
        block, tokens = self.common.recipe.channels, Dim(self.tokens)
        b = self.common.quantised(x.t(), self._operand((self._dim(weights[0], 1), tokens), block, weights[0], INPUT))
        for total, w, part in zip(sums, weights, dy.split([w.shape[0] for w in weights], 1)):
            a = self.common.quantised(part.t(), self._operand((self._dim(w, 0), tokens), block, w, GRADIENT))
            multiply(a, b, total.dtype, self.common.hardware, total)

    def _weight(self, w: nn.Parameter, transposed: bool) -> Quantised:
        dims = self._dim(w, 0), self._dim(w, 1)
        operand = self._operand(dims[::-1] if transposed else dims, self.common.recipe.weight, w, WEIGHT)
        return self.common.weight(w, operand, transposed)

    def _operand(self, dims: tuple[Dim, Dim], block: Block, w: nn.Parameter, row: int) -> Operand:
        return Operand(dims, block, FORMATS[self.common.format][row == GRADIENT], (w, row))

    def _dim(self, w: nn.Parameter, dim: int) -> Dim:
        return self.common.dim(w, dim, (self.outputs, self.inputs)[dim])


@dataclass(frozen=True)
class Fp8Experts(Gemm):
    """The products of experts, on operands that are quantised before rows are cut into those of each expert. Weight gradients are those of `Gemm`.

    `columns`: the axis whose ranks hold parts of the experts' ffn dim."""

    common: Fp8 = field(kw_only=True)
    columns: Axis = field(kw_only=True)

    def tokens(self, x: Tensor, w: nn.Parameter, gradient: bool) -> Quantised:
        """Inputs of w, or gradients of its outputs, with scales for each token. Shapes: x [R, in] or [R, out], w [E, out, in]."""
        dims = Dim(), self._dim(w, 1 if gradient else 2)
        return self.common.quantised(x, Operand(dims, self.common.recipe.rows, FORMATS[self.common.format][gradient]))

    def weight(self, w: nn.Parameter, transposed: bool) -> Quantised:
        """W [E, out, in], or [E, in, out], with scales for each expert."""
        dims = self._dim(w, 1), self._dim(w, 2)
        operand = Operand(dims[::-1] if transposed else dims, self.common.recipe.weight, FORMATS[self.common.format][0])
        return self.common.weight(w, operand, transposed)

    def forward(self, x: Quantised, weight: Quantised) -> Tensor:
        """Y = X Wᵀ of one expert, in fp32 or wider."""
        return multiply(x, weight, x.scale.dtype, self.common.hardware)

    def input_gradient(self, dy: Quantised, weight: Quantised) -> Tensor:
        """dX = dY W of one expert, in fp32 or wider; `weight` is the transpose."""
        return multiply(dy, weight, dy.scale.dtype, self.common.hardware)

    def _dim(self, w: nn.Parameter, dim: int) -> Dim:
        return self.common.dim(w, dim, (self.columns,) if (dim, "expert_tensor") in w.placement.split else ())
