"""From layouts as text, or from a seed, to the table of the reference protocol."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from mtmegatron.config.constraints import faults
from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError
from mtmegatron.precision.types import TYPES
from mtmegatron.verify.canonical import canonical, compare_bits
from mtmegatron.verify.generate import Case, Space, changed
from mtmegatron.verify.pool import Pool, RankFailed
from mtmegatron.verify.protocol import (
    Check,
    Reference,
    compare,
    describe,
    laid_out,
    serial_reference,
    world_of,
)

WORDS = {"true": True, "false": False}
KEPT = 64  # references that a long run keeps: more than a table has kinds of model


def parse_layouts(text: str) -> list[dict[str, object]]:
    """`"tensor=2; pipeline=2,data=2"` as a list of layouts. Raises UserError."""
    return [parse_settings(part.split(","), f"layout {part.strip()!r}") for part in text.split(";") if part.strip()]


def parse_settings(parts: list[str], where: str) -> dict[str, object]:
    """`key=value` each; a list is written 1+3. Raises UserError."""
    settings: dict[str, object] = {}
    for part in parts:
        name, sign, text = (x.strip() for x in part.partition("="))
        if not sign:
            raise UserError(f"{where}: write it as tensor=2,pipeline=2")
        values = [_value(x) for x in text.split("+")]
        settings[name] = values if len(values) > 1 or name in ("parts", "pipeline_layers") else values[0]
    return settings


def _value(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return WORDS.get(text.lower(), text)


def verify(config: Config, layouts: list[dict[str, object]], precisions: tuple[str, ...]) -> list[Check]:
    """Runs the protocol; all faults of the user are told before the first process starts."""
    _refuse_faults(config, layouts, precisions)
    reference = serial_reference(config, tuple(dict.fromkeys(["fp32", *(p for p in precisions if p != "fp64")])))
    with Pool(max(map(world_of, layouts), default=1)) as pool:
        return [c for layout in layouts for p in precisions for c in compare(config, layout, p, reference, pool)]


def verify_bits(config: Config, layouts: list[dict[str, object]], precisions: tuple[str, ...]) -> list[Check]:
    """Whether layouts have the bits of one process with canonical numerics."""
    config = canonical(config)
    _refuse_faults(config, [{}, *layouts], precisions)
    with Pool(max(map(world_of, layouts), default=1)) as pool:
        return compare_bits(config, layouts, precisions, pool)


def _refuse_faults(config: Config, layouts: list[dict[str, object]], precisions: tuple[str, ...]) -> None:
    unknown = [p for p in precisions if p not in TYPES]
    if unknown:
        raise UserError(f"precision {unknown[0]}: use {', '.join(TYPES)}")
    for layout in layouts:
        for precision in precisions:
            lines = list(faults(laid_out(config, layout, precision), world_of(layout)))
            if lines:
                raise UserError(f"layout {describe(layout)}:\n" + "\n".join(f"  {line}" for line in lines))


@dataclass
class Trials:
    """Runs generated cases; each kind of model has its serial runs once."""

    space: Space
    pool: Pool
    references: dict[str, Reference] = field(default_factory=dict)

    def run(self, case: Case) -> list[Check]:
        """The protocol's checks of a case, in fp64 and in its own precision. Raises RankFailed."""
        config, model = changed(self.space.base, case.changes), str(case.changes)
        if model not in self.references:
            if len(self.references) == KEPT:
                del self.references[next(iter(self.references))]
            self.references[model] = serial_reference(config, ("fp32", "bf16"))
        reference, precisions = self.references[model], tuple(dict.fromkeys(("fp64", case.precision)))
        return [c for p in precisions for c in compare(config, case.layout, p, reference, self.pool)]

    def run_for(self, minutes: float, seed: int, tell: Callable[[int, Case, list[Check]], None]) -> None:
        """Random cases of `seed`, `seed` + 1, ... until the time is up; at least one."""
        end = time.monotonic() + 60 * minutes
        while True:
            case = self.space.sample(seed)
            try:
                checks = self.run(case)
            except RankFailed as error:
                checks = [Check(describe(case.layout), case.precision, str(error), float("inf"), 0.0)]
            tell(seed, case, checks)
            seed += 1
            if time.monotonic() >= end:
                return


def print_table(checks: list[Check]) -> None:
    """One row per check: how far off, what it is held to, pass or fail."""
    table = Table("layout", "precision", "what", "difference", "bound", "")
    for check in checks:
        verdict = "[green]pass[/]" if check.passed else "[bold red]FAIL[/]"
        table.add_row(check.layout, check.precision, check.what, f"{check.error:.2e}", f"{check.bound:.2e}", verdict)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    failed = sum(not check.passed for check in checks)
    console.print(f"{len(checks) - failed} checks passed, {failed} failed")
