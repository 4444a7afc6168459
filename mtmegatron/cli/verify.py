"""`mtm verify`: the reference protocol on a user's configuration, as a table."""

import json
from pathlib import Path
from typing import Annotated

import typer


def verify_command(
    config: Annotated[Path, typer.Argument(help="YAML file of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as many as wanted.")] = None,
    layouts: Annotated[str, typer.Option(help="Layouts, separated by semicolons.")] = "tensor=2; pipeline=2; data=2,zero=1",
    precisions: Annotated[str, typer.Option(help="fp64, fp32, bf16, separated by commas.")] = "fp64,fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False,
) -> None:
    """Prove that layouts of a configuration compute what one process computes.

    Example: `mtm verify configs/tiny.yaml --layouts "tensor=2; pipeline=2; tensor=2,pipeline=2,data=2,zero=1"`

    Loss, gradient norm, every gradient and every weight after 3 steps are compared with one process in double precision. The bound is what
    rounding does to the serial run, times 8. Exit code 1 when a layout fails.
    """
    from mtmegatron.config import load
    from mtmegatron.train.corpus import with_vocabulary
    from mtmegatron.verify.report import parse_layouts, print_table, verify

    parsed = parse_layouts(layouts)
    checks = verify(with_vocabulary(load(config, overrides or []).config), parsed, tuple(p.strip() for p in precisions.split(",")))
    if as_json:
        for check in checks:
            print(json.dumps(vars(check) | {"passed": check.passed}))
    else:
        print_table(checks)
    raise SystemExit(0 if all(check.passed for check in checks) else 1)
