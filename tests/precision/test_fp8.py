"""The three products of a linear layer in fp8: against float64, with bounds from the format; weights once a step; faults that show."""

from dataclasses import replace

import pytest
import torch

from mtmegatron.layers.build import Build
from mtmegatron.layers.linear import Linear, project
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.precision import fp8 as module
from mtmegatron.precision.amax import Histories
from mtmegatron.precision.fp8 import Fp8
from mtmegatron.precision.multiply import multiply, scalable, scaled
from mtmegatron.precision.quantise import Cut, Grid, amax, quantise, scale_of
from mtmegatron.precision.recipes import RECIPES

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNIT = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # relative half step of normal codes
LEAST = {E4M3: 2.0**-10 / 448, E5M2: 2.0**-17 / 57344}  # half of the smallest step, relative to the largest number of the block
FORMATS = {"e4m3": (E4M3, E4M3), "hybrid": (E4M3, E5M2)}


def layers_of(recipe, outputs=(48, 32), inputs=64, dtype=torch.float32, format="e4m3", keep=True, bias=False):
    """Layers that share an input, in fp8, their weights drawn; and what they have in common."""
    build = Build(Mesh(Layout()), dtype)
    layers = [Linear(inputs, n, build, split="columns", bias=bias, std=1.0) for n in outputs]
    found = RECIPES[recipe]
    histories = Histories((build.tensor,), 4, 0, 1) if found.delayed else None
    fp8 = Fp8(found, format, build.layout, 0, keep=keep, histories=histories)
    for number, layer in enumerate(layers):
        torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(number))
        layer.multiply_in_fp8(fp8)
        if bias:
            torch.nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(number))
    fp8.start(0)
    return layers, fp8


def inputs_of(tokens, width, kind="normal"):
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(7))
    if kind == "outliers":
        x[:, 3] *= 100
        x[1] *= 30
    elif kind == "tiny":
        x *= 1e-30
    elif kind == "huge":
        x *= 1e30
    elif kind == "zeros":
        x.zero_()
    return x


def error_of(x, largest, dtype, power_of_two):
    """Bound on the error of quantising x, where `largest` >= amax of its block: a power of two may double the scale."""
    return x.abs() * UNIT[dtype] + largest * LEAST[dtype] * (2 if power_of_two else 1)


def bound(a, b, a_error, b_error):
    """|Q(a) Q(b) - a b| <= Ea |b| + |a| Eb + Ea Eb, plus accumulation in fp32; all products of matrices [kept, contracted]."""
    quantising = a_error @ b.abs().t() + a.abs() @ b_error.t() + a_error @ b_error.t()
    return quantising * (1 + 1e-4) + 2 * a.shape[1] * torch.finfo(torch.float32).eps * (a.abs() @ b.abs().t())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("kind", ["normal", "outliers", "tiny", "huge", "zeros"])
def test_the_products_are_those_of_float64_to_the_precision_of_the_format(recipe, format, kind):
    """M08 too: 31 tokens, 64 inputs, 48 and 32 outputs are multiples of no block."""
    layers, fp8 = layers_of(recipe, format=format)
    x = inputs_of(31, 64, kind).requires_grad_()
    y = project(x, *layers)
    dy = inputs_of(31, 80) * 1e-3
    y.backward(dy)
    weights = [layer.weight.detach().double() for layer in layers]
    w, wide, gradient, two = torch.cat(weights), x.detach().double(), dy.double(), RECIPES[recipe].power_of_two
    forward, backward = FORMATS[format]
    ex = error_of(wide, wide.abs().max(), forward, two)
    ew = torch.cat([error_of(one, one.abs().max(), forward, two) for one in weights])
    ed = error_of(gradient, gradient.abs().max(), backward, two)
    for found, a, b, ea, eb in (
        (y.detach(), wide, w, ex, ew),
        (x.grad, gradient, w.t(), ed, ew.t()),
        (torch.cat([layer.weight.grad for layer in layers]), gradient.t(), wide.t(), ed.t(), ex.t()),
    ):
        assert bool(((found.double() - a @ b.t()).abs() <= bound(a, b, ea, eb)).all())


