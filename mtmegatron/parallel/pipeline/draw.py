"""Draw pipeline timelines, simulated or measured: a row per rank, a box per action, time to the right; white is the bubble.

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
ROW, BOX, DIGIT = 0.3, 0.22, 0.075  # inches: height of a row, wished width of a short box, width of a digit


def draw(timeline: Timeline, path: str | Path) -> Path:
    """Write the picture of a timeline to `path`, as its suffix says (svg, png, pdf), and return the path.

    Raises UserError for another suffix, or a file that cannot be written.
    """
    return draw_together([("", timeline)], path)


def draw_together(pictures: list[tuple[str, Timeline]], path: str | Path, unit: str = "") -> Path:
    """Write one picture of several timelines, one below the other on one time scale; each with words before its title.

    Raises UserError as `draw` does.
    """
    from matplotlib.figure import Figure

    path = drawable(path)
    timelines = [timeline for _, timeline in pictures]
    width, end = max(map(_width, timelines)), max(float(timeline.makespan) for timeline in timelines)
    heights = [ROW * timeline.plan.stages + 1.1 for timeline in timelines]
    figure = Figure(figsize=(width + 1, sum(heights)), layout="constrained")
    grid = figure.subplots(len(pictures), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (before, timeline) in zip(grid, pictures):
        _boxes(axes, timeline)
        _numbers(axes, timeline, inches_per_time=width / end)
        _frame(axes, timeline, before, end, unit)
    try:
        figure.savefig(path, dpi=150)
    except OSError as fault:
        raise UserError(f"cannot draw to {path}: {fault.strerror}: choose a file that can be written") from None
    return path


def drawable(path: str | Path) -> Path:
    """The path of a picture. Raises UserError when its suffix names no format."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise UserError(f"cannot draw to {path}: the name must end in one of {', '.join(FORMATS)}")
    return path


def _width(timeline: Timeline) -> float:
    """Inches for the time axis: short boxes get their wished width, within the limits of a page and a poster.

    A quarter of the boxes may be narrower: the fastest of many measured times must not stretch the picture.
    """
    lengths = sorted(span.end - span.start for span in timeline.spans if span.compute and span.end > span.start)
    return min(max(BOX * float(timeline.makespan / lengths[len(lengths) // 4]), 6.0), 40.0)


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


def _frame(axes: "Axes", timeline: Timeline, before: str, end: float, unit: str) -> None:
    from matplotlib.patches import Patch

    plan = timeline.plan
    axes.set_xlim(0, end)
    axes.set_ylim(plan.stages - 0.5, -0.5)
    axes.set_yticks(range(plan.stages), [f"rank {rank}" for rank in range(plan.stages)])
    axes.set_xlabel(f"time ({unit})" if unit else "time")
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{before}: " * bool(before) + f"{plan.kind}, {plan.stages} ranks, chunks {plan.chunks}"
    title += f", micro-batches {plan.micro_batches}; bubble {100 * float(timeline.bubble):.1f} %"
    axes.set_title(title, fontsize=9, loc="left")
    kinds = [kind for kind in COLOURS if any(span.action.kind == kind for span in timeline.spans)]
    keys = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    if any(span.end > span.start and not span.compute for span in timeline.spans):
        keys.append(Patch(color=GREY, label="transfer"))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 4.5}  # font sizes: below the axis label
    axes.legend(handles=keys, ncols=len(keys), fontsize=7, frameon=False, **below)
