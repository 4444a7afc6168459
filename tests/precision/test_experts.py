"""Products of experts in fp8: against float64 and blocks taken one by one; what a scale depends on; which matrices are in fp8; faults."""

import math

import pytest
import torch
from torch import nn

from mtmegatron.config.constraints import check
from mtmegatron.errors import UserError
from mtmegatron.layers.build import Build
from mtmegatron.layers.moe import Experts
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.ops.grouped import grouped
from mtmegatron.parallel.gradient import WeightQueue
from mtmegatron.plan.collectives import step_counts, with_micro_batches
from mtmegatron.precision import fp8 as module
from mtmegatron.precision.amax import Histories
from mtmegatron.precision.fp8 import Fp8, Fp8Experts
from mtmegatron.precision.gemm import Gemm
from mtmegatron.precision.quantise import LARGEST, quantise
from mtmegatron.precision.recipes import FORMATS, RECIPES
from mtmegatron.verify.protocol import batches, laid_out
from tests.field.training import engine_of
from tests.tiny import tiny

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float32, torch.float64)}
COUNTS = [[3, 0, 27, 1], [0, 31, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
WIDTH, FFN = 136, 176  # multiples of no block that is longer than 8
MOE = {"moe": {"experts": 4, "ffn": 40, "shared": 1, "aux_loss": 0.01}}


def gemm_of(recipe: str, format: str = "e4m3", keep: bool = True, hardware: bool = False) -> Fp8Experts:
    mesh, found = Mesh(Layout()), RECIPES[recipe]
    histories = Histories((mesh["tensor"],), 4, 0, 1) if found.delayed else None
    fp8 = Fp8(found, format, mesh.layout, 0, keep=keep, hardware=hardware, histories=histories)
    fp8.start(0)
    return Fp8Experts(common=fp8, columns=mesh["expert_tensor"])


def matrices(outs: tuple[int, ...], width: int, dtype=torch.float64) -> list[nn.Parameter]:
    """Of four experts, each 10 times as large as the one before."""
    draw, build = torch.Generator().manual_seed(1), Build(Mesh(Layout()), dtype)
    made = [build.parameter((4, out, width), None, True, ((0, "expert"),), ("expert_data",)) for out in outs]
    for w in made:
        w.data.copy_(torch.randn(w.shape, generator=draw) * 10.0 ** torch.arange(4)[:, None, None])
    return made


def rows_of(count: int, width: int, dtype=torch.float64) -> torch.Tensor:
    """Each row of another size."""
    draw = torch.Generator().manual_seed(count)
    return (torch.randn(count, width, generator=draw) * 2.0 ** torch.randint(-20, 20, (count, 1), generator=draw)).to(dtype)


def rounded(x: torch.Tensor, block: tuple[int | None, int | None], dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    """What blocks of a matrix are in 8 bits, one after the other."""
    out = torch.zeros_like(x)
    (rows, columns), (high, wide) = x.shape, (size or max(whole, 1) for size, whole in zip(block, x.shape))
    for r in range(0, rows, high):
        for c in range(0, columns, wide):
            part = x[r : r + high, c : c + wide]
            scale = float(part.abs().max()) / LARGEST[dtype]
            scale = 2.0 ** math.ceil(math.log2(scale)) if power_of_two else scale
            out[r : r + high, c : c + wide] = (part * (1 / scale)).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).to(x.dtype) * scale
    return out


def close(found: torch.Tensor, right: torch.Tensor, size: torch.Tensor, terms: int) -> bool:
    """|found - right| within rounding of a sum of `terms` products, the sum of whose absolute values is `size`."""
    return bool(((found - right).abs() <= 2 * terms * EPS[found.dtype] * size).all())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_products_are_those_of_the_rounded_operands(recipe, format, counts):
    """Y and dX, by the definition of each recipe; dW is that of the numbers themselves. Two matrices share an input, as gate and up do."""
    weights, x, found = matrices((FFN, FFN), WIDTH), rows_of(sum(counts), WIDTH), RECIPES[recipe]
    token, blocks, two = (1, found.tokens[1]), found.weight, found.power_of_two
    forward, backward = FORMATS[format]
    dy = rows_of(sum(counts), 2 * FFN)
    mine = x.clone().requires_grad_()
    y = grouped(mine, weights, counts, gemm_of(recipe, format), WeightQueue())
    dx, *dws = torch.autograd.grad(y, [mine, *weights], dy)
    start = 0
    for e, count in enumerate(counts):
        rows = slice(start, start + count)
        start += count
        xs, right, size = rounded(x[rows], token, forward, two), 0, 0
        for part, w, dw in zip((slice(0, FFN), slice(FFN, 2 * FFN)), weights, dws):
            along, across = rounded(w[e].detach(), blocks, forward, two), rounded(w[e].detach().t(), blocks, forward, two)
            assert close(y[rows, part], xs @ along.t(), xs.abs() @ along.t().abs(), WIDTH)
            g = rounded(dy[rows, part], token, backward, two)
            right, size = right + g @ across.t(), size + g.abs() @ across.t().abs()
            assert close(dw[e], dy[rows, part].t() @ x[rows], dy[rows, part].t().abs() @ x[rows].abs(), max(count, 1))
        assert close(dx[rows], right, size, 2 * FFN)


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_of_a_row_and_of_an_expert_depend_on_nothing_beside_them(recipe):
    """So it does not matter which tokens meet at an expert, nor which experts a rank has."""
    x, (w,) = rows_of(31, WIDTH), matrices((FFN,), WIDTH)
    whole, some = gemm_of(recipe).tokens(x, w, False), gemm_of(recipe).tokens(x[5:9], w, False)
    assert torch.equal(whole[5:9].values(torch.float64), some.values(torch.float64)) and torch.equal(whole.scale[5:9], some.scale)
    for transposed in (False, True):
        everyone, alone = gemm_of(recipe).weight(w, transposed), nn.Parameter(w[2:3].detach().clone())
        alone.placement = w.placement
        single = gemm_of(recipe).weight(alone, transposed)
        assert torch.equal(everyone[2].values(torch.float64), single[0].values(torch.float64)) and torch.equal(everyone.scale[2:3], single.scale)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_matrix_has_one_scale_of_its_present_numbers(recipe):
    (w,), gemm = matrices((FFN,), WIDTH), gemm_of(recipe)
    for step in range(3):
        gemm.common.start(step)
        scale = gemm.weight(w, transposed=False).scale
        assert scale.shape == (4, 1, 1) and torch.equal(scale.flatten(), w.detach().abs().amax((1, 2)) / LARGEST[torch.float8_e4m3fn])
        if gemm.common.histories:
            gemm.common.histories.finish()
        w.data *= 3


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_matrices_are_quantised_once_a_step_and_keeping_scales_alone_gives_the_same_bits(recipe, keep, monkeypatch):
    seen, (w,) = [], matrices((FFN,), WIDTH)
    monkeypatch.setattr(module, "quantise", lambda x, *rest: seen.append(x.data_ptr() == w.data_ptr()) or quantise(x, *rest))
    gemm, results = gemm_of(recipe, keep=keep), []
    for _ in range(3):
        x = rows_of(4, WIDTH).requires_grad_()
        y = grouped(x, [w], [1, 1, 2, 0], gemm, WeightQueue())
        results.append((y, *torch.autograd.grad(y.sum(), [x, w])))
    assert sum(seen) == (len({RECIPES[recipe].weight, RECIPES[recipe].weight[::-1]}) if keep else 6)
    plain = grouped(x, [w], [1, 1, 2, 0], gemm_of(recipe), WeightQueue())
    assert all(torch.equal(y, plain) for y, _, _ in results)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0]))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_the_products_of_the_device_are_those_of_the_values(recipe):
    """torch has them on a CPU too. They come out in bf16."""
    counts, (w,) = [3, 0, 27, 1], matrices((FFN,), WIDTH, torch.float32)
    x, dy = rows_of(31, WIDTH, torch.float32).requires_grad_(), rows_of(31, FFN, torch.float32)
    results = []
    for hardware in (True, False):
        y = grouped(x, [w], counts, gemm_of(recipe, hardware=hardware), WeightQueue())
        results.append((y, torch.autograd.grad(y, x, dy)[0]))
    sizes = grouped(x.abs(), [nn.Parameter(w.abs())], counts, Gemm(), WeightQueue())
    (y, dx), (right, dright) = results
    assert bool(((y - right).abs() <= EPS[torch.bfloat16] * right.abs() + 4 * WIDTH * EPS[torch.float32] * sizes).all())
    back = torch.cat([d.abs() @ w[e].abs() for e, d in enumerate(dy.split(counts))])
    assert bool(((dx - dright).abs() <= EPS[torch.bfloat16] * dright.abs() + 4 * FFN * EPS[torch.float32] * back).all())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_shows_where_it_is(recipe, bad):
    weights, x = matrices((FFN,), WIDTH), rows_of(8, WIDTH)
    x[2, 5] = bad
    x.requires_grad_()
    y = grouped(x, weights, [2, 2, 2, 2], gemm_of(recipe), WeightQueue())
    dy = torch.ones_like(y)
    dy[4, 1] = bad
    dx, dw = torch.autograd.grad(y, [x, *weights], dy)
    assert not y[2].isfinite().any() and y[[0, 1, 3, 4, 5, 6, 7]].isfinite().all()
    assert not dx[4].isfinite().any() and dx[[0, 1, 2, 3, 5, 6, 7]].isfinite().all()
    assert not dw[1, :, 5].isfinite().any() and not dw[2, 1].isfinite().any()


