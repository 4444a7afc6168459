"""What goes wrong with a checkpoint on one rank alone ends all ranks at once: nobody waits for one that has left."""

from pathlib import Path
from unittest.mock import patch

import pytest

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import together
from mtmegatron.checkpoint.store import CheckpointError
from mtmegatron.errors import UserError
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.train.resume import resume
from tests.field.training import engine_of, loop_of, run, spread
from tests.tiny import tiny

RUN = {"train": {"steps": 2}, "checkpoint": {"every": 1}}


def told(work) -> str:
    """The message of the UserError that work raises; nothing when it does not."""
    try:
        work()
    except UserError as error:
        return str(error)
    return ""


def fail_on(rank: int, world: int, failing: int) -> tuple[str, int | None]:
    def work() -> int:
        if rank == failing:
            raise CheckpointError(f"rank {rank} cannot")
        return 10 * rank

    mesh, found = Mesh(Layout(data=world), rank, connect=True), []
    return told(lambda: found.append(together(mesh, work))), found[0] if found else None


@pytest.mark.parametrize("failing", [0, 1, None])
def test_one_rank_speaks_for_all(failing, pool):
    everybody = spread(pool, fail_on, {"data": 2}, failing)
    assert everybody == ([("", 0), ("", 10)] if failing is None else [(f"rank {failing} cannot", None)] * 2)


def resume_rank(rank: int, world: int, config, layout: dict, folder: Path) -> str:
    engine = engine_of(config, layout, rank, world, "fp32")
    return told(lambda: resume(engine, Folder(folder / "checkpoints"), {"tokenizer_hash": None}, print))


def test_a_parameter_that_only_the_last_stage_misses_is_told_by_all(pool, tmp_path):
    layout = {"pipeline": 2}
    run(pool, tiny(RUN, model={"tied": True}), layout, tmp_path)
    untied = tiny(RUN, train={"steps": 2, "accept_changes": ["model.tied"]})
    first, second = spread(pool, resume_rank, layout, untied, layout, tmp_path)
    assert "head.weight: not in the checkpoint" in first and first == second


def prune_rank(rank: int, world: int, config, layout: dict, folder: Path) -> str:
    loop = loop_of(config, layout, "fp32", folder, rank, world)
    with patch.object(Folder, "prune", side_effect=CheckpointError("cannot remove")) as prune:
        said = told(loop.run)
    assert prune.called == (rank == 0)
    return said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_cannot_be_removed_ends_all_ranks(asynchronous, pool, tmp_path):
    config = tiny(RUN, checkpoint={"every": 1, "keep": 1, "asynchronous": asynchronous})
    assert spread(pool, prune_rank, {"data": 2}, config, {"data": 2}, tmp_path) == ["cannot remove"] * 2
