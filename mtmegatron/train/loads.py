"""The load of every expert over a whole run: kept beside the metrics, drawn as a heat map.

    folder/loads.npz    the loads, written with each checkpoint and at the end
    folder/loads.png    their picture

Notable: at most `COLUMNS` points in time are kept. When there are more, neighbours become one with their mean, so file, picture and host memory have
one size however long the run is. A run that is resumed goes on with what was kept up to its step.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtmegatron.checkpoint.store import writes_to
from mtmegatron.errors import UserError
from mtmegatron.train.experts import Load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 256
RANGE = 2  # the picture's colours end at 2^-RANGE and 2^RANGE times the mean load


@dataclass
class Column:
    """`total`: sum of the loads of `count` steps, [L, E], relative to the mean; `step`: the last of them."""

    step: int
    count: int
    total: np.ndarray


class LoadHistory:
    """Loads of the steps that were logged. `first_step`: steps made before this attempt; what was kept beyond is forgotten.

    Raises UserError where `loads.npz` is damaged."""

    def __init__(self, folder: Path, first_step: int):
        self._folder, self._stride = folder, 1
        self.blocks: list[int] = []
        self.columns: list[Column] = []
        if first_step and self._file.exists():
            self._read(first_step)

    @property
    def _file(self) -> Path:
        return self._folder / "loads.npz"

    def add(self, step: int, loads: dict[int, Load]) -> None:
        """`loads` by number of the block, of step `step` (steps made)."""
        self.blocks = list(loads)
        now = np.array([load.relative for load in loads.values()], dtype=np.float32)
        if self.columns and self.columns[-1].count < self._stride:
            last = self.columns.pop()
            self.columns.append(Column(step, last.count + 1, last.total + now))
        else:
            self.columns.append(Column(step, 1, now))
        if len(self.columns) > COLUMNS:
            pairs = [self.columns[i : i + 2] for i in range(0, len(self.columns), 2)]
            self.columns = [Column(pair[-1].step, sum(c.count for c in pair), sum(c.total for c in pair)) for pair in pairs]
            self._stride *= 2

    def write(self) -> np.ndarray | None:
        """Writes file and picture; returns the picture's pixels, [height, width, 3] bytes. None: there is nothing to draw yet."""
        if not self.columns:
            return None
        self._save()
        figure = draw(self)
        with writes_to(self._folder / "loads.png"):
            figure.savefig(self._folder / "loads.png", format="png")
        figure.canvas.draw()
        return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()

    def _save(self) -> None:
        """By one rename: a kill leaves the file whole."""
        beside = self._folder / ".loads.npz"
        steps, counts = ([getattr(c, name) for c in self.columns] for name in ("step", "count"))
        with writes_to(self._file):
            np.savez(beside, stride=self._stride, blocks=self.blocks, steps=steps, counts=counts, totals=np.stack([c.total for c in self.columns]))
            beside.rename(self._file)

    def _read(self, first_step: int) -> None:
        try:
            with np.load(self._file) as kept:
                self._stride, self.blocks = int(kept["stride"]), kept["blocks"].tolist()
                columns = map(Column, kept["steps"].tolist(), kept["counts"].tolist(), kept["totals"])
                self.columns = [column for column in columns if column.step <= first_step]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{self._file} cannot be read ({error}): remove it, the heat map then begins anew") from None


def draw(history: LoadHistory) -> "Figure":
    """Steps from left to right, the experts of each layer from top to bottom, white where an expert has the mean load, red above, blue below."""
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,  # takes a second to import
    )
    from matplotlib.figure import Figure

    mean = np.stack([c.total / c.count for c in history.columns], axis=-1)  # [L, E, columns]
    layers, experts, _ = mean.shape
    figure = Figure(figsize=(8, min(3 + 0.06 * layers * experts, 14)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [c.step for c in history.columns]
    log = np.log2(np.maximum(mean, 2.0**-9)).reshape(layers * experts, -1)
    edges = np.concatenate([[steps[0] - (steps[-1] - steps[0]) / max(len(steps) - 1, 1) - (len(steps) == 1)], steps])
    shown = axes.pcolormesh(edges, np.arange(layers * experts + 1), log, cmap="RdBu_r", vmin=-RANGE, vmax=RANGE)
    axes.invert_yaxis()
    axes.set_yticks((np.arange(layers) + 0.5) * experts, [f"block {block}" for block in history.blocks])
    axes.hlines(np.arange(1, layers) * experts, edges[0], edges[-1], colors="black", linewidth=0.8)
    axes.set(xlabel="optimizer step", title=f"Load of each of {experts} experts, relative to the mean")
    ticks = range(-RANGE, RANGE + 1)
    figure.colorbar(shown, ax=axes, ticks=list(ticks), extend="both").ax.set_yticklabels([f"{2.0**t:g}x" for t in ticks])
    return figure
