"""`mtm upcycle`: the checkpoint of a dense model becomes the first checkpoint of a run with experts."""

from pathlib import Path
from typing import Annotated

import typer


def upcycle_command(
    checkpoint: Annotated[Path, typer.Argument(help="Of the dense model: folder of a run, its `checkpoints`, or one `step-...` folder.")],
    config: Annotated[Path, typer.Argument(help="YAML file of the run with experts.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as many as wanted.")] = None,
) -> None:
    """Turn a dense model into one with experts whose output is the same; `mtm train CONFIG` then goes on from it.

    Example: `mtm upcycle runs/dense configs/tiny-mixtral.yaml train.folder=runs/upcycled`
    """
    from mtmegatron.checkpoint.folder import Folder
    from mtmegatron.checkpoint.upcycle import upcycle
    from mtmegatron.cli.generate import open_checkpoint
    from mtmegatron.config import load
    from mtmegatron.models.stages import parameters_of
    from mtmegatron.train.loop import prepare

    loaded = load(config, overrides or []).config
    p = loaded.parallel
    resolved, _ = prepare(loaded, p.tensor * p.context * p.pipeline * (p.data or 1))
    folder = Folder(Path(resolved.train.folder) / "checkpoints")
    made = upcycle(open_checkpoint(checkpoint, print), resolved, parameters_of(resolved), folder)
    print(f"{made}: step 0 of a model of {resolved.model.moe.experts} experts")
