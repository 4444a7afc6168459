"""`mtm info`: what a model has and costs, the bytes of its state on each pipeline stage, and all that one rank holds and sends.

Notable: nothing is computed a second way. The ranks' real models, buckets and optimizers are built on torch's meta
device, which allocates nothing, and their tensors are counted: 70 billion parameters take a second on a laptop. With
`--rank` the real step runs there too, and its collectives are listed.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtmegatron.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from mtmegatron.config.model import ModelConfig
    from mtmegatron.config.schema import Config


def info_command(
    config: Annotated[Path, typer.Argument(help="YAML file of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as many as wanted.")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes of the run; default: one data rank, or parallel.data.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="In place of the section `parallel`: `tensor=8,pipeline=16,data=32,zero=1`.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Show all that this rank holds and sends.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show parameters, FLOPs per token and bytes per rank of a run, without starting it.

    Example: `mtm info configs/llama3-405b.yaml --layout "tensor=8,pipeline=16,data=32,zero=1" --rank 4095`

    With `--rank`: its coordinates, its groups, its bytes by category, and the collectives and messages of a step.
    """
    from mtmegatron.config import check, load
    from mtmegatron.train.corpus import with_vocabulary

    loaded = with_vocabulary(load(config, overrides or []).config)
    loaded = loaded if layout is None else laid_out(loaded, layout)
    p = loaded.parallel
    resolved = check(loaded, nproc or p.tensor * p.context * p.pipeline * (p.data or 1))
    facts = describe(resolved) | ({} if rank is None else {"rank": describe_rank(resolved, rank)})
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_tables(facts)


def laid_out(config: "Config", layout: str) -> "Config":
    """The configuration with a section `parallel` of the settings in a text. Raises UserError."""
    from mtmegatron.config.load import validate
    from mtmegatron.verify.report import parse_layouts

    settings = parse_layouts(layout)
    if len(settings) != 1:
        raise UserError(f"`--layout {layout}` is {len(settings)} layouts: give one, of key=value separated by commas")
    return validate(config.model_dump() | {"parallel": settings[0]}, f"--layout {layout}")


def describe(config: "Config") -> dict:
    """All that the command shows, of a resolved configuration: counts, FLOPs per token, bytes."""
    from mtmegatron.config.derived import layout_of
    from mtmegatron.models.size import active_parameters, parameters, training_flops
    from mtmegatron.plan.account import state_of

    model, layout = config.model, layout_of(config)
    training = training_flops(model, config.data.sequence)
    stages = [state_of(config, layout.stage * s) for s in range(layout.pipeline)]
    return {
        "layout": layout.describe(),
        "precision": config.train.precision,
        "sequence": config.data.sequence,
        "parameters": {"total": parameters(model)} | parameters_by_kind(model),
        "active_parameters": active_parameters(model),
        "flops_per_token": {"forward": training / 3, "training": training},
        "stages": [asdict(stage) | {"total": stage.total} for stage in stages],
    }


def describe_rank(config: "Config", rank: int) -> dict:
    """A rank's account, and each kind of transfer of a step with its count. Raises UserError when there is no such rank."""
    from mtmegatron.config.derived import layout_of
    from mtmegatron.plan.account import account
    from mtmegatron.plan.collectives import step_counts

    world = layout_of(config).world
    if not 0 <= rank < world:
        raise UserError(f"there is no rank {rank} of {world}: use --rank 0 to {world - 1}")
    own = account(config, rank)
    transfers = [asdict(kind) | {"count": count} for kind, count in step_counts(config, rank).items()]
    return asdict(own) | {"total": own.total, "transfers": transfers}


def parameters_by_kind(model: "ModelConfig") -> dict[str, int]:
    """Parameters of embedding, positions, attention, mlp, experts, router, norms and head of the whole model."""
    from mtmegatron.config.constraints import resolve
    from mtmegatron.config.schema import Config
    from mtmegatron.plan.account import on_meta

    counts: dict[str, int] = {}
    whole = on_meta(resolve(Config(model=model)), 0)[0][0]
    balance = ((name, buffer) for name, buffer in whole.named_buffers() if name.endswith(".bias"))
    for name, param in (*whole.named_parameters(), *balance):
        parts = [part for part in name.split(".")[:-1] if part != "layers" and not part.isdigit()]
        kind = "norms" if parts[0].endswith("norm") else parts[0]
        if kind == "mlp" and parts[-1] in ("experts", "router"):
            kind = parts[-1]
        counts[kind] = counts.get(kind, 0) + param.numel()
    return counts


def _print_tables(facts: dict) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    counts = Table("parameters", box=box.SIMPLE)
    counts.add_column("", justify="right")
    for kind, count in facts["parameters"].items():
        counts.add_row(kind, f"{count:,}", end_section=kind == "total" and facts["active_parameters"] == count)
        if kind == "total" and facts["active_parameters"] != count:
            counts.add_row("active", f"{facts['active_parameters']:,}", end_section=True)
    state = Table("stage", box=box.SIMPLE, title=f"largest rank of each stage: {facts['layout']}, {facts['precision']}")
    for column in ("layers", "parameters", "weights", "gradients", "optimizer", "total"):
        state.add_column(column, justify="right")
    for s in facts["stages"]:
        sizes = [readable_bytes(s[kind]) for kind in ("weights", "gradients", "optimizer", "total")]
        state.add_row(str(s["stage"]), str(s["layers"]), f"{s['parameters'] / 1e6:,.1f} M", *sizes)
    flops = facts["flops_per_token"]
    console = Console(highlight=False)
    console.print(counts)
    console.print(
        f"FLOPs per token at {facts['sequence']:,} tokens: "
        f"{flops['forward']:.4g} forward, {flops['training']:.4g} training"
    )
    console.print(state)
    if "rank" in facts:
        _print_rank(facts["rank"], console)


def _print_rank(own: dict, console: "Console") -> None:
    from rich import box
    from rich.table import Table

    place = ", ".join(f"{axis} {i}" for axis, i in own["coordinates"].items())
    groups = Table("group", box=box.SIMPLE, title=f"rank {own['rank']}: {place}")
    for column in ("ranks", "place", "which"):
        groups.add_column(column, justify="right")
    for group in own["groups"]:
        ranks = group["ranks"]
        which = ", ".join(map(str, ranks[:4])) + (f", .. {ranks[-1]}" if len(ranks) > 4 else "")
        groups.add_row(group["axis"], str(len(ranks)), str(group["place"]), which)
    held = Table("held", "bytes", box=box.SIMPLE)
    for kind in ("weights", "gradients", "optimizer"):
        held.add_row(kind, readable_bytes(own["state"][kind]))
    each = f"{own['live']:g} micro-batches x {readable_bytes(own['micro_batch'])}"
    held.add_row(f"activations: {each}", readable_bytes(own["activations"]))
    held.add_row("gathered weights, unreduced gradients", readable_bytes(own["gathered"]))
    held.add_row("total", readable_bytes(own["total"]))
    sent = Table("in", "axis", "operation", "type", box=box.SIMPLE, title="transfers of one step")
    for column in ("count", "each", "per step"):
        sent.add_column(column, justify="right")
    for t in own["transfers"]:
        sizes = f"{t['count']:,}", readable_bytes(t["bytes"]), readable_bytes(t["bytes"] * t["count"])
        sent.add_row(t["when"], t["axis"], t["operation"], t["dtype"], *sizes)
    for table in (groups, held, sent):
        console.print(table)


def readable_bytes(count: int) -> str:
    """In the largest binary unit that leaves at least 1: `1.50 GiB`."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**power:.2f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
