"""Experts as they failed for users; each test is named after its report.

Others are in tests/layers/test_moe.py (E05, E11, C21 in one process), tests/ops/test_balance.py (E07), test_capacity.py (E08, E09), test_router.py (E10)
and tests/models/test_prediction.py (E13)."""

import pytest
import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, save
from mtmegatron.layers.moe import MoE
from mtmegatron.verify.protocol import batches
from tests.field.test_resume import MOVED
from tests.field.training import (
    contents,
    engine_of,
    joined,
    largest_difference,
    name,
    parts_of,
    same_bits,
    spread,
)
from tests.tiny import tiny

EPS = torch.finfo(torch.float64).eps
MOE = {"experts": 8, "ffn": 24, "first_dense": 1, "score": "sigmoid", "renormalise": True, "shared": 1, "bias_rate": 0.01, "global_loss": 0.01}
RUN = {"train": {"steps": 6, "global_batch": 8, "micro_batch": 2}}
SMALL = tiny(RUN, model={"layers": 3, "kv_heads": 4, "init_std": 0.1, "moe": MOE})
# attention and experts cut in other ways: TP > EP x ETP, TP < EP, columns, whole, with stages and with sharded state
LAYOUTS = [
    {},
    {"tensor": 4, "expert": 2},
    {"tensor": 2, "data": 2, "expert": 4, "zero": 2},
    {"data": 4, "expert": 2, "expert_tensor": 2, "zero": 3},
    {"pipeline": 2, "context": 2, "expert_tensor": 2, "zero": 1},
    {"pipeline": 2, "data": 2, "expert": 2, "schedule": "zb-v"},
]  # fmt: skip


# ---- C21: checkpoints ----


def first_rank(rank, world, config, layout, folder):
    """Two steps, a checkpoint; loss, norm and loads of the step after it."""
    engine = engine_of(config, layout, rank, world)
    for step in range(2):
        engine.step(batches(engine, step), step)
    save(Folder(folder), 2, engine.optimizer, engine.mesh, {})
    return one_step(engine)


def other_rank(rank, world, config, layout, sources, root):
    """The same step from the checkpoint of each other layout; what was loaded is saved again untouched."""
    engine, found = engine_of(config, layout, rank, world), {}
    for first, (source, _) in sources.items():
        load(Folder(source).open(2), engine.optimizer, engine.mesh)
        engine.optimizer.publish()
        save(Folder(root / first), 2, engine.optimizer, engine.mesh, {})
        found[first] = one_step(engine)
    return found


def one_step(engine) -> tuple[float, float, list]:
    result = engine.step(batches(engine, 2), 2)
    return result.loss, result.grad_norm, [load.counts for load in result.experts.read().values()]


@pytest.fixture(scope="module")
def sources(pool, tmp_path_factory):
    made = {}
    for layout in LAYOUTS:
        folder = tmp_path_factory.mktemp("source")
        made[name(layout)] = folder, spread(pool, first_rank, layout, SMALL, layout, folder)[0]
    return made


@pytest.mark.parametrize("then", LAYOUTS, ids=name)
def test_c21_a_layout_of_experts_loads_every_other(then, sources, pool, tmp_path):
    ranks = spread(pool, other_rank, then, SMALL, then, sources, tmp_path)
    own = contents(Folder(sources[name(then)][0]).open(2))
    for first, (folder, right) in sources.items():
        saved = contents(Folder(folder).open(2))
        assert same_bits(contents(Folder(tmp_path / first).open(2)), saved), first
        assert saved["weight/layers.1.mlp.experts.gate"].shape == (8, 24, 64) and saved["buffer/layers.1.mlp.bias"].any()
        biases = [key for key in saved if key.endswith("mlp.bias")]
        assert len(biases) == 2 and all(torch.equal(saved[key], own[key]) for key in biases), "each chunk's, whatever the layout that trained"
        for rank in ranks:
            assert rank[first][:2] == pytest.approx(right[:2], rel=MOVED) and rank[first][2] == right[2], first
        if first == name(then):
            assert ranks[0][first] == right


# ---- E02, E03, E06: gradients ----


def gradients_rank(rank, world, layout, poison):
    """This rank's parts of the gradients, and those after another step; with `poison`, memory that nobody writes holds NaN."""
    engine = engine_of(SMALL, layout, rank, world)
    if poison:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        mine = batches(engine, 0)
        engine.gradients(mine, engine.count_tokens(mine))
        first = parts_of(engine, gradients=True)
        return first, [engine.step(batches(engine, step), step).loss for step in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", [{"data": 4, "expert": e} for e in (1, 2, 4)] + [{"tensor": 2, "data": 2, "expert_tensor": 2, "expert": 2}], ids=name)
def test_e02_e03_e06_gradients_of_experts_and_router_are_those_of_one_process(layout, pool):
    (right, losses), ranks = gradients_rank(0, 1, {}, False), spread(pool, gradients_rank, layout, layout, True)
    own = joined([parts for parts, _ in ranks])  # asserts that copies have the same bits
    # a gradient is a sum over 256 tokens of products over at most 176 channels, through 3 blocks
    assert largest_difference(own, joined([right])) < 256 * 176 * 3 * EPS
    for _, mine in ranks:
        assert mine == pytest.approx(losses, rel=MOVED) and all(loss == loss for loss in mine)


# ---- E10: low precision ----


def test_e10_in_a_bf16_model_logits_and_bias_are_fp32(tmp_path):
    engine = engine_of(SMALL, {}, precision="bf16")
    layers = [module for module in engine.model.modules() if isinstance(module, MoE)]
    seen = []
    layers[0].router.register_forward_hook(lambda module, given, logits: seen.append((given[0].dtype, logits.dtype)))
    for layer in layers:
        layer.bias.fill_(0.6)  # where numbers of bf16 are 1/256 apart
    engine.step(batches(engine, 0), 0)
    assert set(seen) == {(torch.bfloat16, torch.float32)}
    moved = {float(x) for layer in layers for x in layer.bias}
    assert moved <= {float(torch.tensor(0.6) + step) for step in (-0.01, 0.0, 0.01)} and len(moved) > 1
    save(Folder(tmp_path), 1, engine.optimizer, engine.mesh, {})
    kept = Folder(tmp_path).open(1).read("buffer/layers.1.mlp.bias")
    assert kept.dtype == torch.float32 and torch.equal(kept, layers[0].bias)


# ---- E12: a stage without experts ----


def losses_rank(rank, world, config, layout):
    engine = engine_of(config, layout, rank, world)
    return [engine.step(batches(engine, step), step).loss for step in range(3)]


@pytest.mark.parametrize("layout", [{"pipeline": 2, "data": 2, "expert": 2}, {"pipeline": 2, "schedule": "zb-v", "tensor": 2, "expert": 2}], ids=name)
def test_e12_a_stage_without_experts_trains(layout, pool):
    moe = MOE | {"first_dense": 2}
    config = tiny(RUN, model={"layers": 4, "init_std": 0.1, "moe": moe}, optimizer={"clip": 0.1, "eps": 1e-5})
    right = losses_rank(0, 1, config, {})
    for mine in spread(pool, losses_rank, layout, config, layout):
        assert mine == pytest.approx(right, rel=MOVED)
