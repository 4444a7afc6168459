"""Saving in the background: what is written is the state of its step, one at a time; nothing is said before it is true.

In place of `write_shard` a test puts one that waits, fails or dies; all else is the loop that users run.
"""

import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtmegatron.checkpoint import background
from mtmegatron.checkpoint.background import Background
from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import pieces
from mtmegatron.checkpoint.store import CheckpointError, Store, write_shard
from mtmegatron.errors import UserError
from mtmegatron.verify.protocol import batches
from tests.checkpoint.small import in_child
from tests.field.training import Cut, engine_of, lines_of, loop_of, name, run, same_bits, spread, state_of
from tests.tiny import tiny

RUN = {
    "model": {"layers": 2, "tied": True},
    "train": {"steps": 6, "global_batch": 4, "micro_batch": 1, "eval_batches": 1},
    "checkpoint": {"every": 2, "keep": 9, "asynchronous": True},
    "log": {"tensorboard": False},
}
LAYOUTS = [
    {},
    {"data": 2, "zero": 3},
    {"pipeline": 2, "schedule": "zb-v", "zero": 2},
    {"tensor": 2, "data": 2, "zero": 1},
]


def files_of(folder: Path) -> dict[str, bytes]:
    """The bytes of all files of all checkpoints but the manifests, which tell of the configuration too."""
    root = folder / "checkpoints"
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("rank-*"))}


