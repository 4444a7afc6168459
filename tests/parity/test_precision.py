"""fp8 and fp16 in every layout.

Quantising is a step function: where two layouts round differently, a number near a border may get another code, and everything after it changes by
a step of the format. So layouts are compared with all else in fp64: rounding is then far too small to move a code, and what is left is held to what
rounding does to the run without fp8 (the bound of mtmegatron/verify/protocol.py), a billionth of what one wrong scale would cost.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import Config
from mtmegatron.layers.build import Build
from mtmegatron.layers.linear import Linear, project
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.precision.amax import Histories
from mtmegatron.precision.fp8 import INPUT, Dim, Fp8
from mtmegatron.precision.recipes import RECIPES
from mtmegatron.precision.types import TYPES
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import (
    FACTOR,
    Trace,
    _steady,
    _steps,
    checks_of,
    copy_of,
    describe,
    laid_out,
    load_state,
    serial_reference,
    world_of,
)
from tests.tiny import tiny

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
ALL = {"fp8": {"high_precision": []}}
SPLIT = [{"tensor": 2}, {"context": 2}]  # where scales are agreed on: every recipe
OTHERS = [
    {"tensor": 2, "sequence": False}, {"data": 2, "zero": 3}, {"pipeline": 2, "schedule": "zb-h1"}, {"tensor": 2, "context": 2, "zero": 1},
    {"tensor": 2, "pipeline": 2, "recompute": "selective"}, {"recompute": "full"},
]  # fmt: skip
MODELS = {"dense": {}, "moe": {"moe": {"experts": 4, "ffn": 88, "aux_loss": 0.02, "shared": 1, "shared_gate": True}, "layers": 2, "init_std": 0.1}}
EXPERTS = [  # tokens of several micro-batches meet at an expert, or parts of its columns lie on ranks
    {"data": 2, "expert": 2, "zero": 3}, {"tensor": 2, "expert_tensor": 2}, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2},
]  # fmt: skip
MORE = [
    {"context": 2, "data": 2, "expert": 4, "dispatch_parts": 2},
    {"data": 2, "expert": 2, "dispatcher": "allgather"}, {"pipeline": 2, "data": 2, "schedule": "zb-h1", "expert": 2},
    {"data": 2, "expert_tensor": 2, "recompute": "selective", "parts": ["norm", "activation", "up"], "zero": 1},
]  # fmt: skip
CASES = [("dense", recipe, layout) for recipe in RECIPES for layout in SPLIT]
CASES += [("dense", recipe, layout) for recipe in ("delayed", "blockwise") for layout in OTHERS]
CASES += [("moe", recipe, layout) for recipe in RECIPES for layout in EXPERTS] + [("moe", "blockwise", layout) for layout in MORE]


def config_of(recipe: str, model: str = "dense") -> Config:
    """The micro-batch, which has its own scales, is the same in all layouts."""
    return tiny(model=MODELS[model], train={"precision": f"fp8-{recipe}", **ALL})


def engine_of(config: Config, layout: dict, rank: int, world: int, wide: bool) -> Engine:
    own = check(_steady(laid_out(config, layout, config.train.precision)), world)
    return Engine(own, Mesh(layout_of(own), rank, connect=world > 1), types=TYPES["fp64"] if wide else None)


def serial_run(config: Config, state: dict | None = None, layout: dict | None = None, wide: bool = True) -> tuple[Trace, dict]:
    engine = engine_of(config, layout or {}, 0, 1, wide)
    if state is not None:
        load_state(engine, state)
    kept, trace = {}, Trace()
    kept["state"] = {name: p.detach().clone() for p, name in engine.names.items()}
    for kind, parts in _steps(engine, trace):
        kept[kind] = {item.name: mine.clone() for item, mine, _ in parts}
    return trace, kept


def rank_run(rank: int, world: int, config: Config, layout: dict, tensors: dict) -> tuple[Trace, dict]:
    """One rank: squared differences from the serial run, by kind, name and copy."""
    engine = engine_of(config, layout, rank, world, wide=True)
    load_state(engine, tensors["state"])
    trace = Trace()
    for kind, parts in _steps(engine, trace):
        for item, mine, where in parts:
            whole = tensors[kind][item.name].view(item.placement.shape)
            right = item.placement.part(whole, engine.mesh.layout, rank).reshape(-1)[where]
            trace.errors[kind, item.name, copy_of(engine.mesh, item.placement, kind)] = float((mine - right).square().sum())
    histories = {name: b.tolist() for chunk in engine.chunks for name, b in chunk.named_buffers() if "amax" in name}
    return trace, histories


@cache
def serial(recipe: str, model: str = "dense") -> tuple[Trace, dict]:
    return serial_run(config_of(recipe, model))


@cache
def rounding(model: str = "dense"):
    """What rounding to fp32 does to this model without fp8."""
    return serial_reference(tiny(model=MODELS[model]), ("fp32",))


@pytest.mark.parametrize("model, recipe, layout", CASES, ids=lambda value: value if isinstance(value, str) else describe(value))
def test_a_layout_quantises_as_one_process_does(model, recipe, layout, pool):
    trace, tensors = serial(recipe, model)
    world, config = world_of(layout), config_of(recipe, model)
    runs = [rank_run(0, 1, config, layout, tensors)] if world == 1 else pool.run(rank_run, world, config, layout, tensors)
    reference = replace(rounding(model), exact=trace, tensors=tensors)
    failed = [c for c in checks_of(describe(layout), "fp64", [mine for mine, _ in runs], reference) if not c.passed]
    assert not failed, failed
    if recipe == "delayed":
        histories = [found for _, found in runs]
        assert all(a[name] == b[name] for a in histories for b in histories for name in a.keys() & b.keys())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_m07_recomputation_has_the_bits_of_the_forward(model, recipe):
    """TransformerEngine#1723: with the amax of the step's end, backward's second forward was another one."""
    selective = {"recompute": "selective"} | ({"parts": ["norm", "activation", "up"]} if model == "moe" else {})
    runs = [serial_run(config_of(recipe, model), layout=layout, wide=False) for layout in ({}, {"recompute": "full"}, selective)]
    for trace, kept in runs[1:]:
        assert trace.losses == runs[0][0].losses and trace.norms == runs[0][0].norms
        assert all(torch.equal(kept["weight"][name], w) for name, w in runs[0][1]["weight"].items())


