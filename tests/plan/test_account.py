"""Any rank of any layout is known alone: who owns which element, who is in which group, what a rank holds."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from mtmegatron.cli.info import describe_rank, info_command
from mtmegatron.config import Config, check, load
from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import ParallelConfig
from mtmegatron.data.loader import micro_batches
from mtmegatron.errors import UserError
from mtmegatron.layout import Layout
from mtmegatron.mesh import GROUPS, Mesh
from mtmegatron.parallel.pipeline.schedule import KINDS, schedule
from mtmegatron.parallel.pipeline.simulate import simulate
from mtmegatron.placement import Placement
from mtmegatron.plan.account import account, groups, most_kept, on_meta
from mtmegatron.plan.collectives import Log, record_step, with_micro_batches
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import RandomSamples
from tests.plan.layouts import random_configs
from tests.tiny import tiny

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CHANGES = [f"parallel.{setting}" for setting in ("tensor=8", "pipeline=16", "data=32", "zero=1")]


def large() -> Config:
    return check(load(CONFIGS / "llama3-405b.yaml", CHANGES).config, 4096)


def placements(config: Config) -> Iterator[tuple[str, Placement, int]]:
    """(name, description, stage) of each parameter of each stage."""
    layout = layout_of(config)
    for stage in range(layout.pipeline):
        for chunk in on_meta(config, stage * layout.stage)[0]:
            yield from ((name, param.placement, stage) for name, param in chunk.named_parameters())


def replica(layout: Layout, placement: Placement, rank: int) -> tuple[int, ...]:
    """Which whole copy of a parameter a rank's part belongs to: its coordinates along all axes that do not split it."""
    split = {axis for _, axis in placement.split}
    rest = "key_value_copies" if "key_value" in split else None if "tensor" in split else "tensor"
    return tuple(layout.coordinate(rank, axis) for axis in ("pipeline", "data", "context", rest) if axis)


def check_owned_once(layout: Layout, name: str, placement: Placement, stages: set[int]) -> None:
    """Every element is once in each replica, and once in the world where sums over all ranks count it."""
    copies: dict[tuple, np.ndarray] = {}
    counted, seen = np.zeros(placement.shape, dtype=int), set()
    for rank in (rank for stage in stages for rank in range(stage * layout.stage, (stage + 1) * layout.stage)):
        offset, size = placement.offset_and_size(layout, rank)
        here = tuple(slice(o, o + n) for o, n in zip(offset, size))
        copies.setdefault(replica(layout, placement, rank), np.zeros(placement.shape, dtype=int))[here] += 1
        shards = layout.group(rank, ["data_shards" if axis == "data" else axis for axis in placement.summed])
        if shards not in seen and not any(layout.coordinate(rank, axis) for axis in (*placement.copies, "data_copies")):
            seen.add(shards)  # its ranks share the elements out among them
            counted[here] += 1
    wrong = [where for where, canvas in copies.items() if not (canvas == 1).all()]
    assert not wrong and (counted == 1).all(), (name, layout, wrong)


def check_groups_partition(layout: Layout, ranks: range) -> None:
    """Each rank is in its group, and all of a group see the same one."""
    meshes = [Mesh(layout, rank, "meta") for rank in ranks]
    for names in GROUPS:
        for rank in ranks:
            axis = meshes[rank][names]
            assert axis.ranks[axis.rank] == rank
            assert all(meshes[other][names].ranks == axis.ranks for other in axis.ranks)


def test_every_element_is_owned_once_and_groups_partition_the_ranks_of_1000_random_layouts():
    configs = random_configs(1000, seed=0, largest=32)
    layouts = {layout_of(config) for config in configs}
    assert len(layouts) > 200
    for layout in layouts:
        check_groups_partition(layout, range(layout.world))
    for config in configs:
        described: dict[str, tuple[Placement, set[int]]] = {}
        for name, placement, stage in placements(config):
            before, stages = described.setdefault(name, (placement, set()))
            assert before == placement
            stages.add(stage)
        assert described.keys() == {name for name, _, _ in placements(serial(config))}
        for name, (placement, stages) in described.items():
            check_owned_once(layout_of(config), name, placement, stages)


def serial(config: Config) -> Config:
    return check(config.model_copy(update={"parallel": ParallelConfig()}), 1)


def test_groups_of_4096_ranks_partition_them():
    layout = layout_of(large())
    for names in GROUPS:
        if names == ("data", "context", "tensor", "pipeline"):
            continue
        ranks = [rank for rank in range(4096) if "ends" not in names or layout.coordinate(rank, "pipeline") in (0, 15)]
        found = {layout.group(rank, names) for rank in ranks}
        assert sorted(rank for group in found for rank in group) == ranks
    assert layout.group(4095, ("data", "context", "tensor", "pipeline")) == tuple(range(4096))


