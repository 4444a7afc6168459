"""`mtm config`: the resolved configuration with the origin of each value, or the schema."""

import json
from pathlib import Path
from typing import Annotated

import typer


def config_command(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as many as wanted.")] = None,
    nproc: Annotated[int, typer.Option(help="Processes that the run would have.")] = 1,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a configuration file.")] = False,
) -> None:
    """Show a configuration as a run would use it, and where each value comes from.

    Example: `mtm config configs/quickstart.yaml parallel.data=2 --nproc 8`
    """
    from mtmegatron.config import Config, faults, load
    from mtmegatron.config.constraints import resolve
    from mtmegatron.config.load import values
    from mtmegatron.errors import UserError

    if schema:
        print(json.dumps(Config.model_json_schema(), indent=2))
        return
    if config is None:
        raise UserError("name a configuration file, or ask for --schema")
    loaded = load(config, overrides or [])
    given = values(loaded.config)
    for key, value in values(resolve(loaded.config, nproc)).items():
        origin = loaded.origins.get(key) or next((o for k, o in loaded.origins.items() if k.startswith(key + ".")), "default")
        if value != given[key]:
            origin = "derived"
        print(f"{key + ': ' + json.dumps(value, default=_plain):<60} # {origin}")
    found = list(faults(loaded.config, nproc))
    if found:
        raise UserError(f"{len(found)} fault{'s' * (len(found) > 1)} for {nproc} processes\n" + "\n".join(f"  {line}" for line in found))


def _plain(value):
    return value.model_dump()
