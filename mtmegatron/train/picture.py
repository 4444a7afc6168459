"""The loss of a run as a picture, from its metrics.jsonl.

Notable: drawn without a display and without matplotlib's global figure. The smoothed curve is a mean over a centred
window, so it does not lag behind the loss as a running mean does; skipped steps are marks at the bottom and never part
of a curve.
"""

from pathlib import Path
from typing import Any

import numpy as np

from mtmegatron.checkpoint.store import writes_to
from mtmegatron.errors import UserError
from mtmegatron.train.metrics import read_metrics


def loss_picture(metrics_file: Path, out: Path) -> None:
    """Draws training loss (faint), its smoothed course, validation losses and skipped steps over steps, as PNG.

    Raises: UserError where the file is absent, damaged or without a loss, or the picture cannot be written."""
    lines = list(read_metrics(metrics_file))
    if not any("loss" in line for line in lines):
        raise UserError(f"{metrics_file} has no training loss yet: draw when the run has made a step")
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    _draw(figure.add_subplot(), lines, metrics_file.resolve().parent.name)
    with writes_to(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="png")


def _draw(axes: Any, lines: list[dict[str, Any]], run: str) -> None:
    steps, loss = _column([line for line in lines if "skipped" not in line], "loss")
    axes.plot(steps, loss, color="tab:blue", alpha=0.3, linewidth=1, label="training")
    axes.plot(steps, smooth(loss), color="tab:blue", linewidth=1.8, label="training, smoothed")
    if any("valid_loss" in line for line in lines):
        axes.plot(*_column(lines, "valid_loss"), color="tab:orange", marker="o", markersize=5, label="validation")
    skipped = [line["step"] for line in lines if "skipped" in line]
    if skipped:
        bottom = axes.get_xaxis_transform()
        axes.plot(skipped, [0.02] * len(skipped), "x", color="tab:red", transform=bottom, label="skipped steps")
    axes.set(xlabel="optimizer step", ylabel="loss per token (nats)", title=f"Loss of {run}")
    axes.grid(alpha=0.3)
    axes.legend()


def smooth(loss: np.ndarray) -> np.ndarray:
    """Mean over a centred window of a twentieth of the run; over what there is of it at the ends and around NaN."""
    finite, reach, places = np.isfinite(loss), len(loss) // 40, np.arange(len(loss))
    begin, end = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(loss))
    total, count = (np.concatenate([[0.0], np.cumsum(x)]) for x in (np.where(finite, loss, 0.0), finite))
    total, count = total[end] - total[begin], count[end] - count[begin]
    return np.divide(total, count, out=np.full(len(loss), np.nan), where=count > 0)


def _column(lines: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the lines that have `key`."""
    pairs = [(line["step"], line[key]) for line in lines if key in line]
    return np.array([step for step, _ in pairs]), np.array([x for _, x in pairs], dtype=float)