def test_the_ranks_of_a_layout_of_4096_own_405_billion_parameters():
    """Volumes of the parts, since nobody paints 405 billion elements: they are as many as there are, once in each replica."""
    config = large()
    layout, total = layout_of(config), 0
    for _, placement, stage in placements(config):
        ranks = range(stage * layout.stage, stage * layout.stage + layout.tensor)  # data 0, context 0
        parts = {(replica(layout, placement, r), placement.offset_and_size(layout, r)) for r in ranks}
        first = [part for where, part in parts if where == replica(layout, placement, ranks[0])]
        assert sum(math.prod(size) for _, size in first) == math.prod(placement.shape)
        total += math.prod(placement.shape)
    assert total == 405_853_388_800


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"forward_only"}))
@pytest.mark.parametrize("micro_batches", [1, 3, 9])
def test_what_is_kept_is_what_the_simulator_says(kind, micro_batches):
    chunks = KINDS[kind].chunks or 2
    plan = schedule(kind, 4, chunks, micro_batches)
    assert [most_kept(plan, stage, [1 / chunks] * chunks) for stage in range(4)] == list(simulate(plan).peak)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_forward_keeps_as_many_bytes_with_numbers_as_without(recompute, precision):
    """Above 512 tokens, where attention on a CPU keeps what it keeps elsewhere."""
    changes = {"train": {"precision": precision, "global_batch": 1, "micro_batch": 1}, "data": {"sequence": 640}}
    config = check(tiny(changes, model={"layers": 2}, recompute={"mode": recompute}), 1)
    log, mesh = Log(), Mesh(layout_of(config))
    engine = Engine(config, mesh, False)
    log.buckets = engine.buckets
    samples = RandomSamples(config.model.vocab, config.data.sequence, 0)
    engine.step(micro_batches(config, samples, mesh, 0), 0, log)
    assert log.kept == record_step(config, 0).kept


def test_recomputation_keeps_less():
    kept = {}
    for mode in ("none", "selective", "full"):
        kept[mode] = account(check(tiny(recompute={"mode": mode}), 1), 0).activations
    assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gathered_buffers_are_those_of_the_units_in_use(zero):
    """ZeRO 2 and 3: at most the gradients of the unit in use and of one on its way; 3 also the weights of two."""
    config = check(tiny(parallel={"data": 2, "zero": zero, "bucket_mb": 1e-3}), 2)
    own = account(config, 0)
    whole = (own.state.parameters + 2**12) * 4  # and what aligns the shards
    assert own.gathered == 0 if zero < 2 else 0 < own.gathered < whole
    assert account(with_micro_batches(config, 8), 0).gathered == own.gathered


def test_the_account_of_a_rank_of_4096():
    config = large()
    own = account(config, 4095)
    assert own.coordinates == {"pipeline": 15, "data": 31, "context": 0, "tensor": 7}
    assert {g.axis: len(g.ranks) for g in own.groups}["tensor"] == 8
    assert own.live == 1 and own.activations == own.micro_batch
    first = account(config, 0)
    assert first.live == 16 and first.activations == 16 * first.micro_batch
    assert groups(layout_of(config), 0)[0].ranks == tuple(range(8))


# ---- the command


def run(*arguments: str) -> str:
    app = Typer()
    app.command()(info_command)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "140"}, catch_exceptions=False).output


def test_info_tells_all_of_a_rank():
    arguments = [str(CONFIGS / "tiny.yaml"), "--layout", "tensor=2,pipeline=2,data=2,zero=1", "--rank", "5"]
    facts = json.loads(run(*arguments, "--json"))["rank"]
    assert facts["coordinates"] == {"pipeline": 1, "data": 0, "context": 0, "tensor": 1}
    assert facts["total"] == sum(facts["state"][kind] for kind in ("weights", "gradients", "optimizer")) + facts["activations"]
    kinds = {(t["axis"], t["operation"]) for t in facts["transfers"]}
    assert {("tensor", "all_gather"), ("pipeline", "receive"), ("data_shardsxcontext", "reduce_scatter")} <= kinds
    text = run(*arguments)
    assert all(word in text for word in ("rank 5: pipeline 1", "reduce_scatter", "activations", "per step"))


def test_info_refuses_what_does_not_exist():
    config = check(tiny(parallel={"tensor": 2}), 2)
    with pytest.raises(UserError, match="no rank 2 of 2: use --rank 0 to 1"):
        describe_rank(config, 2)
    with pytest.raises(UserError, match="did you mean tensor"):
        run(str(CONFIGS / "tiny.yaml"), "--layout", "tensr=2")
    with pytest.raises(UserError, match="is 2 layouts"):
        run(str(CONFIGS / "tiny.yaml"), "--layout", "tensor=2;data=2")
