"""fp8 and fp16 in every layout.

Quantising is a step function: where two layouts round differently, a number near a border may get another code, and everything after it changes by
a step of the format. So layouts are compared with all else in fp64: rounding is then far too small to move a code, and what is left is held to what
rounding does to the run without fp8 (the bound of mtmegatron/verify/protocol.py), a billionth of what one wrong scale would cost.
"""

import math
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
CASES = [(recipe, layout) for recipe in RECIPES for layout in SPLIT] + [(recipe, layout) for recipe in ("delayed", "blockwise") for layout in OTHERS]


def config_of(recipe: str, **train) -> Config:
    """The micro-batch, which has its own scales, is the same in all layouts."""
    return tiny(train={"precision": f"fp8-{recipe}", **ALL, **train})


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
def serial(recipe: str) -> tuple[Trace, dict]:
    return serial_run(config_of(recipe))


@cache
def rounding():
    """What rounding to fp32 does to this model without fp8."""
    return serial_reference(tiny(), ("fp32",))


def bound(kind: str, name: str, right: torch.Tensor) -> float:
    plain = max(rounding().rounding["fp32"][kind, name], EPS[torch.float32] * float(right.norm()))
    return FACTOR * plain * EPS[torch.float64] / EPS[torch.float32]


@pytest.mark.parametrize("recipe, layout", CASES, ids=lambda value: value if isinstance(value, str) else describe(value))
def test_a_layout_quantises_as_one_process_does(recipe, layout, pool):
    trace, tensors = serial(recipe)
    world, config = world_of(layout), config_of(recipe)
    runs = [rank_run(0, 1, config, layout, tensors)] if world == 1 else pool.run(rank_run, world, config, layout, tensors)
    plain = rounding()
    ratio = FACTOR * EPS[torch.float64] / EPS[torch.float32]
    for mine, _ in runs:
        for what in ("losses", "norms"):
            found, right = getattr(mine, what), getattr(trace, what)
            floor = max(abs(a - b) for t in plain.serial["fp32"] for a, b in zip(getattr(t, what), getattr(plain.exact, what)))
            assert max(abs(a - b) for a, b in zip(found, right)) <= ratio * max(floor, EPS[torch.float32] * max(right)), what
    totals: dict[tuple, float] = {}
    for mine, _ in runs:
        for key, error in mine.errors.items():
            totals[key] = totals.get(key, 0.0) + error
    assert {(kind, name) for kind, name, _ in totals} == {(kind, name) for kind in ("gradient", "weight") for name in tensors[kind]}
    for (kind, name, _), error in totals.items():
        assert math.sqrt(error) <= bound(kind, name, tensors[kind][name]), (kind, name)
    if recipe == "delayed":
        histories = [found for _, found in runs]
        assert all(a[name] == b[name] for a in histories for b in histories for name in a.keys() & b.keys())


@pytest.mark.parametrize("recipe", RECIPES)
def test_m07_recomputation_has_the_bits_of_the_forward(recipe):
    """TransformerEngine#1723: with the amax of the step's end, backward's second forward was another one."""
    config = config_of(recipe)
    runs = [serial_run(config, layout={"recompute": mode}, wide=False) for mode in ("none", "full", "selective")]
    for trace, kept in runs[1:]:
        assert trace.losses == runs[0][0].losses and trace.norms == runs[0][0].norms
        assert all(torch.equal(kept["weight"][name], w) for name, w in runs[0][1]["weight"].items())


def test_one_flipped_code_would_be_seen():
    """The bounds above are far below a step of the format: a scale that is off by a billionth part of it in one layer fails them."""
    trace, tensors = serial("rowwise")
    name = "layers.1.mlp.down.weight"
    step = 2.0**-4 * float(tensors["gradient"][name].abs().max())
    assert bound("gradient", name, tensors["gradient"][name]) < 1e-6 * step


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