@pytest.mark.parametrize("model, name", [("dense", "layers.1.mlp.down.weight"), ("moe", "layers.1.mlp.experts.down")])
def test_one_flipped_code_would_be_seen(model, name):
    """The bounds above are far below a step of the format: a scale that is off by a billionth part of it in one layer fails them."""
    key = "gradient of step 0", name
    gradient = serial("rowwise", model)[1][key[0]][name]
    plain = max(rounding(model).rounding["fp32"][key], EPS[torch.float32] * float(gradient.norm()))
    assert FACTOR * plain * EPS[torch.float64] / EPS[torch.float32] < 1e-6 * 2.0**-4 * float(gradient.abs().max())


# ---- scales and codes on ranks that hold parts ----


def codes_of(rank: int, world: int, recipe: str, split: str, sequence: bool) -> list:
    """(codes, scales) of what a layer multiplies on this rank; inputs of the second rank are 100 times as large."""
    layout = Layout(tensor=world, sequence=sequence and world > 1)
    build = Build(Mesh(layout, rank, connect=world > 1), torch.float64)
    layer = Linear(176, 80, build, split=split, bias=False, std=1.0)
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(31, 176, generator=draw, dtype=torch.float64), torch.randn(80, 176, generator=draw, dtype=torch.float64)
    x[:, 88:] *= 100
    w[:40] *= 10
    layer.weight.data.copy_(layer.weight.placement.part(w, layout, rank))
    found = RECIPES[recipe]
    fp8 = Fp8(found, "e4m3", layout, rank, histories=Histories((build.tensor,), 4, 0, 1) if found.delayed else None)
    layer.multiply_in_fp8(fp8)
    fp8.start(0)
    gemm = layer.moves.gemm
    mine = x.chunk(world, 1)[rank] if split == "rows" else x
    inputs = gemm._operand((Dim(gemm.tokens), gemm._dim(layer.weight, 1)), found.tokens, layer.weight, INPUT)
    channels = gemm._operand((gemm._dim(layer.weight, 1), Dim(gemm.tokens)), found.channels, layer.weight, INPUT)
    operands = [fp8.quantised(mine, inputs), fp8.quantised(mine.t(), channels), gemm._weight(layer.weight, False), gemm._weight(layer.weight, True)]
    return [q.values(torch.float64).tolist() for q in operands]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("split", ["rows", "columns"])
