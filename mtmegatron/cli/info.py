"""`mtm info`: what a model has and costs: parameters, FLOPs, and the bytes of its state on each pipeline stage.

Notable: nothing is computed a second way. The ranks' real models, buckets and optimizers are built on torch's meta
device, which allocates nothing, and their tensors are counted: 70 billion parameters take a second on a laptop.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mtmegatron.config.schema import Config, ModelConfig
    from mtmegatron.mesh import Mesh
    from mtmegatron.models.decoder import Decoder


@dataclass(frozen=True)
class StageBytes:
    """State of the rank that holds most in a stage: parameters; bytes of weights, gradients and optimizer state."""

    stage: int
    layers: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def info_command(
    config: Annotated[Path, typer.Argument(help="YAML file of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as many as wanted.")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes of the run; default: one data rank, or parallel.data.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show parameters, FLOPs per token and bytes per rank of a run, without starting it.

    Example: `mtm info configs/llama3-70b.yaml parallel.tensor=8 parallel.pipeline=4 train.precision=bf16`
    """
    from mtmegatron.config import check, load
    from mtmegatron.train.corpus import with_vocabulary

    loaded = with_vocabulary(load(config, overrides or []).config)
    p = loaded.parallel
    facts = describe(check(loaded, nproc or p.tensor * p.pipeline * (p.data or 1)))
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_tables(facts)


def describe(config: "Config") -> dict:
    """All that the command shows, of a resolved configuration: counts, FLOPs per token, bytes."""
    from mtmegatron.config.constraints import layout_of
    from mtmegatron.models.size import parameters, training_flops

    model, layout = config.model, layout_of(config)
    training = training_flops(model, config.data.sequence)
    stages = [stage_bytes(config, layout.stage * s) for s in range(layout.pipeline)]
    return {
        "layout": layout.describe(),
        "precision": config.train.precision,
        "sequence": config.data.sequence,
        "parameters": {"total": parameters(model)} | parameters_by_kind(model),
        "flops_per_token": {"forward": training / 3, "training": training},
        "stages": [asdict(stage) | {"total": stage.total} for stage in stages],
    }


def parameters_by_kind(model: "ModelConfig") -> dict[str, int]:
    """Parameters of embedding, positions, attention, mlp, norms and head of the whole model."""
    from mtmegatron.config.constraints import resolve
    from mtmegatron.config.schema import Config

    counts: dict[str, int] = {}
    for name, param in _on_meta(resolve(Config(model=model)), 0)[0][0].named_parameters():
        parts = [part for part in name.split(".")[:-1] if part != "layers" and not part.isdigit()]
        kind = "norms" if parts[0].endswith("norm") else parts[0]
        counts[kind] = counts.get(kind, 0) + param.numel()
    return counts


def stage_bytes(config: "Config", rank: int) -> StageBytes:
    """The state of one rank. The first of a stage holds most: larger shares go to lower coordinates."""
    from mtmegatron.optim.adamw import AdamW
    from mtmegatron.parallel.data import Buckets
    from mtmegatron.precision.types import TYPES

    chunks, mesh = _on_meta(config, rank)
    p, types = config.parallel, TYPES[config.train.precision]
    names = {param: name for chunk in chunks for name, param in chunk.named_parameters()}
    count = sum(param.numel() for param in names)
    units = {unit: modules for chunk in chunks for unit, modules in chunk.units().items()}
    buckets = Buckets(units, names, mesh, types, zero=p.zero, bucket_bytes=p.bucket_mb * 2**20, overlap=p.overlap)
    states = AdamW(config.optimizer, buckets, types).states
    own_master = types.master != types.compute  # else the master is the weight itself
    return StageBytes(
        mesh.coordinate("pipeline"), sum(len(chunk.layers) for chunk in chunks), count,
        weights=sum((b.own_values if b.loose_values else b.values).nbytes for b in buckets.buckets),
        gradients=sum((b.own_gradients if b.loose_gradients else b.gradients).nbytes for b in buckets.buckets),
        optimizer=sum(t.nbytes for s in states for kind, t in s.tensors.items() if own_master or kind != "master"),
    )  # fmt: skip


def _on_meta(config: "Config", rank: int) -> tuple[list["Decoder"], "Mesh"]:
    """A rank's part of the model, without memory, and its mesh, without processes."""
    from mtmegatron.config.constraints import layout_of
    from mtmegatron.layers.build import Build
    from mtmegatron.mesh import Mesh
    from mtmegatron.models.stages import build_chunks
    from mtmegatron.precision.types import TYPES

    mesh = Mesh(layout_of(config), rank, "meta")
    return build_chunks(config, Build(mesh, TYPES[config.train.precision].compute)), mesh


def _print_tables(facts: dict) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    counts = Table("parameters", box=box.SIMPLE)
    counts.add_column("", justify="right")
    for kind, count in facts["parameters"].items():
        counts.add_row(kind, f"{count:,}", end_section=kind == "total")
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


def readable_bytes(count: int) -> str:
    """In the largest binary unit that leaves at least 1: `1.50 GiB`."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**power:.2f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