def visible(folder: Path) -> list[str]:
    """All that lies where checkpoints lie, half-written ones too."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def manifest_of(folder: Path, step: int) -> tuple:
    store = Store(folder / "checkpoints" / f"step-{step:08d}")
    return store._files, store._tensors, store.extra["step"], store.extra["updates"]


# ---- what is written ----


def late_rank(rank, world, config, layout, folder):
    """Trains; no rank writes before it made two more updates, or reached the end. Returns when each shard was written."""
    loop = loop_of(config, layout, "fp32", folder, rank, world)
    made, moved, written = [0], threading.Condition(), []

    def write(target, *arguments):
        step = int(target.name[-8:])
        with moved:
            assert moved.wait_for(lambda: made[0] >= min(step + 2, 6), timeout=30)
        written.append((step, made[0]))
        return write_shard(target, *arguments)

    def after(step, result):
        with moved:
            made[0] = step + 1
            moved.notify_all()

    loop.after_step = after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "write_shard", write)
        loop.run()
    return written


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_the_file_holds_the_state_of_its_step_though_training_went_on(layout, pool, tmp_path):
    config = tiny(RUN, checkpoint={"every": 3})  # so that two updates fit between two saves
    ranks = spread(pool, late_rank, layout, config, layout, tmp_path / "late")
    assert all([step for step, _ in written] == [3, 6] and written[0][1] >= 5 for written in ranks), ranks
    run(pool, tiny(RUN, checkpoint={"every": 3, "asynchronous": False}), layout, tmp_path / "plain")
    late, plain = files_of(tmp_path / "late"), files_of(tmp_path / "plain")
    assert late.keys() == plain.keys() and len(late) == 2 * len(ranks)
    assert late == plain
    assert [manifest_of(tmp_path / "late", s) for s in (3, 6)] == [manifest_of(tmp_path / "plain", s) for s in (3, 6)]
    assert lines_of(tmp_path / "late") == lines_of(tmp_path / "plain")


def test_the_copy_is_made_once_and_is_nobody_elses_memory(tmp_path):
    engine, said = engine_of(tiny(RUN), {}, precision="fp32"), []
    saver = Background(Folder(tmp_path), engine.optimizer, engine.mesh, said.append, lambda step, seconds: None)
    addresses = []
    for step in (1, 2):
        engine.step(batches(engine, step), step)
        saver.start(step, {})
        addresses.append([tensor.data_ptr() for _, tensor in saver._staged])
        saver.finish()
    saver.close()
    own = [tensor.data_ptr() for _, tensor in pieces(engine.optimizer, engine.mesh)]
    assert addresses[0] == addresses[1] and not set(own) & set(addresses[0])
    assert not same_bits(*({n: s.read(n) for n in s.names} for s in (Folder(tmp_path).open(step) for step in (1, 2))))


# ---- what is said, and when ----


def test_c18_at_most_one_is_in_flight_and_complete_is_said_once_it_is(monkeypatch, tmp_path):
    loop = loop_of(tiny(RUN, checkpoint={"every": 1}), {}, "fp32", tmp_path)
    active, said, root = [], [], Folder(tmp_path / "checkpoints")

    def write(*arguments):
        active.append(1)
        time.sleep(0.05)
        assert sum(active) == 1, "two writers"
        part = write_shard(*arguments)
        active.append(-1)
        return part

    def say(self, text):
        said.append((text, root.steps()))

    monkeypatch.setattr(background, "write_shard", write)
    monkeypatch.setattr("mtmegatron.train.progress.Progress.say", say)
    loop.run()
    requested, complete = (
        {int(m[1]): i for i, (text, _) in enumerate(said) if (m := re.match(rf"step (\d+): checkpoint {word}", text))}
        for word in ("requested", "complete")
    )
    assert list(requested) == list(complete) == [1, 2, 3, 4, 5, 6]
    for step in requested:
        assert step not in said[requested[step]][1] and step in said[complete[step]][1]
        assert requested[step] < complete[step] < requested.get(step + 1, len(said))
    assert any("waiting for the checkpoint of step" in text for text, _ in said)
    assert re.fullmatch(r"waited 0\.\d s", said[-1][0]), "the end of the run waits too"


# ---- failures ----


def failing_rank(rank, world, config, layout, folder, bad_step, bad_rank):
    """Trains with a rank whose disk is full at one step; returns what was said and the error at the end."""
    loop, said = loop_of(config, layout, "fp32", folder, rank, world), []

    def write(target, *arguments):
        part = write_shard(target, *arguments)
        if rank == bad_rank and target.name.endswith(f"{bad_step:08d}"):
            raise CheckpointError(f"cannot write {target}: No space left on device. Free disk space")
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "write_shard", write)
        patch.setattr("mtmegatron.train.progress.Progress.say", lambda self, text: said.append(text))
        try:
            loop.run()
        except UserError as error:
            return said, str(error)
    return said, ""


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_save_that_failed_is_said_on_all_ranks_and_training_goes_on(bad_rank, pool, tmp_path):
    layout = {"data": 2, "zero": 2}
    for said, error in spread(pool, failing_rank, layout, tiny(RUN), layout, tmp_path, 4, bad_rank):
        (line,) = [text for text in said if "FAILED" in text]
        assert line.startswith("step 4: checkpoint FAILED: cannot write ") and "The next save tries again" in line
        assert not error
    assert visible(tmp_path) == ["step-00000002", "step-00000006"]
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_the_run_whose_last_save_failed_ends_with_its_reason_on_all_ranks(pool, tmp_path):
    layout = {"data": 2, "zero": 2}
    for _, error in spread(pool, failing_rank, layout, tiny(RUN), layout, tmp_path, 6, 1):
        assert "No space left on device" in error
    assert visible(tmp_path) == ["step-00000002", "step-00000004"]


def test_a_folder_that_cannot_be_made_stops_nothing_but_the_end(tmp_path):
    loop, said = loop_of(tiny(RUN), {}, "fp32", tmp_path), []

    def after(step, result):
        if step == 2:  # a file where the folder of checkpoints was
            loop.background.wait()
            loop.folder.root.rename(tmp_path / "aside")
            (tmp_path / "checkpoints").write_text("")

    loop.after_step = after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtmegatron.train.progress.Progress.say", lambda self, text: said.append(text))
        with pytest.raises(UserError, match="cannot write"):
            loop.run()
    assert [text[:26] for text in said if "FAILED" in text] == [f"step {n}: checkpoint FAILED:" for n in (4, 6)]
    assert Folder(tmp_path / "aside").steps() == [2]


def test_a_fault_of_our_own_in_the_thread_is_not_lost(monkeypatch, tmp_path):
    def write(*arguments):
        raise AssertionError("a rectangle that does not fit")

    monkeypatch.setattr(background, "write_shard", write)
    with pytest.raises(AssertionError, match="does not fit"):
        loop_of(tiny(RUN), {}, "fp32", tmp_path).run()
    assert Folder(tmp_path / "checkpoints").steps() == []


def test_a_run_that_gives_up_has_its_checkpoint_first(monkeypatch, tmp_path):
    """Too many skipped steps: the user is sent to an earlier checkpoint, which may be the one in flight."""
    loop = loop_of(tiny(RUN, train={"max_skipped": 0}), {}, "fp32", tmp_path)
    gate = threading.Event()

    def write(*arguments):
        assert gate.wait(30)
        return write_shard(*arguments)

    def after(step, result):
        if step == 1:
            loop.engine.optimizer.states[0].master.fill_(float("nan"))  # between the update and the next forward
        loop.engine.optimizer.publish()

    def wait(self):
        gate.set()
        original(self)

    original = Background.wait
    monkeypatch.setattr(background, "write_shard", write)
    monkeypatch.setattr(Background, "wait", wait)
    loop.after_step = after
    with pytest.raises(UserError, match="steps in a row were skipped"):
        loop.run()
    assert Folder(tmp_path / "checkpoints").steps() == [2]


def test_an_interrupted_run_leaves_no_thread_and_publishes_nothing(monkeypatch, tmp_path):
    loop = loop_of(tiny(RUN), {}, "fp32", tmp_path)
    begun, taken = threading.Event(), []

    def write(target, rank, items):
        def slowly():
            for item in items:
                taken.append(item)
                begun.set()
                time.sleep(0.02)
                yield item

        return write_shard(target, rank, slowly())

    def after(step, result):
        if step == 2:
            assert begun.wait(30)
            raise Cut

    monkeypatch.setattr(background, "write_shard", write)
    loop.after_step = after
    with pytest.raises(Cut):
        loop.run()
    assert 0 < len(taken) < len(loop.background._staged), "it stopped between two pieces"
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]
    assert Folder(tmp_path / "checkpoints").steps() == []


def test_a_kill_while_the_thread_writes_costs_no_bit(pool, tmp_path):
    run(pool, tiny(RUN), {}, tmp_path / "whole")

    def killed():
        def write(target, rank, items):
            def deadly():
                for count, item in enumerate(items):
                    if count == 5 and target.name.endswith("4"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield item

            return write_shard(target, rank, deadly())

        background.write_shard = write
        loop_of(tiny(RUN), {}, "fp32", tmp_path / "killed").run()

    assert in_child(killed) == -signal.SIGKILL
    root = tmp_path / "killed" / "checkpoints"
    assert Folder(root).steps() == [2] and (root / ".writing-step-00000004" / "rank-00000.safetensors").exists()
    run(pool, tiny(RUN), {}, tmp_path / "killed")
    assert same_bits(state_of(tmp_path / "killed", 6), state_of(tmp_path / "whole", 6))
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "whole")
    assert visible(tmp_path / "killed") == [f"step-0000000{n}" for n in (2, 4, 6)]


def test_a_rank_that_is_done_does_not_make_a_checkpoint_complete(tmp_path):
    """`poll` lands on the slowest rank's word: here the sum of votes is another rank's."""
    engine, votes = engine_of(tiny(RUN), {}, precision="fp32"), []

    class World:
        def all_reduce(self, flag, op):
            votes.append((int(flag), op))
            return flag * votes_of_others[len(votes) - 1]

    votes_of_others = [0, 0, 1]
    mesh = SimpleNamespace(rank=0, layout=engine.mesh.layout, device=engine.mesh.device, world=World())
    saver = Background(Folder(tmp_path), engine.optimizer, engine.mesh, lambda text: None, lambda step, seconds: None)
    saver.start(1, {})
    saver._flight.written.result()
    saver.mesh = mesh
    for expected in ([], [], [1]):
        saver.poll()
        assert Folder(tmp_path).steps() == expected
    saver.poll()
    saver.close()
    assert votes == [(1, "min")] * 3, "and nothing is asked when nothing is in flight"
