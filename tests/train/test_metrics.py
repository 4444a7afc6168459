"""Metrics, progress and the picture of the loss: what a run tells is complete, on one axis, and survives resumes."""

import json
import math
import subprocess
import sys
import types
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mtmegatron.config.schema import LogConfig
from mtmegatron.errors import UserError
from mtmegatron.train.metrics import Metrics, RunningMean, cut, mfu, read_metrics, require_wandb, throughput
from mtmegatron.train.picture import loss_picture, smooth
from mtmegatron.train.progress import Progress, describe, duration, short

PLAIN = LogConfig(tensorboard=False)


def run(folder: Path, first: int, last: int, log: LogConfig = PLAIN, offset: float = 0.0) -> None:
    """Steps first + 1 .. last, with a validation at every second one."""
    metrics = Metrics(folder, log, first_step=first, rank=0)
    for step in range(first + 1, last + 1):
        metrics.write(step, {"loss": 10.0 / step + offset, "lr": 1e-3, "tokens": 64 * step})
        if step % 2 == 0:
            metrics.write(step, {"valid_loss": 11.0 / step + offset})
    metrics.close()


def lines(folder: Path) -> list[dict]:
    return list(read_metrics(folder / "metrics.jsonl"))


# ---- metrics.jsonl ----


def test_a_step_has_one_line_with_all_its_values(tmp_path):
    run(tmp_path, 0, 3)
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(text)["step"] for text in texts] == [1, 2, 3]
    second = json.loads(texts[1])
    assert (second["loss"], second["valid_loss"], second["lr"], second["tokens"]) == (5.0, 5.5, 1e-3, 128)
    assert "valid_loss" not in json.loads(texts[0])


def test_each_line_is_on_disk_before_the_next_call(tmp_path):
    metrics = Metrics(tmp_path, PLAIN, first_step=0, rank=0)
    metrics.write(1, {"loss": 2.0})
    assert lines(tmp_path)[0]["loss"] == 2.0
    metrics.write(1, {"valid_loss": 3.0})
    assert lines(tmp_path) == [{"step": 1, "loss": 2.0, "loss_mean": 2.0, "valid_loss": 3.0}]
    metrics.close()


def test_other_ranks_write_nothing(tmp_path):
    metrics = Metrics(tmp_path / "run", LogConfig(wandb="p"), first_step=0, rank=1)
    metrics.write(1, {"loss": 1.0})
    metrics.close()
    assert not (tmp_path / "run").exists()


def test_resume_removes_the_overlap_and_goes_on(tmp_path):
    run(tmp_path, 0, 10)
    run(tmp_path, 6, 10, offset=100.0)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 11))
    assert [line["loss"] > 100 for line in lines(tmp_path)] == [False] * 6 + [True] * 4
    assert [line["tokens"] for line in lines(tmp_path)] == [64 * step for step in range(1, 11)]


def test_a_resumed_run_writes_the_bytes_of_an_uninterrupted_one(tmp_path):
    run(tmp_path / "whole", 0, 10)
    run(tmp_path / "parts", 0, 8)
    run(tmp_path / "parts", 5, 10)
    whole, parts = (tmp_path / name / "metrics.jsonl" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_values_for_the_step_that_was_resumed_from_complete_its_line(tmp_path):
    run(tmp_path, 0, 3)
    metrics = Metrics(tmp_path, PLAIN, first_step=3, rank=0)
    metrics.write(3, {"valid_loss": 7.0})
    metrics.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert (lines(tmp_path)[2]["loss"], lines(tmp_path)[2]["valid_loss"]) == (10.0 / 3, 7.0)


def test_steps_do_not_go_back(tmp_path):
    metrics = Metrics(tmp_path, PLAIN, first_step=0, rank=0)
    metrics.write(2, {"loss": 1.0})
    with pytest.raises(AssertionError, match="step 1 after step 2"):
        metrics.write(1, {"loss": 1.0})
    metrics.close()


@pytest.mark.parametrize("tail", [b'{"step": 4, "lo', b"\0\0\0", b'{"step": 4, "loss": 1.0}'])
def test_a_cut_last_line_is_dropped_and_a_whole_one_without_its_end_is_kept(tmp_path, tail):
    run(tmp_path, 0, 3)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    run(tmp_path, 4, 5)
    assert [line["step"] for line in lines(tmp_path)] == ([1, 2, 3, 4, 5] if tail.endswith(b"}") else [1, 2, 3, 5])


def test_damage_before_the_last_line_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"loss": 2}\n{"step": 3}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 2 .*remove it"):
        Metrics(tmp_path, PLAIN, first_step=3, rank=0)
    assert file.read_text().count("\n") == 3


