"""What a run tells about its steps, on one axis: the number of optimizer steps made.

    folder/metrics.jsonl    one JSON object a step: {"step": 7, "loss": 2.5, "grad_norm": 1.1, ...}
    folder/tensorboard/     event files, unless `log.tensorboard: false`
    folder/wandb/, wandb.id where `log.wandb` names a project

Notable:
- All values of a step lie on the line of that step: writing twice for one step completes its line. A key that starts
  with `valid_` or `experts_` becomes the tag `valid/...` or `experts/...`, any other `train/...`.
- A number that is not finite is never dropped. JSON has no word for it, so it is the string "NaN", "Infinity" or
  "-Infinity", which `float()` of most languages reads; `read_metrics` gives numbers back.
- A step that changed nothing has `skipped`, the reason, and stays out of `loss_mean`, the running mean of `loss`. That
  mean is computed from the lines alone, so it goes on exactly after a resume.
- An attempt that starts at an earlier step than the one before had reached removes what that one wrote beyond.
- Each line is handed to the operating system at once: what precedes a checkpoint survives a kill right after it.
"""

import importlib
import importlib.util
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mtmegatron.checkpoint.store import writes_to
from mtmegatron.config.schema import LogConfig
from mtmegatron.errors import UserError

Values = dict[str, float | int | str]
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Sink(Protocol):
    """A place that values of steps are written to."""

    def write(self, step: int, values: Values) -> None: ...

    def image(self, step: int, tag: str, pixels: np.ndarray) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Writes the values of steps on rank 0 and does nothing on the others.

    `first_step`: optimizer steps made before this attempt; what an earlier attempt wrote beyond is removed.
    Raises: UserError where a file cannot be written, metrics.jsonl is damaged before its last line, or W&B is absent or
    refuses.
    """

    def __init__(self, folder: Path, log: LogConfig, *, first_step: int, rank: int):
        self._sinks: list[Sink] = []
        self._mean = RunningMean()
        if rank == 0:
            self._open(folder, log, first_step)

    def write(self, step: int, values: Values) -> None:
        """Adds values to the line of `step`, the number of optimizer steps made. Steps never go back."""
        if not self._sinks:
            return
        self._count(values)
        if "loss" in values and math.isfinite(self._mean.value):
            values = {**values, "loss_mean": self._mean.value}
        for sink in self._sinks:
            sink.write(step, values)

    def image(self, step: int, tag: str, pixels: np.ndarray) -> None:
        """A picture for the trackers, [height, width, 3] bytes."""
        for sink in self._sinks:
            sink.image(step, tag, pixels)

    def close(self) -> None:
        """Completes and closes the files; may be called again."""
        while self._sinks:
            self._sinks.pop().close()

    def _open(self, folder: Path, log: LogConfig, first_step: int) -> None:
        require_wandb(log)
        file = folder / "metrics.jsonl"
        with writes_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
        cut(file, first_step)
        last: dict[str, Any] = {}
        for last in read_metrics(file):
            self._count(last)
        self._sinks.append(_Lines(file, last))
        if log.tensorboard:
            self._sinks.append(_TensorBoard(folder / "tensorboard", first_step))
        if log.wandb is not None:
            self._sinks.append(_Wandb(folder, log.wandb, continues=bool(last)))

    def _count(self, values: Values) -> None:
        if "loss" in values and "skipped" not in values:
            self._mean.add(values["loss"])


class RunningMean:
    """Mean of the values so far, older ones weighing less: m_n = sum_i r^(n-i) x_i / sum_i r^(n-i).

    NaN before the first value; a value that is not finite is passed over. With the default, half of the weight
    lies on the last 14 values."""

    def __init__(self, retain: float = 0.95):
        self.retain, self.total, self.weight = retain, 0.0, 0.0

    def add(self, x: float) -> None:
        if math.isfinite(x):
            self.total = self.retain * self.total + x
            self.weight = self.retain * self.weight + 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan


# ---- speed ----


def throughput(
    tokens: int, seconds: float, *, flops_per_token: float, peak_per_rank: float | None, world: int
) -> dict[str, float]:
    """Values of a step that took `seconds` for the `tokens` of the global batch, padding included.

    They are `seconds`, `tokens_per_second` of all ranks, `tflops_per_rank` (10^12 model FLOP/s) and, where the peak is
    known, `mfu`."""
    rate = tokens / seconds
    values = {"seconds": seconds, "tokens_per_second": rate, "tflops_per_rank": flops_per_token * rate / world / 1e12}
    used = mfu(flops_per_token, rate, peak_per_rank, world)
    return values if used is None else {**values, "mfu": used}


def mfu(flops_per_token: float, tokens_per_second: float, peak_per_rank: float | None, world: int) -> float | None:
    """Model FLOPs utilisation, a fraction: model FLOP/s over the dense peak of all ranks.

    `peak_per_rank`: FLOP/s; None where it is not known, and then there is no utilisation.
    Source: Chowdhery et al. 2022, PaLM, appendix B."""
    return None if peak_per_rank is None else flops_per_token * tokens_per_second / (peak_per_rank * world)


# ---- metrics.jsonl ----


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl, numbers that are not finite as floats again.

    A last line that was cut by a kill is passed over.
    Raises: UserError where there is no such file, or where another line than the last is not one of metrics."""
    if not file.is_file():
        raise UserError(f"{file} is not there: give the metrics.jsonl of a run's folder")
    with file.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                int(line["step"])
            except (ValueError, KeyError, TypeError):
                if next(lines, None) is None:
                    return
                what = f"{file}, line {number} is not a line of metrics"
                raise UserError(f"{what}: remove it, or move the file away") from None
            yield {key: NOT_FINITE.get(x, x) if isinstance(x, str) else x for key, x in line.items()}