# ---- ranks that hold parts ----


def codes_of(rank: int, world: int, recipe: str, layout: Layout) -> list:
    """(offsets, values) of the matrices of this rank's experts, along and across, and of inputs and gradients of the F it holds."""
    mesh, found = Mesh(layout, rank, connect=world > 1), RECIPES[recipe]
    experts = Experts(tiny(model={"moe": {"experts": 4}, "width": 136}).model, Build(mesh, torch.float64), 1.0)
    histories = Histories((mesh["tensor"],), 4, 0, 1) if found.delayed else None
    fp8 = Fp8(found, "e4m3", layout, rank, histories=histories)
    fp8.start(0)
    draw, out = torch.Generator().manual_seed(0), []
    for name, w in experts.named_parameters():
        experts.multiply_in_fp8(fp8, name)
        whole = torch.randn(w.placement.shape, generator=draw, dtype=torch.float64)
        whole[:, :, : whole.shape[2] // 2] *= 100
        w.data.copy_(w.placement.part(whole, layout, rank))
        (e, o, i), _ = w.placement.offset_and_size(layout, rank)
        gemm = experts.gemms[w]
        out += [((e, o, i), gemm.weight(w, False).values(torch.float64).tolist()), ((e, i, o), gemm.weight(w, True).values(torch.float64).tolist())]
        for gradient, dim, start in ((False, 2, i), (True, 1, o)):
            x = torch.randn(7, w.placement.shape[dim], generator=draw, dtype=torch.float64)
            x[:, : x.shape[1] // 2] *= 100
            mine = x[:, start : start + w.shape[dim]]
            out.append(((0, start), gemm.tokens(mine, w, gradient).values(torch.float64).tolist()))
            assert gemm.tokens(mine[:0], w, gradient).codes.shape == (0, w.shape[dim])
    assert len(set(experts.gemms.values())) == 1, "gate and up are multiplied in one call"
    return out


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", [{"data": 2, "expert": 2}, {"data": 2, "expert_tensor": 2}, {"tensor": 2, "expert_tensor": 2}], ids=str)
def test_codes_and_scales_are_the_same_in_every_layout(recipe, layout, pool):
    """M06 and M08 for experts: half of the columns are 100 times as large; 88 of F on a rank, so that a block of 128, 32 or 1 x F lies on both."""
    whole = [torch.tensor(values, dtype=torch.float64) for _, values in codes_of(0, 1, recipe, Layout(expert=1))]
    for rank in pool.run(codes_of, 2, recipe, Layout(**{"expert": 1} | layout)):
        assert len(rank) == len(whole) == 12
        for (offsets, values), right in zip(rank, whole):
            mine = torch.tensor(values, dtype=torch.float64)
            for dim, (start, size) in enumerate(zip(offsets, mine.shape)):
                right = right.narrow(dim, start, size)
            assert torch.equal(mine, right)


# ---- in a model ----


def in_fp8(**settings) -> set[str]:
    config = tiny(model=MOE, train={"precision": "fp8-rowwise", "fp8": settings})
    engine = engine_of(config, {}, precision="fp8-rowwise")
    engine.step(batches(engine, 0), 0)
    return {engine.names[w].removesuffix(".weight") for w, _ in engine.fp8.weights if "mlp" in engine.names[w]}


def test_experts_are_named_as_linear_layers_are():
    parts = {f"{part}.{matrix}" for part in ("experts", "shared") for matrix in ("gate", "up", "down")}
    assert in_fp8() == {f"layers.{i}.mlp.{part}" for i in (1, 2) for part in parts}
    everywhere = {f"layers.{i}.mlp.{part}" for i in range(4) for part in parts}
    assert in_fp8(high_precision=["*.mlp.experts.*"]) == {name for name in everywhere if "experts" not in name}
    assert in_fp8(high_precision=["*.experts.gate", "layers.3.*"]) == {n for n in everywhere if "experts.gate" not in n and "layers.3" not in n}


@pytest.mark.parametrize("model, pattern", [({}, "*.experts.*"), ({"moe": {"experts": 4}}, "*.shared.up")], ids=["no experts", "none shared"])
def test_a_pattern_for_experts_that_are_not_there_is_a_fault(model, pattern):
    with pytest.raises(UserError, match="matches no linear layer"):
        check(tiny(model=model, train={"precision": "fp8-rowwise", "fp8": {"high_precision": [pattern]}}), 1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_expert_that_was_chosen_learns(recipe):
    """The gradients have the directions of those in fp32, to the few bits of the format."""
    gradients = {}
    for precision in ("fp32", f"fp8-{recipe}"):
        fp8 = {"fp8": {"high_precision": []}} if precision != "fp32" else {}
        engine = engine_of(tiny(model=MOE | {"init_std": 0.1}, train={"precision": precision, **fp8}), {}, precision=precision)
        mine = batches(engine, 0)
        engine.gradients(mine, engine.count_tokens(mine))
        gradients[precision] = {name: p.grad_sum.clone() for p, name in engine.names.items() if "experts" in name}
    for name, right in gradients["fp32"].items():
        found = gradients[f"fp8-{recipe}"][name]
        assert right.flatten(1).any(1).all() and found.flatten(1).any(1).all()
        assert torch.cosine_similarity(found.flatten(), right.flatten(), 0) > 0.9


@pytest.mark.parametrize("matrix", ["gate", "down"])
def test_infinite_weights_of_an_expert_are_a_fault(matrix):
    """e4m3 would make 448 of it."""
    engine = engine_of(tiny(model=MOE, train={"precision": "fp8-tensorwise"}), {}, precision="fp8-tensorwise")
    with torch.no_grad():
        dict(engine.model.named_parameters())[f"layers.1.mlp.experts.{matrix}"][:, 3, 5] = math.inf
    assert engine.step(batches(engine, 0), 0).fault == "the loss is not finite" and not engine.optimizer.updates


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_step_with_experts_can_be_described_without_memory(recipe):
    config = tiny(model=MOE, train={"precision": f"fp8-{recipe}"})
    own = check(laid_out(config, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2}, f"fp8-{recipe}"), 4)
    totals = [sum(step_counts(with_micro_batches(own, m), 0).values()) for m in (1, 2, 3)]
    assert totals[2] - totals[1] == totals[1] - totals[0] > 0