def test_cut_replaces_the_file_by_a_rename(tmp_path):
    run(tmp_path, 0, 4)
    file = tmp_path / "metrics.jsonl"
    with file.open("rb") as reader:  # who reads while it happens keeps a whole file
        cut(file, 2)
        assert reader.read().count(b"\n") == 4
    assert file.read_bytes().count(b"\n") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_cannot_be_made_is_the_users_fault(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="cannot write .*taken"):
        Metrics(tmp_path / "taken", PLAIN, first_step=0, rank=0)


# ---- NaN, skipped steps, the running mean (T06) ----


def test_what_is_not_finite_stays_valid_json_and_comes_back(tmp_path):
    metrics = Metrics(tmp_path, PLAIN, first_step=0, rank=0)
    metrics.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "valid_loss": -2.5})
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    raw = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert raw == {"step": 1, "loss": "NaN", "grad_norm": "Infinity", "lr": "-Infinity", "valid_loss": -2.5}
    (line,) = lines(tmp_path)
    assert math.isnan(line["loss"]) and (line["grad_norm"], line["lr"]) == (math.inf, -math.inf)


def test_skipped_steps_are_written_and_stay_out_of_the_mean(tmp_path):
    metrics = Metrics(tmp_path, PLAIN, first_step=0, rank=0)
    metrics.write(1, {"loss": 4.0})
    metrics.write(2, {"loss": 1000.0, "skipped": "the gradient is not finite"})
    metrics.write(3, {"loss": math.nan, "skipped": "the loss is not finite"})
    metrics.write(4, {"loss": 2.0})
    metrics.close()
    reasons = [line.get("skipped", "") for line in lines(tmp_path)]
    assert reasons == ["", "the gradient is not finite", "the loss is not finite", ""]
    assert lines(tmp_path)[1]["loss"] == 1000.0
    expected = (0.95 * 4.0 + 2.0) / 1.95
    assert [line["loss_mean"] for line in lines(tmp_path)] == pytest.approx([4.0, 4.0, 4.0, expected], rel=4e-16)


def test_running_mean_of_a_constant_is_the_constant_from_the_start():
    mean = RunningMean()
    assert math.isnan(mean.value)
    for _ in range(100):
        mean.add(3.0)
        assert mean.value == pytest.approx(3.0, rel=100 * 2.3e-16)


# ---- speed (T03, T04) ----


def test_throughput_is_exact_in_its_units():
    values = throughput(1_000_000, 2.0, flops_per_token=6e6, peak_per_rank=3e12, world=4)
    assert values == {"seconds": 2.0, "tokens_per_second": 5e5, "tflops_per_rank": 0.75, "mfu": 0.25}


def test_an_unknown_peak_gives_no_utilisation():
    assert mfu(6e6, 5e5, None, 4) is None
    assert "mfu" not in throughput(1_000_000, 2.0, flops_per_token=6e6, peak_per_rank=None, world=4)


def test_utilisation_is_against_the_given_peak():
    assert mfu(1e9, 4e5, 989.4e12, 2) == pytest.approx(4e14 / (2 * 989.4e12), rel=1e-15)


# ---- TensorBoard (T05) ----


