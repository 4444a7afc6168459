"""The three products of a linear layer on operands in 8-bit floats, with scales that are the same in every layout.

Notable:
- Every operand is quantised as a matrix [kept, contracted] by the blocks of its recipe. Where ranks hold parts of one block they agree on its largest
  number first: over `tensor` for what a layer splits, over `context` (and `tensor`, where that shares the tokens) for what spans tokens. Data ranks
  do not: each micro-batch has its own scales, so it does not matter which rank has it.
- Weights that share an input are quantised one by one: a scale does not depend on what lies beside a matrix in memory.
- A weight is quantised once a step; with ZeRO 3, where whole weights come and go, its scales are kept and its codes are made again.
- Products are accumulated in fp32 or wider, and weight gradients go to the sums in their type.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mtmegatron.layout import Layout
from mtmegatron.mesh import Axis
from mtmegatron.precision.amax import Histories
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
    """What is multiplied: its dims (kept, contracted), its blocks, its type; `history`: the layer and row of its maxima, for delayed scales."""

    dims: tuple[Dim, Dim]
    block: Block
    dtype: torch.dtype
    history: tuple[nn.Parameter, int]

    def grid(self, x: Tensor) -> Grid:
        return Grid(*(Cut.of(size, block, dim.start) for size, block, dim in zip(x.shape, self.block, self.dims)))

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
        """W [out, in], or its transpose: the same codes where blocks are square."""
        square = operand.block[0] == operand.block[1]
        key, turned = (w, transposed and not square), transposed and square
        found = self.weights.get(key)
        if not isinstance(found, Quantised):
            operand, x = (operand.t(), w.detach()) if turned else (operand, w.detach().t() if transposed else w.detach())
            grid = operand.grid(x)
            scale = self._scale(x, grid, operand) if found is None else found
            found = quantise(x, grid, scale, operand.dtype)
            self.weights[key] = found if self.keep else scale
        return found.t() if turned else found

    def _scale(self, x: Tensor, grid: Grid, operand: Operand) -> Tensor:
        found = amax(x, grid)
        if self.histories is not None:
            layer, row = operand.history
            earlier = self.histories.largest(layer, row, found)
            if earlier is not None:
                return scale_of(earlier, operand.dtype)
        return scale_of(agreed(found, grid, operand), operand.dtype, self.recipe.power_of_two)


def agreed(found: Tensor, grid: Grid, operand: Operand) -> Tensor:
    """The largest number of each local block over all ranks that hold a part of it."""
    for along, (dim, block, cut) in enumerate(zip(operand.dims, operand.block, (grid.rows, grid.columns))):
        if not dim.shared(block):
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


@dataclass(frozen=True)
class Fp8Gemm:
    """The products of one layer, or of some that share an input.

    `inputs`, `outputs`, `tokens`: the axes whose ranks hold parts of the weight's dims, and of the tokens that the layer sees."""

    common: Fp8
    inputs: tuple[Axis, ...]
    outputs: tuple[Axis, ...]
    tokens: tuple[Axis, ...]

    def products(self, x: Tensor, weights: Sequence[nn.Parameter], bias: Tensor | None) -> Tensor:
        """Y = X [W_1; W_2; ..]ᵀ + b. Shapes: x [T, in], weights [out, in] -> [T, sum of out]."""
        recipe, wide = self.common.recipe, torch.promote_types(x.dtype, torch.float32)
        inputs = self._dim(weights[0], 1)
        a = self.common.quantised(x, self._operand((Dim(self.tokens), inputs), recipe.tokens, weights[0], INPUT))
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
        """A dim of a weight, with what its placement says about the parts of the ranks."""
        axes, placement = (self.outputs, self.inputs)[dim], w.placement
        if all(axis.size == 1 for axis in axes):
            return Dim()
        starts = tuple(placement.offset_and_size(self.common.layout, rank)[0][dim] for axis in axes for rank in axis.ranks)
        own = placement.offset_and_size(self.common.layout, self.common.rank)[0][dim]
        return Dim(axes, placement.shape[dim], own, starts)
