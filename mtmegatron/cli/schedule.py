"""`mtm schedule`: a pipeline schedule in numbers and as a picture, before anything runs; `all` compares every kind.

Notable: the plan is the one that training executes, message for message. Costs are kept as exact fractions, so the
closed forms of the papers come out to the last digit.
"""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from mtmegatron.parallel.pipeline.simulate import Timeline

UNITS = "Times in units of the costs, activations in micro-batches of a full stage."


def schedule_command(
    kind: Annotated[str, typer.Argument(help="1f1b, gpipe, interleaved, zb-h1, zb-v, dualpipe-v, forward_only, or all.")],
    stages: Annotated[int, typer.Option(help="Ranks of the pipeline.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step on each data rank.")] = 8,
    chunks: Annotated[int | None, typer.Option(help="Model chunks on each rank; default: 2 where the kind takes them.")] = None,
    forward: Annotated[float, typer.Option(help="Time of a full stage's forward.")] = 1.0,
    input_grad: Annotated[float, typer.Option(help="Time of its input gradient.")] = 1.0,
    weight_grad: Annotated[float, typer.Option(help="Time of its weight gradient.")] = 1.0,
    transfer: Annotated[float, typer.Option(help="Time of one message.")] = 0.0,
    draw: Annotated[Path | None, typer.Option(help="Draw the timeline to this file (.svg, .png, .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a pipeline schedule costs: makespan, bubble, idle time, peak activations, messages.

    Example: `mtm schedule zb-v --stages 4 --micro-batches 8 --draw zb-v.svg`
    """
    from mtmegatron.parallel.pipeline.draw import draw_together, drawable
    from mtmegatron.parallel.pipeline.schedule import KINDS

    costs = exact(forward, input_grad, weight_grad, transfer)
    if draw is not None:
        drawable(draw)
    compare = kind == "all"
    kinds = list(KINDS) if compare else [kind]
    timelines = [timeline_of(name, stages, micro_batches, chunks, costs, lenient=compare) for name in kinds]
    numbers = [facts(timeline, costs) for timeline in timelines]
    if as_json:
        print(json.dumps(numbers if compare else numbers[0], indent=2))
    elif compare:
        _print_comparison(numbers)
    else:
        _print_one(numbers[0])
    if draw is not None:
        draw_together([("", timeline) for timeline in timelines], draw)


def exact(forward: float, input_grad: float, weight_grad: float, transfer: float) -> tuple[Fraction, ...]:
    """The costs as fractions of the decimals that were typed. Raises UserError for what is no time."""
    from mtmegatron.errors import UserError

    costs = {"forward": forward, "input-grad": input_grad, "weight-grad": weight_grad, "transfer": transfer}
    for name, cost in costs.items():
        if not math.isfinite(cost) or cost < 0 or (name == "forward" and cost == 0):
            least = "a time above 0" if name == "forward" else "a time of 0 or more"
            raise UserError(f"--{name} is {cost:g}: give {least}")
    return tuple(Fraction(str(cost)) for cost in costs.values())


def timeline_of(
    kind: str, stages: int, micro_batches: int, chunks: int | None, costs: tuple[Fraction, ...], lenient: bool = False
) -> "Timeline":
    """The simulated timeline of a kind. lenient: a kind with a fixed number of chunks takes that, whatever was asked."""
    from mtmegatron.parallel.pipeline.schedule import KINDS, schedule
    from mtmegatron.parallel.pipeline.simulate import simulate

    fixed = KINDS[kind].chunks if kind in KINDS else None
    usual = fixed or (1 if kind == "forward_only" else 2)
    taken = usual if chunks is None or (lenient and fixed) else chunks
    return simulate(schedule(kind, stages, taken, micro_batches), *costs)


def facts(timeline: "Timeline", costs: tuple[Fraction, ...]) -> dict:
    """All that the command shows of one schedule."""
    from mtmegatron.parallel.pipeline.closed_form import Sizes, idle_time

    plan = timeline.plan
    forward, input_grad, weight_grad, transfer = costs
    form = idle_time(plan.kind, Sizes(plan.stages, plan.chunks, plan.micro_batches, forward, input_grad, weight_grad))
    messages = [sum(action.kind.startswith("SEND") for action in actions) for actions in plan.actions]
    return {
        "kind": plan.kind, "stages": plan.stages, "chunks": plan.chunks, "micro_batches": plan.micro_batches,
        "costs": dict(zip(("forward", "input_grad", "weight_grad", "transfer"), map(float, costs))),
        "makespan": float(timeline.makespan),
        "bubble": float(timeline.bubble),
        "closed_form": {"idle": form[0], "value": float(form[1])} if form and not transfer else None,
        "idle": [float(idle) for idle in timeline.idle],
        "peak": list(timeline.peak),
        "sent": messages,
        "transfers": sum(messages),
    }  # fmt: skip


def _print_one(numbers: dict) -> None:
    from rich import box
    from rich.table import Table

    console = _console()
    sizes = f"{numbers['stages']} ranks, chunks {numbers['chunks']}, micro-batches {numbers['micro_batches']}"
    costs = ", ".join(f"{name.replace('_', ' ')} {cost:g}" for name, cost in numbers["costs"].items())
    console.print(f"{numbers['kind']}: {sizes}; {costs}")
    form = numbers["closed_form"]
    closed = f"; each rank idles {form['idle']} = {form['value']:g}" if form else ""
    console.print(f"makespan {numbers['makespan']:g}, bubble {numbers['bubble']:.1%}{closed}")
    table = Table(box=box.SIMPLE)
    for column in ("rank", "idle", "peak activations", "messages sent"):
        table.add_column(column, justify="right")
    for rank, row in enumerate(zip(numbers["idle"], numbers["peak"], numbers["sent"])):
        table.add_row(str(rank), *(f"{value:g}" for value in row))
    console.print(table)
    console.print(f"{numbers['transfers']} messages in all. {UNITS}")


def _print_comparison(numbers: list[dict]) -> None:
    from rich import box
    from rich.table import Table

    first = numbers[0]
    costs = ", ".join(f"{name.replace('_', ' ')} {cost:g}" for name, cost in first["costs"].items())
    console = _console()
    console.print(f"{first['stages']} ranks, {first['micro_batches']} micro-batches; {costs}")
    table = Table("kind", box=box.SIMPLE)
    for column in ("chunks", "makespan", "bubble", "idle", "peak activations", "messages"):
        table.add_column(column, justify="right")
    table.add_column("idle, closed form")
    for row in numbers:
        table.add_row(*comparison_row(row), (row["closed_form"] or {"idle": ""})["idle"])
    console.print(table)
    console.print(UNITS)


def comparison_row(numbers: dict) -> list[str]:
    """A schedule as one row: kind, chunks, makespan, bubble, idle and peak of the worst rank, messages."""
    counts = [f"{numbers['makespan']:g}", f"{numbers['bubble']:.1%}", f"{max(numbers['idle']):g}"]
    return [numbers["kind"], str(numbers["chunks"]), *counts, f"{max(numbers['peak']):g}", str(numbers["transfers"])]


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, width=None if Console().is_terminal else 120)
