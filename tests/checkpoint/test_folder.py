"""Publication and retention, with the process killed at each point where it touches the disk."""

import os
import resource
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.rectangle import Rectangle
from mtmegatron.checkpoint.store import HEADER, CheckpointError, write_manifest, write_shard
from mtmegatron.errors import UserError
from tests.checkpoint import small


def save(folder: Folder, step: int, seed: int | None = None) -> None:
    small.write(folder.begin(step), step if seed is None else seed, folder.run)
    folder.publish(step)


def newest(root: Path) -> tuple[int | None, list[str]]:
    """The seed that the newest good checkpoint holds bit for bit, and what was said."""
    said: list[str] = []
    store = Folder(root).newest_good(said.append)
    if store is None:
        return None, said
    store.verify()
    assert small.holds(store, store.extra["step"])
    return store.extra["step"], said


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


# ---- publication ----


def test_a_checkpoint_exists_from_publish_on(tmp_path):
    folder = Folder(tmp_path / "deep" / "root")
    assert folder.steps() == [] and newest(folder.root)[0] is None
    small.write(folder.begin(5), 5)
    assert folder.steps() == [] and newest(folder.root)[0] is None
    assert folder.publish(5) == folder.root / "step-00000005"
    assert folder.steps() == [5] and newest(folder.root)[0] == 5
    assert [p.name for p in folder.root.iterdir()] == ["step-00000005"]


def test_what_is_not_complete_is_not_published(tmp_path):
    folder = Folder(tmp_path)
    save(folder, 1)
    for spoil in (lambda f: truncate(f / "rank-00001.safetensors"), lambda f: (f / "manifest.json").unlink()):
        small.write(folder.begin(2), 2)
        spoil(folder.writing(2))
        with pytest.raises(CheckpointError):
            folder.publish(2)
        assert folder.steps() == [1] and newest(tmp_path)[0] == 1


def test_the_same_step_again_replaces_the_old_one(tmp_path):
    folder = Folder(tmp_path)
    save(folder, 7)
    save(folder, 7, seed=8)
    assert newest(tmp_path)[0] == 8
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]


def test_begin_removes_what_a_crash_left_and_nothing_else(tmp_path):
    folder = Folder(tmp_path)
    small.write(folder.begin(1), 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".writing-my-paper").mkdir()
    folder.begin(2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".writing-my-paper", ".writing-step-00000002", "notes.txt"]
    assert list(folder.writing(2).iterdir()) == []


# ---- which one is newest ----


def test_newest_is_by_number_and_says_which(tmp_path):
    folder = Folder(tmp_path)
    for step in (99_999_999, 100_000_000, 900):
        save(folder, step)
    assert folder.steps() == [900, 99_999_999, 100_000_000]
    found, said = newest(tmp_path)
    assert found == 100_000_000
    assert said == [f"newest complete checkpoint: step 100000000 in {tmp_path}/step-100000000"]


@pytest.mark.parametrize("spoil", ("truncate", "delete", "manifest", "empty"))
def test_a_damaged_newest_is_passed_over_aloud(tmp_path, spoil):
    folder = Folder(tmp_path)
    save(folder, 10)
    save(folder, 20)
    path = folder.path(20)
    if spoil == "truncate":
        truncate(path / "rank-00001.safetensors")
    elif spoil == "delete":
        (path / "rank-00001.safetensors").unlink()
    elif spoil == "manifest":
        truncate(path / "manifest.json")
    else:
        shutil.rmtree(path)
        path.mkdir()
    found, said = newest(tmp_path)
    assert found == 10
    named = "manifest.json" if spoil in ("manifest", "empty") else "rank-00001.safetensors"
    assert said[0].startswith("passing over the checkpoint of step 20: ") and named in said[0]
    assert said[1].startswith("newest complete checkpoint: step 10")


def test_nothing_good_is_said_too(tmp_path):
    folder = Folder(tmp_path)
    save(folder, 10)
    (folder.path(10) / "manifest.json").unlink()
    found, said = newest(tmp_path)
    assert found is None
    assert said[-1] == f"no complete checkpoint in {tmp_path}, 1 passed over"


def test_a_flipped_byte_shows_at_read_and_the_one_before_is_found(tmp_path):
    folder = Folder(tmp_path)
    for step in (10, 20, 30):
        save(folder, step)
    path = folder.path(30) / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    store = folder.newest_good(lambda text: None)
    with pytest.raises(CheckpointError, match="step-00000030/rank-00000.safetensors is damaged"):
        small.holds(store, 30)
    assert small.holds(folder.newest_good(lambda text: None, before=30), 20)


def test_a_manifest_of_another_run_is_our_own_fault(tmp_path):
    folder = Folder(tmp_path, run="mine")
    small.write(folder.begin(1), 1, run="yours")
    with pytest.raises(AssertionError, match="yours"):
        folder.publish(1)


def test_pointer_files_and_foreign_names_decide_nothing(tmp_path):
    """bigscience-workshop#159: two files that named the latest checkpoint disagreed."""
    folder = Folder(tmp_path)
    save(folder, 10)
    save(folder, 20)
    (tmp_path / "latest").write_text("step-00000010")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    for name in ("step-30", "step-000000030", "step-00000030.old", "step-0000003x"):
        shutil.copytree(folder.path(10), tmp_path / name)
    (tmp_path / "step-00000040").write_text("a file")
    assert folder.steps() == [10, 20]
    assert newest(tmp_path)[0] == 20