def test_m06_ranks_agree_on_the_scale_of_what_they_share(recipe, split, pool):
    """TransformerEngine#74: one rank's activations are 100 times as large. M08 too: 88 columns on a rank, a block of 32 or 128 lies on both."""
    whole = [torch.tensor(q, dtype=torch.float64) for q in codes_of(0, 1, recipe, split, False)]
    ranks = [[torch.tensor(q, dtype=torch.float64) for q in found] for found in pool.run(codes_of, 2, recipe, split, False)]
    # which dim of x, xᵀ, W, Wᵀ is in parts
    dims = {"rows": (1, 0, 1, 0), "columns": (None, None, 0, 1)}[split]
    for right, dim, *parts in zip(whole, dims, *ranks):
        found = [torch.cat(parts, dim)] if dim is not None else parts
        assert all(torch.equal(one, right) for one in found)


def tokens_of(rank: int, world: int, recipe: str) -> list:
    """The weight gradient of a layer that every rank holds, from this rank's tokens, the second rank's 100 times as large."""
    layout = Layout(context=world)
    build = Build(Mesh(layout, rank, connect=world > 1), torch.float64)
    layer = Linear(16, 8, build, split=None, bias=False, std=1.0)
    layer.weight.data.fill_(1.0)
    found = RECIPES[recipe]
    fp8 = Fp8(found, "hybrid", layout, rank, histories=Histories((build.tensor,), 4, 0, 1) if found.delayed else None)
    layer.multiply_in_fp8(fp8)
    fp8.start(0)
    draw = torch.Generator().manual_seed(3)
    x, dy = torch.randn(64, 16, generator=draw, dtype=torch.float64), torch.randn(64, 8, generator=draw, dtype=torch.float64)
    x[32:] *= 100
    mine = x.chunk(world)[rank].clone().requires_grad_()
    project(mine, layer).backward(dy.chunk(world)[rank])
    return layer.weight.grad.tolist()


@pytest.mark.parametrize("recipe", RECIPES)
def test_context_ranks_agree_on_the_scales_of_the_weight_gradient(recipe, pool):
    whole = torch.tensor(tokens_of(0, 1, recipe), dtype=torch.float64)
    parts = torch.tensor(pool.run(tokens_of, 2, recipe), dtype=torch.float64).sum(0)
    assert torch.allclose(parts, whole, rtol=64 * EPS[torch.float64], atol=64 * EPS[torch.float64] * float(whole.abs().max()))


def outputs_of(rank: int, world: int, recipe: str, updates: int) -> tuple[list, list]:
    """Outputs of a layer whose tokens are shared by ranks, those of the second 100 times as large; types and widths of what travelled."""
    layout = Layout(tensor=world, sequence=world > 1)
    mesh, found, sent = Mesh(layout, rank, connect=world > 1), RECIPES[recipe], []
    axis = mesh["tensor"]
    travel = axis.all_gather
    axis.all_gather = lambda x, *rest, **more: (sent.append((str(x.dtype), x.shape[-1])), travel(x, *rest, **more))[1]
    layer = Linear(72, 8, Build(mesh, torch.float64), split="columns", bias=False, std=1.0)
    layer.weight.data.copy_(torch.linspace(-1, 1, 8 * 72).view(8, 72).chunk(world)[rank])
    fp8 = Fp8(found, "e4m3", layout, rank, histories=Histories((axis,), 4, 0, 1) if found.delayed else None)
    layer.multiply_in_fp8(fp8)
    x = torch.randn(64, 72, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x[32:] *= 100
    with torch.no_grad():
        for update in range(updates):
            fp8.start(update)
            y = project(x.chunk(world)[rank], layer)
            if fp8.histories:
                fp8.histories.finish()
    return y.tolist(), sent


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_of_activations_travel_and_give_what_numbers_would(recipe, pool):
    whole, _ = outputs_of(0, 1, recipe, updates=2)
    parts = pool.run(outputs_of, 2, recipe, 2)
    together = torch.cat([torch.tensor(y, dtype=torch.float64) for y, _ in parts], 1)
    right = torch.tensor(whole, dtype=torch.float64)
    assert (together - right).abs().max() <= 72 * EPS[torch.float64] * right.abs().max()
    assert {kind for kind, width in parts[0][1] if width == 72} == {"torch.uint8"}