def cut(file: Path, step: int) -> None:
    """Leaves the whole lines up to `step` in a metrics.jsonl, by one rename; makes the file where there is none."""
    before = read_metrics(file) if file.exists() else iter(())
    beside = file.with_name(file.name + ".tmp")
    with writes_to(file), beside.open("wb") as lines:
        lines.writelines(_encode(line) for line in before if line["step"] <= step)
        lines.flush()
        os.fsync(lines.fileno())
        beside.rename(file)


def _encode(line: dict[str, Any]) -> bytes:
    plain = {key: _finite_or_name(x) for key, x in line.items()}
    return (json.dumps(plain, allow_nan=False) + "\n").encode()


def _finite_or_name(x: float | int | str) -> float | int | str:
    if not isinstance(x, float) or math.isfinite(x):
        return x
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


class _Lines:
    """metrics.jsonl, open at its end; `last` is its last line, as `cut` left it."""

    def __init__(self, file: Path, last: dict[str, Any]):
        self._path, self._line = file, last
        with writes_to(file):
            self._file = file.open("r+b")
        end = self._file.seek(0, os.SEEK_END)
        self._start = end - len(_encode(last)) if last else end

    def write(self, step: int, values: Values) -> None:
        before = self._line.get("step", -1)
        assert step >= before, f"step {step} after step {before}"
        if step > before:
            self._start, self._line = self._file.tell(), {"step": step}
        self._line.update(values)
        with writes_to(self._path):
            self._file.seek(self._start)
            self._file.write(_encode(self._line))
            self._file.truncate()  # flushes first

    def image(self, step: int, tag: str, pixels: np.ndarray) -> None:
        """A line of text has none."""

    def close(self) -> None:
        with writes_to(self._path):
            self._file.close()


# ---- trackers ----


def tags(values: Values) -> dict[str, float | int]:
    """Values under the names that trackers show; a skipped step is a 1."""
    named = {re.sub("^(valid|experts)_|^", lambda found: f"{found[1] or 'train'}/", key): x for key, x in values.items()}
    return {tag: 1 if tag == "train/skipped" else x for tag, x in named.items()}


class _TensorBoard:
    """Event files; readers drop what an earlier attempt wrote from `first_step` + 1 on."""

    def __init__(self, folder: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        with writes_to(folder):
            self._writer = SummaryWriter(folder, purge_step=first_step + 1)

    def write(self, step: int, values: Values) -> None:
        for tag, x in tags(values).items():
            self._writer.add_scalar(tag, x, step)
        self._writer.flush()

    def image(self, step: int, tag: str, pixels: np.ndarray) -> None:
        self._writer.add_image(tag, pixels, step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def require_wandb(log: LogConfig) -> None:
    """Raises UserError if W&B is asked for and not installed; can be called before any process group exists."""
    if log.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise UserError("log.wandb is set, but wandb is not installed: run `pip install wandb`, or remove log.wandb")


class _Wandb:
    """One W&B run for all attempts that go on from a written step; its id lies in the folder.

    The step is a value of its own and the axis of all others: W&B's built-in counter drops points of a step that it
    has passed, as those between a checkpoint and the kill after it are."""

    def __init__(self, folder: Path, project: str, *, continues: bool):
        wandb = importlib.import_module("wandb")
        memory = folder / "wandb.id"
        with writes_to(memory):
            if not (continues and memory.exists()):
                memory.write_text(secrets.token_hex(4))
            name = memory.read_text()
        try:
            self._run = wandb.init(project=project, id=name, resume="allow", dir=str(folder))
        except wandb.Error as error:
            repair = "run `wandb login`, or remove log.wandb"
            raise UserError(f"log.wandb: W&B refused to start: {error}: {repair}") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Values) -> None:
        self._run.log({"step": step, **tags(values)})

    def image(self, step: int, tag: str, pixels: np.ndarray) -> None:
        self._run.log({"step": step, tag: importlib.import_module("wandb").Image(pixels)})

    def close(self) -> None:
        self._run.finish()