@pytest.mark.parametrize("recipe, most", [("tensorwise", 4e-2), ("rowwise", 4e-2), ("blockwise", 4e-2), ("mxfp8", 4.5e-2)])
def test_the_error_of_ordinary_numbers_is_that_of_three_bits(recipe, most):
    """Half a step of 2^-4 spread evenly over an octave is 2.6 % rms of a number, and sqrt(2) of that in a product of two."""
    layers, fp8 = layers_of(recipe, outputs=(128,), inputs=512)
    x = inputs_of(256, 512)
    found, right = project(x, *layers).double(), x.double() @ layers[0].weight.detach().double().t()
    assert 1e-2 < (found - right).norm() / right.norm() < most


def test_finer_blocks_lose_less_to_outliers():
    x = inputs_of(256, 512)
    x[5, 100] = 1e5
    errors = {}
    for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8"):
        layers, fp8 = layers_of(recipe, outputs=(64,), inputs=512)
        found, right = project(x, *layers).double(), x.double() @ layers[0].weight.detach().double().t()
        others = torch.arange(256) != 5
        errors[recipe] = float((found - right).detach()[others].norm() / right[others].norm())
    assert errors["tensorwise"] > 0.1 > max(errors[r] for r in ("rowwise", "blockwise", "mxfp8"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_shows_in_every_product(recipe, bad):
    layers, fp8 = layers_of(recipe)
    x = inputs_of(31, 64)
    x[2, 5] = bad
    x.requires_grad_()
    y = project(x, *layers)
    assert not y[2].isfinite().any()
    dy = torch.ones_like(y)
    dy[4, 1] = bad
    y.backward(dy)
    assert not x.grad[4].isfinite().any()
    assert not layers[0].weight.grad[1].isfinite().any() and not layers[0].weight.grad[:, 5].isfinite().any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_is_quantised_once_a_step_whatever_the_micro_batches(recipe, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "quantise", lambda x, *rest: seen.append(x.data_ptr()) or quantise(x, *rest))
    layers, fp8 = layers_of(recipe)
    pointers = {layer.weight.data_ptr() for layer in layers}
    both_ways = RECIPES[recipe].weight[0] != RECIPES[recipe].weight[1]
    for step in range(2):
        fp8.start(0)
        seen.clear()
        for _ in range(3):
            project(inputs_of(8, 64).requires_grad_(), *layers).sum().backward()
        assert sum(pointer in pointers for pointer in seen) == 2 * (2 if both_ways else 1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_new_weights_are_quantised_anew(recipe):
    layers, fp8 = layers_of(recipe)
    x = inputs_of(8, 64)
    before = project(x, *layers)
    with torch.no_grad():
        layers[0].weight.mul_(2)
    fp8.start(1)
    assert torch.equal(project(x, *layers)[:, :48], 2 * before[:, :48])


@pytest.mark.parametrize("recipe", RECIPES)
def test_keeping_scales_alone_gives_the_same_bits(recipe):
    """As with ZeRO 3."""
    results = []
    for keep in (True, False):
        layers, fp8 = layers_of(recipe, keep=keep)
        x = inputs_of(8, 64).requires_grad_()
        for _ in range(2):
            y = project(x, *layers)
            y.square().sum().backward()
        results.append((y, x.grad, layers[0].weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert not any(isinstance(kept, module.Quantised) for kept in fp8.weights.values())


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_a_weight_has_the_same_scale_alone_and_beside_others(recipe):
    """Query, key and value lie side by side in memory in some layouts and not in others."""
    layers, fp8 = layers_of(recipe)
    with torch.no_grad():
        layers[1].weight.mul_(1000)
    x = inputs_of(8, 64)
    assert torch.equal(project(x, *layers)[:, :48], project(x, layers[0]))


def test_layers_of_which_one_stays_high_are_used_together():
    layers, fp8 = layers_of("rowwise")
    layers[1].moves = replace(layers[1].moves, gemm=layers[1].build.gemm)
    x = inputs_of(8, 64)
    y = project(x, *layers)
    assert torch.equal(y[:, 48:], x @ layers[1].weight.t()) and torch.equal(y[:, :48], project(x, layers[0]))


def test_a_bias_is_added_after_the_product():
    layers, fp8 = layers_of("rowwise", bias=True)
    x = inputs_of(8, 64)
    bias = torch.cat([layer.bias for layer in layers])
    plain, _ = layers_of("rowwise")
    assert torch.equal(project(x, *layers), project(x, *plain) + bias)


# ---- the device's own products, which torch has on a CPU too ----


@pytest.mark.parametrize("block", [(None, None), (1, None)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [(32, 48, 64), (31, 20, 33)])
def test_the_scaled_product_of_the_device_is_that_of_the_values(block, dtype, size):
    m, n, k = size
    a, b = torch.randn(k, m).t(), torch.randn(n, k)
    operands = []
    for x, kind in ((a, dtype), (b, E4M3)):
        grid = Grid(Cut.of(x.shape[0], block[0]), Cut.of(x.shape[1], block[1]))
        operands.append(quantise(x, grid, scale_of(amax(x, grid), kind), kind))
    assert scalable(*operands)
    found, right = scaled(*operands), multiply(*operands, torch.float64, hardware=False)
    step = torch.finfo(found.dtype).eps + 2 * k * torch.finfo(torch.float32).eps
    scale = operands[0].values(torch.float64).abs() @ operands[1].values(torch.float64).abs().t()
    assert found.shape == (m, n) and bool(((found.double() - right).abs() <= step * scale).all())


def test_blocks_along_the_contracted_dim_are_not_for_the_device():
    x = torch.randn(8, 256)
    grid = Grid(Cut.of(8, 1), Cut.of(256, 128))
    q = quantise(x, grid, scale_of(amax(x, grid), E4M3), E4M3)
    assert not scalable(q, q)


# ---- delayed scales ----


def test_delayed_scales_are_of_the_steps_before():
    layers, fp8 = layers_of("delayed", outputs=(48,))
    weight, histories = layers[0].weight, fp8.histories
    largest = []
    for step in range(6):
        fp8.start(step)
        x = inputs_of(8, 64) * (step + 1)
        project(x, *layers)
        project(x * 0.5, *layers)  # a second micro-batch
        largest.insert(0, x.abs().max())
        histories.finish()
    assert torch.equal(layers[0].amax_history[0], torch.stack(largest[:4]))
    assert torch.equal(layers[0].amax_history[1], weight.detach().abs().max().expand(4))
    fp8.start(6)
    found = histories.largest(weight, 0, torch.ones(1, 1))
    assert found.item() == max(largest[:4])


def test_the_margin_leaves_room_and_the_interval_holds_scales():
    layers, fp8 = layers_of("delayed", outputs=(48,))
    weight, histories = layers[0].weight, fp8.histories
    histories.margin, histories.interval = 2, 2
    layers[0].amax_history[0] = torch.tensor([7.0, 5.0, 3.0, 1.0])
    used = []
    for updates in (4, 5):
        fp8.start(updates)
        used.append(histories.largest(weight, 0, torch.ones(1, 1)).item())
    assert used == [4 * 7.0, 4 * 5.0]  # at 5 updates the scales are those of 4 updates, before the newest was known


def test_before_there_is_a_history_scales_are_those_of_the_numbers():
    delayed, current = layers_of("delayed")[0], layers_of("tensorwise")[0]
    x = inputs_of(8, 64) * 1e-6
    assert torch.equal(project(x, *delayed), project(x, *current))


def test_numbers_beyond_the_history_become_the_largest_code():
    layers, fp8 = layers_of("delayed", outputs=(48,))
    layers[0].amax_history[:] = 1.0
    fp8.start(1)
    with torch.no_grad():
        layers[0].weight.copy_(torch.eye(48, 64))
    y = project(torch.full((1, 64), 5.0), *layers)
    assert torch.allclose(y, torch.ones(1, 48), rtol=1e-6)


def test_an_update_that_is_not_made_leaves_the_history():
    layers, fp8 = layers_of("delayed")
    x = inputs_of(8, 64)
    x[0, 0] = torch.inf
    project(x, *layers)
    fp8.start(0)  # the next step, without `finish`
    project(inputs_of(8, 64), *layers)
    fp8.histories.finish()
    assert layers[0].amax_history.isfinite().all() and layers[0].amax_history[0, 0] > 0
