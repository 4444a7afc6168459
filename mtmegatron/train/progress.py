"""What a person sees of a run while it goes on: a live bar on a terminal, one line a report elsewhere; rank 0 only.

Notable: numbers are shown as they are, also a loss that is negative or not a number. The time left comes from a running
mean of the time between reports, in which evaluations and checkpoints are contained; the first report, which pays for
warm-up, counts only until there is a second.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from mtmegatron.train.metrics import RunningMean, Values


class View(Protocol):
    """Where reports and messages appear."""

    def update(self, step: int, text: str) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    """The display of a run of `total_steps`, of which `first_step` are made.

    `terminal`: whether standard output is one; None: ask it. `now`: a clock in seconds."""

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        *,
        rank: int,
        terminal: bool | None = None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self._total, self._step, self._now = total_steps, first_step, now
        self._then, self._reports, self._pace = now(), 0, RunningMean()
        self._view = _choose_view(total_steps, first_step, rank, sys.stdout.isatty() if terminal is None else terminal)

    def update(self, step: int, values: Values) -> None:
        """Shows the values of `step`, the number of steps made."""
        self._measure(step)
        self._view.update(step, f"{describe(values)}  eta {duration(self.seconds_left)}")

    def say(self, text: str) -> None:
        """Prints a message of its own, above the bar."""
        self._view.say(text)

    def close(self) -> None:
        """Leaves the terminal as it was; may be called again."""
        self._view.close()

    @property
    def seconds_left(self) -> float:
        """Expected seconds to the last step. NaN before the first report."""
        return self._pace.value * (self._total - self._step)

    def _measure(self, step: int) -> None:
        now = self._now()
        if self._reports == 1:
            self._pace = RunningMean()
        if step > self._step:
            self._pace.add((now - self._then) / (step - self._step))
            self._reports += 1
        self._then, self._step = now, step


# ---- text ----


def describe(values: Values) -> str:
    """The values that a person watches, in one line: `loss 5.123  norm 1.23  lr 3.0e-04  12.3k tok/s`."""
    show: dict[str, Callable[[float], str]] = {
        "loss": lambda x: f"loss {x:.3f}",
        "grad_norm": lambda x: f"norm {x:.3g}",
        "lr": lambda x: f"lr {x:.1e}",
        "experts_load_highest": lambda x: f"load {x:.2f}",
        "tokens_per_second": lambda x: f"{short(x)} tok/s",
        "mfu": lambda x: f"mfu {x:.1%}",
        "skipped": lambda x: f"SKIPPED: {x}",
    }
    return "  ".join(text(values[key]) for key, text in show.items() if key in values)


def short(x: float) -> str:
    """A number in at most four digits: 999, 12.3k, 4.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.1f}{unit}"
    return f"{x:.0f}"


def duration(seconds: float) -> str:
    """01:23, 2:03:04 or 1d 02:03:04; ? for NaN."""
    if seconds != seconds:
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02d}:{m:02d}:{s:02d}"
    return f"{h}:{m:02d}:{s:02d}" if h else f"{m:02d}:{s:02d}"


# ---- views ----


def _choose_view(total: int, first: int, rank: int, terminal: bool) -> View:
    if rank:
        return _Nothing()
    if not terminal:
        return _Plain(total)
    from rich.console import Console

    console = Console(force_terminal=True)
    # a terminal that cannot move its cursor would show no bar at all
    return _Plain(total) if console.is_dumb_terminal else _Bar(console, total, first)


class _Nothing:
    def update(self, step: int, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Plain(_Nothing):
    """One line a report, at once, so that a file or a pipe can be followed."""

    def __init__(self, total: int):
        self._total = total

    def update(self, step: int, text: str) -> None:
        print(f"step {step}/{self._total}  {text}", flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)


class _Bar:
    """A bar that is as wide as the numbers beside it allow."""

    def __init__(self, console: Any, total: int, first: int):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
        numbers = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        self._bar = Progress(MofNCompleteColumn(), bar, numbers, console=console, refresh_per_second=4, expand=True)
        self._task = self._bar.add_task("", total=total, completed=first)
        self._bar.start()

    def update(self, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text)

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()
