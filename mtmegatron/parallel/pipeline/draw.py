"""Draw a simulated pipeline plan: a row per rank, a box per action, time to the right; what stays white is the bubble.

Colour tells the kind, a lighter shade a later chunk, the number the micro-batch (left out where it does not fit).
Grey is time spent in transfers. matplotlib is loaded only when something is drawn, without its global figure state.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from mtmegatron.errors import UserError
from mtmegatron.parallel.pipeline.simulate import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"F": "#4c8bf5", "B": "#5bb55f", "I": "#b07cd8", "W": "#f2a541"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
GREY = "#c8c8c8"
FORMATS = (".svg", ".png", ".pdf")
ROW, BOX, DIGIT = 0.3, 0.22, 0.075  # inches: height of a row, wished width of the shortest box, width of a digit


def draw(timeline: Timeline, path: str | Path) -> Path:
    """Write the picture of a timeline to `path`, as its suffix says (svg, png, pdf), and return the path.

    Raises UserError for another suffix.
    """
    from matplotlib.figure import Figure

    path = Path(path)
    if path.suffix not in FORMATS:
        raise UserError(f"cannot draw to {path}: the name must end in one of {', '.join(FORMATS)}")
    width = _width(timeline)
    figure = Figure(figsize=(width + 1, ROW * timeline.plan.stages + 1.1), layout="constrained")
    axes = figure.add_subplot()
    _boxes(axes, timeline)
    _numbers(axes, timeline, inches_per_time=width / float(timeline.makespan))
    _frame(axes, timeline)
    figure.savefig(path, dpi=150)
    return path


def _width(timeline: Timeline) -> float:
    """Inches for the time axis: the shortest box gets its wished width, within the limits of a page and a poster."""
    lengths = [span.end - span.start for span in timeline.spans if span.compute and span.end > span.start]
    return min(max(BOX * float(timeline.makespan / min(lengths)), 6.0), 40.0)


def _boxes(axes: "Axes", timeline: Timeline) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    spans = [span for span in timeline.spans if span.end > span.start]
    boxes = [Rectangle((float(span.start), span.rank - 0.45), float(span.end - span.start), 0.9) for span in spans]
    colours = [_colour(span, timeline.plan.chunks) for span in spans]
    axes.add_collection(PatchCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.4))


def _colour(span: Span, chunks: int) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    white = 0.65 * span.action.chunk / chunks
    return tuple(part + (1 - part) * white for part in to_rgb(COLOURS.get(span.action.kind, GREY)))


def _numbers(axes: "Axes", timeline: Timeline, inches_per_time: float) -> None:
    for span in timeline.spans:
        number = str(span.action.micro_batch)
        if span.compute and float(span.end - span.start) * inches_per_time > DIGIT * (len(number) + 1):
            middle = float(span.start + span.end) / 2
            axes.text(middle, span.rank, number, ha="center", va="center_baseline", fontsize=7, clip_on=True)


def _frame(axes: "Axes", timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    plan = timeline.plan
    axes.set_xlim(0, float(timeline.makespan))
    axes.set_ylim(plan.stages - 0.5, -0.5)
    axes.set_yticks(range(plan.stages), [f"rank {rank}" for rank in range(plan.stages)])
    axes.set_xlabel("time")
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{plan.kind}: {plan.stages} ranks, {plan.chunks} chunks each, {plan.micro_batches} micro-batches; bubble"
    axes.set_title(f"{title} {100 * float(timeline.bubble):.1f} %", fontsize=9, loc="left")
    kinds = [kind for kind in COLOURS if any(span.action.kind == kind for span in timeline.spans)]
    keys = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25)}
    axes.legend(handles=keys, ncols=len(keys), fontsize=7, frameon=False, **below)
