"""`mtm train`: checks the configuration, then trains in this process or starts the processes that do."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def train_command(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as many as wanted.")] = None,
    nproc: Annotated[int, typer.Option(help="Processes to start on this machine.")] = 1,
    max_restarts: Annotated[int, typer.Option(help="Start all processes again so often after a failure; they resume.")] = 0,
    port: Annotated[int | None, typer.Option(help="Where the processes meet; default: a free port.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="Also write each process's output here.")] = None,
) -> None:
    """Train a model.

    Example: `mtm train configs/quickstart.yaml parallel.tensor=2 train.steps=50 --nproc 2`

    Under `torchrun`, `srun` or `mpirun` the same command, without --nproc, is one of their processes.
    """
    from mtmegatron.config import load
    from mtmegatron.process import find_process

    process = find_process(os.environ)
    loaded = load(config, overrides or [])
    if process.world > 1 or process.origin == "torchrun" or nproc == 1:
        from mtmegatron.launch import leave
        from mtmegatron.train.loop import train

        leave(process, train(loaded.config, process))
    from mtmegatron.launch import launch
    from mtmegatron.train.loop import prepare

    prepare(loaded.config, nproc)
    command = [sys.executable, "-m", "mtmegatron.cli.main", "train", str(config), *(overrides or [])]
    raise SystemExit(launch(command, nproc, max_restarts=max_restarts, port=port, log_folder=log_folder))