def test_tensorboard_after_a_resume_has_one_point_a_step(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = LogConfig()
    run(tmp_path, 0, 10, log)
    run(tmp_path, 6, 12, log, offset=100.0)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/loss_mean", "train/lr", "train/tokens", "valid/loss"}
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert all(a < b for a, b in pairwise(steps)), tag
        assert steps == list(range(2, 13, 2) if tag == "valid/loss" else range(1, 13)), tag
    loss = [event.value for event in events.Scalars("train/loss")]
    assert [x > 100 for x in loss] == [False] * 6 + [True] * 6
    assert loss == pytest.approx([line["loss"] for line in lines(tmp_path)], rel=2**-24)  # stored in float32


def test_all_written_steps_survive_a_kill_also_skipped_ones(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code = (
        "import os, math, pathlib\n"
        "from mtmegatron.config.schema import LogConfig\n"
        "from mtmegatron.train.metrics import Metrics\n"
        f"metrics = Metrics(pathlib.Path({str(tmp_path)!r}), LogConfig(), first_step=0, rank=0)\n"
        "for step in range(1, 20):\n"
        "    metrics.write(step, {'loss': 1.0})\n"
        "metrics.write(20, {'loss': math.nan, 'skipped': 'the loss is not finite'})\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 21))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 21))
    assert math.isnan(events.Scalars("train/loss")[-1].value)
    assert [(event.step, event.value) for event in events.Scalars("train/skipped")] == [(20, 1.0)]


# ---- W&B ----


class FakeRun:
    def __init__(self, **arguments):
        self.arguments, self.rows, self.axes, self.finished = arguments, [], [], False

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch):
    """The runs that a stand-in for wandb was asked to start."""
    runs: list[FakeRun] = []

    def init(**arguments):
        if arguments["project"] == "refused":
            raise module.Error("no key")
        runs.append(FakeRun(**arguments))
        return runs[-1]

    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.init, module.Error = init, type("Error", (Exception,), {})
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_absent_wandb_names_the_repair_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        Metrics(tmp_path / "run", LogConfig(wandb="project"), first_step=0, rank=0)
    assert not (tmp_path / "run").exists()
    require_wandb(PLAIN)


def test_wandb_goes_on_with_its_run_on_the_step_axis(tmp_path, wandb_runs):
    log = LogConfig(tensorboard=False, wandb="project")
    run(tmp_path, 0, 10, log)
    run(tmp_path, 6, 7, log)
    first, second = wandb_runs
    assert first.arguments["id"] == second.arguments["id"] and second.arguments["resume"] == "allow"
    assert ("*", "step") in second.axes and first.finished and second.finished
    (row,) = second.rows
    assert row == {
        "step": 7,
        "train/loss": 10 / 7,
        "train/loss_mean": lines(tmp_path)[6]["loss_mean"],
        "train/lr": 1e-3,
        "train/tokens": 448,
    }


def test_wandb_starts_another_run_when_training_starts_from_the_beginning(tmp_path, wandb_runs):
    log = LogConfig(tensorboard=False, wandb="project")
    run(tmp_path, 0, 3, log)
    run(tmp_path, 0, 3, log)
    assert wandb_runs[0].arguments["id"] != wandb_runs[1].arguments["id"]


def test_a_refusal_of_wandb_is_the_users_to_repair(tmp_path, wandb_runs):
    with pytest.raises(UserError, match="no key.*wandb login"):
        Metrics(tmp_path, LogConfig(tensorboard=False, wandb="refused"), first_step=0, rank=0)


def test_slow_libraries_are_imported_only_when_asked_for(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from mtmegatron.config.schema import LogConfig\n"
        "from mtmegatron.train import metrics, picture, progress\n"
        f"folder, log = pathlib.Path({str(tmp_path)!r}), LogConfig(tensorboard=False)\n"
        "m = metrics.Metrics(folder, log, first_step=0, rank=0)\n"
        "m.write(1, {'loss': 1.0})\n"
        "m.close()\n"
        "progress.Progress(1, 0, rank=0, terminal=False).update(1, {'loss': 1.0})\n"
        "print([name for name in ('tensorboard', 'matplotlib', 'wandb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- progress ----


class FakeClock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


VALUES = {"loss": 5.1234, "grad_norm": 1.234, "lr": 3e-4, "tokens_per_second": 12345.0}


def test_plain_lines(capsys):
    clock = FakeClock()
    progress = Progress(100, 9, rank=0, terminal=False, now=clock)
    clock.seconds = 83 / 90
    progress.update(10, VALUES)
    progress.say("[bold]checkpoint[/bold] written")
    progress.close()
    assert capsys.readouterr().out == (
        "step 10/100  loss 5.123  norm 1.23  lr 3.0e-04  12.3k tok/s  eta 01:23\n[bold]checkpoint[/bold] written\n"
    )


def test_output_that_is_no_terminal_gets_plain_lines(capsys):
    Progress(2, 0, rank=0).update(1, {"loss": 1.0})
    assert capsys.readouterr().out.startswith("step 1/2  loss 1.000  eta ")


def test_other_ranks_print_nothing(capsys):
    progress = Progress(2, 0, rank=3, terminal=True)
    progress.update(1, VALUES)
    progress.say("text")
    progress.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("loss", "text"),
    [(math.nan, "loss nan"), (-0.25, "loss -0.250"), (math.inf, "loss inf"), (0.0, "loss 0.000")],
)
def test_a_loss_is_shown_as_it_is(capsys, loss, text):
    Progress(2, 0, rank=0, terminal=False).update(1, {"loss": loss, "skipped": "the loss is not finite"})
    out = capsys.readouterr().out
    assert text in out and "SKIPPED: the loss is not finite" in out


def test_time_left_forgets_the_first_report_and_counts_steps_between_reports():
    clock = FakeClock()
    progress = Progress(50, 0, rank=0, terminal=False, now=clock)
    assert math.isnan(progress.seconds_left)
    clock.seconds = 60.0
    progress.update(1, {})
    assert progress.seconds_left == 60.0 * 49
    for step in range(11, 41, 10):
        clock.seconds += 20.0
        progress.update(step, {})
        assert progress.seconds_left == pytest.approx(2.0 * (50 - step), rel=1e-14)


def test_the_bar_shows_numbers_and_messages_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    progress = Progress(10, 0, rank=0, terminal=True)
    progress.say("validation [loss] 4.5")
    progress.update(7, {**VALUES, "loss": math.nan})
    progress.close()
    progress.close()
    out = capsys.readouterr().out
    assert "validation [loss] 4.5" in out and "7/10" in out and "loss nan  norm 1.23" in out
    assert "\x1b[?25l" in out and out.count("\x1b[?25h") == 1  # the cursor was hidden, and came back once


def test_words():
    assert [short(x) for x in (5, 999.4, 12345, 4.56e6, 7.8e9)] == ["5", "999", "12.3k", "4.6M", "7.8G"]
    assert [duration(x) for x in (0, 83, 7384, 93784, math.nan)] == ["00:00", "01:23", "2:03:04", "1d 02:03:04", "?"]
    assert describe({"mfu": 0.4123, "memory_bytes": 7}) == "mfu 41.2%"


# ---- picture ----


def pixels(file: Path) -> np.ndarray:
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return pytest.importorskip("matplotlib.image").imread(file)[..., :3]


def has_colour(image: np.ndarray, rgb: tuple[float, float, float]) -> bool:
    return bool((np.abs(image - np.array(rgb)).max(-1) < 1.5 / 255).any())


BLUE, ORANGE, RED = ((31 / 255, 119 / 255, 180 / 255), (1.0, 127 / 255, 14 / 255), (214 / 255, 39 / 255, 40 / 255))


def test_the_picture_shows_training_validation_and_skipped_steps(tmp_path):
    run(tmp_path, 0, 60)
    loss_picture(tmp_path / "metrics.jsonl", tmp_path / "pictures" / "loss.png")
    image = pixels(tmp_path / "pictures" / "loss.png")
    assert image.shape[0] > 300 and image.shape[1] > 500
    assert has_colour(image, BLUE) and has_colour(image, ORANGE) and not has_colour(image, RED)
    metrics = Metrics(tmp_path, PLAIN, first_step=60, rank=0)
    metrics.write(61, {"loss": math.nan, "skipped": "the loss is not finite"})
    metrics.close()
    loss_picture(tmp_path / "metrics.jsonl", tmp_path / "pictures" / "loss.png")
    assert has_colour(pixels(tmp_path / "pictures" / "loss.png"), RED)


@pytest.mark.parametrize("loss", [1000.0, math.nan])
def test_the_loss_of_a_skipped_step_is_not_drawn(tmp_path, loss):
    for name, skipped_loss in (("zero", 0.0), ("other", loss)):
        metrics = Metrics(tmp_path, PLAIN, first_step=0, rank=0)
        for step in range(1, 5):
            metrics.write(step, {"loss": 2.0 / step} if step != 2 else {"loss": skipped_loss, "skipped": "x"})
        metrics.close()
        loss_picture(tmp_path / "metrics.jsonl", tmp_path / f"{name}.png")
    assert np.array_equal(pixels(tmp_path / "zero.png"), pixels(tmp_path / "other.png"))


def test_a_run_of_skipped_steps_alone_can_be_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": "NaN", "skipped": "x"}\n')
    loss_picture(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert has_colour(pixels(tmp_path / "loss.png"), RED)


def test_without_a_loss_there_is_no_picture(tmp_path):
    with pytest.raises(UserError, match="is not there"):
        loss_picture(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "valid_loss": 3.0}\n')
    with pytest.raises(UserError, match="no training loss"):
        loss_picture(tmp_path / "metrics.jsonl", tmp_path / "loss.png")


def test_smoothing_is_a_centred_mean_that_passes_over_nan():
    line = np.arange(80.0)
    assert smooth(line)[2:-2] == pytest.approx(line[2:-2], abs=80**2 * 2**-52)  # a centred mean keeps a straight line
    assert smooth(line)[0] == 1.0  # of 0, 1, 2
    line[10] = np.nan
    assert smooth(line)[10] == pytest.approx((8 + 9 + 11 + 12) / 4, abs=80**2 * 2**-52)
    assert len(smooth(np.array([]))) == 0