def test_a_step_that_is_asked_for_and_absent(tmp_path):
    folder = Folder(tmp_path)
    save(folder, 10)
    assert small.holds(folder.open(10), 10)
    with pytest.raises(UserError, match="no checkpoint of step 11. Steps there: 10"):
        folder.open(11)


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "root").write_text("")
    folder = Folder(tmp_path / "root")
    for act in (folder.steps, lambda: folder.begin(1)):
        with pytest.raises(UserError, match=f"{tmp_path}/root"):
            act()


# ---- retention: transformers#27138, #11748, #25136, #37260, #19300 ----


def test_the_newest_and_the_best_survive_in_numeric_order(tmp_path):
    folder = Folder(tmp_path)
    for step in (900, 1000, 9900, 99_999_999, 100_000_000):
        save(folder, step)
        folder.prune(keep=2, protect={900})
    assert folder.steps() == [900, 99_999_999, 100_000_000]


def test_keep_one_keeps_the_newest(tmp_path):
    folder = Folder(tmp_path)
    for step in (1, 2, 3):
        save(folder, step)
        folder.prune(keep=1)
        assert folder.steps() == [step]
    assert Folder(tmp_path).prune(keep=1) == []


def test_an_incomplete_newest_does_not_count(tmp_path):
    folder = Folder(tmp_path)
    for step in (1, 2, 3):
        save(folder, step)
    truncate(folder.path(3) / "rank-00000.safetensors")
    assert Folder(tmp_path).prune(keep=1) == [1]
    assert folder.steps() == [2, 3]


def test_nothing_is_removed_while_the_next_is_being_written(tmp_path):
    folder = Folder(tmp_path)
    save(folder, 1)
    small.write(folder.begin(2), 2)
    assert folder.prune(keep=1) == []
    assert newest(tmp_path)[0] == 1
    folder.publish(2)
    assert folder.prune(keep=1) == [1]


def test_leftovers_of_an_older_longer_run_are_neither_counted_nor_removed(tmp_path):
    older = Folder(tmp_path, run="older")
    for step in (15, 400, 500):
        save(older, step)
    run = Folder(tmp_path, run="new")
    for step in (10, 20, 30):
        save(run, step)
        run.prune(keep=2)
    assert run.steps() == [15, 20, 30, 400, 500]
    resumed = Folder(tmp_path, run="new")
    save(resumed, 40)
    assert resumed.prune(keep=1) == [20, 30]


def test_a_run_that_went_back_keeps_what_it_writes(tmp_path):
    first = Folder(tmp_path)
    for step in (100, 200, 300):
        save(first, step)
    again = Folder(tmp_path)  # loads step 100 and goes on from there
    save(again, 150)
    assert again.prune(keep=1) == [100]
    assert again.steps() == [150, 200, 300]


# ---- killed, disk full ----

TOUCHES = (
    (os, "fsync"),
    (os, "mkdir"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "rmdir"),
    (zlib, "crc32"),
)


def until(last: int, work: Callable[[], None]) -> int:
    """Runs `work` in a child that dies by SIGKILL when about to touch the disk (or sum data) for the last-th time."""

    def counted(function):
        def touch(*args, **options):
            count[0] += 1
            if count[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return touch

    def child():
        for module, name in TOUCHES:
            setattr(module, name, counted(getattr(module, name)))
        work()

    count = [0]
    return small.in_child(child)


@pytest.mark.parametrize("step", (200, 100))
def test_killed_at_any_moment_the_last_published_loads(tmp_path, step):
    """Step 200 after 100, or step 100 again with other content; then pruning: the old, from some moment on the new."""
    pristine = tmp_path / "pristine"
    save(Folder(pristine), 50)
    save(Folder(pristine), 100)
    story = []
    for last in range(1, 1000):
        root = tmp_path / "root"
        shutil.copytree(pristine, root)

        def work():
            folder = Folder(root)
            save(folder, step, seed=200)
            folder.prune(keep=1)

        status = until(last, work)
        story.append(newest(root)[0])
        folder = Folder(root)
        save(folder, 300)  # the next attempt works, and clears what the crash left
        assert newest(root)[0] == 300
        assert all(path.name.startswith("step-") for path in root.iterdir())
        assert folder.prune(keep=1) and folder.steps() == [300]
        shutil.rmtree(root)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    change = story.index(200)
    assert story == [100] * change + [200] * (len(story) - change)
    assert change > 15 and len(story) - change > 5, "it was killed many times before the rename and after it"


def test_disk_full_leaves_the_previous_checkpoint(tmp_path):
    folder = Folder(tmp_path)
    save(folder, 1)

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER + 1000, resource.RLIM_INFINITY))
        big = torch.zeros(10_000)
        path = folder.begin(2)
        with pytest.raises(UserError, match="cannot write .*step-00000002/rank-00000.safetensors: File too large"):
            write_manifest(path, [write_shard(path, 0, [(Rectangle.whole("w", big), big)])], {})

    assert small.in_child(full) == 0
    assert newest(tmp_path)[0] == 1
    save(folder, 2)
    assert newest(tmp_path)[0] == 2
