"""`mtm verify`: the reference protocol on a user's configuration, or on random ones, as a table."""

import json
import random
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtmegatron.errors import UserError

if TYPE_CHECKING:
    from mtmegatron.config.schema import Config
    from mtmegatron.verify.generate import Case
    from mtmegatron.verify.protocol import Check

LAYOUTS, MINUTES = "tensor=2; pipeline=2; data=2,zero=1", 5.0
PRECISIONS, EXACT_PRECISIONS = "fp64,fp32", "fp32,bf16"


def verify_command(
    config: Annotated[str | None, typer.Argument(help="YAML file of a run; default: a small model.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as many as wanted.")] = None,
    layouts: Annotated[str | None, typer.Option(help=f'Separated by semicolons; default: "{LAYOUTS}".')] = None,
    precisions: Annotated[str | None, typer.Option(help=f"Of fp64, fp32, bf16; default: {PRECISIONS}, with --canonical {EXACT_PRECISIONS}.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Random combinations, until the time is up.")] = False,
    canonical: Annotated[bool, typer.Option("--canonical", help="With canonical numerics: the same bits, not the same to rounding.")] = False,
    minutes: Annotated[float | None, typer.Option(help=f"--all: how long; default: {MINUTES:g}.")] = None,
    seed: Annotated[int | None, typer.Option(help="--all: the first case; default: drawn.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False,
) -> None:
    """Prove that layouts of a configuration compute what one process computes.

    Example: `mtm verify configs/tiny.yaml --layouts "tensor=2; pipeline=2; tensor=2,pipeline=2,data=2,zero=1"`

    Loss, gradient norm, every gradient and every weight after 3 steps are compared with one process in double
    precision. The bound is what rounding does to the serial run, times 8. `--canonical` turns canonical numerics on and
    compares bits after 10 steps: no bound. `--all` tries random layouts, without CONFIG
    also random models, and prints for each its seed and the command that repeats it. Exit code 1 when a layout fails.
    """
    words = [word for word in (config, *(overrides or [])) if word]
    if every:
        _refuse("--all", {"--layouts": layouts, "--precisions": precisions, "--canonical": canonical or None}, "it chooses layouts itself")
        first = random.randrange(10**6) if seed is None else seed
        good = _random(words, MINUTES if minutes is None else minutes, first, as_json)
    else:
        _refuse("no --all", {"--minutes": minutes, "--seed": seed}, "add --all, or leave it out")
        good = _given(words, layouts or LAYOUTS, precisions or (EXACT_PRECISIONS if canonical else PRECISIONS), canonical, as_json)
    raise SystemExit(0 if good else 1)


def _refuse(where: str, options: dict[str, object], repair: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name} has no effect with {where}: {repair}")


def _configuration(words: list[str]) -> "Config":
    """The file, or the small model when the first word is an override, with the overrides."""
    from mtmegatron.config import load
    from mtmegatron.train.corpus import with_vocabulary
    from mtmegatron.verify.generate import Space, changed
    from mtmegatron.verify.report import parse_settings

    if words and "=" not in words[0]:
        return with_vocabulary(load(Path(words[0]), words[1:]).config)
    return changed(Space().base, parse_settings(words, "override"))


def _given(words: list[str], layouts: str, precisions: str, canonical: bool, as_json: bool) -> bool:
    from mtmegatron.verify.report import parse_layouts, print_table, verify, verify_bits

    parsed = parse_layouts(layouts)
    checks = (verify_bits if canonical else verify)(_configuration(words), parsed, tuple(p.strip() for p in precisions.split(",")))
    if as_json:
        _print_json(checks)
    else:
        print_table(checks)
    return all(check.passed for check in checks)


def _random(words: list[str], minutes: float, seed: int, as_json: bool) -> bool:
    from mtmegatron.verify.generate import Space, wide
    from mtmegatron.verify.pool import Pool
    from mtmegatron.verify.report import Trials

    space = Space(_configuration(words), wide(layouts_only=bool(words)))
    results: list[bool] = []

    def tell(number: int, case: "Case", checks: "list[Check]") -> None:
        failed = [check for check in checks if not check.passed]
        results.append(not failed)
        if as_json:
            _print_json(checks, {"seed": number})
            return
        again = " ".join(["mtm verify", *map(shlex.quote, words), case.words])
        print(f"{'FAIL' if failed else 'pass'}  seed {number}  {again}", flush=True)
        for c in failed:
            print(f"      {c.precision} {c.what}: off by {c.error:.2e}, bound {c.bound:.2e}", flush=True)

    with Pool(space.most) as pool:
        Trials(space, pool).run_for(minutes, seed, tell)
    if not as_json:
        print(f"{results.count(True)} cases passed, {results.count(False)} failed")
    return all(results)


def _print_json(checks: "list[Check]", more: dict[str, object] | None = None) -> None:
    for check in checks:
        print(json.dumps((more or {}) | vars(check) | {"passed": check.passed}))
