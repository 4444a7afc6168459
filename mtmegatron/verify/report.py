"""From layouts as text to the table of the reference protocol."""

from rich.console import Console
from rich.table import Table

from mtmegatron.config.constraints import faults
from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError
from mtmegatron.precision.types import TYPES
from mtmegatron.verify.pool import Pool
from mtmegatron.verify.protocol import Check, compare, describe, laid_out, serial_reference, world_of

WORDS = {"true": True, "false": False}


def parse_layouts(text: str) -> list[dict[str, object]]:
    """`"tensor=2; pipeline=2,data=2"` as a list of settings of the `parallel` section. Raises UserError."""
    return [_parse_layout(part) for part in text.split(";") if part.strip()]


def verify(config: Config, layouts: list[dict[str, object]], precisions: tuple[str, ...]) -> list[Check]:
    """Runs the protocol; all faults of the user are told before the first process starts."""
    unknown = [p for p in precisions if p not in TYPES]
    if unknown:
        raise UserError(f"precision {unknown[0]}: use {', '.join(TYPES)}")
    for layout in layouts:
        lines = list(faults(laid_out(config, layout, "fp32"), world_of(layout)))
        if lines:
            raise UserError(f"layout {describe(layout)}:\n" + "\n".join(f"  {line}" for line in lines))
    reference = serial_reference(config, tuple(dict.fromkeys(["fp32", *(p for p in precisions if p != "fp64")])))
    with Pool(max(map(world_of, layouts), default=1)) as pool:
        return [check for layout in layouts for p in precisions for check in compare(config, layout, p, reference, pool)]


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


def _parse_layout(text: str) -> dict[str, object]:
    layout: dict[str, object] = {}
    for part in text.split(","):
        name, sign, value = (x.strip() for x in part.partition("="))
        if not sign:
            raise UserError(f"layout {text.strip()!r}: write it as tensor=2,pipeline=2")
        layout[name] = WORDS.get(value.lower(), int(value) if value.lstrip("-").isdigit() else value)
    return layout
