"""`mtm`: the commands together, and what a user sees of a fault.

Notable: a UserError is one message and exit code 2, without a traceback. Heavy imports happen inside the commands, so that `--help` is quick.
"""

import sys

import typer

from mtmegatron.cli.config import config_command
from mtmegatron.cli.data import data_app
from mtmegatron.cli.generate import generate_command
from mtmegatron.cli.info import info_command
from mtmegatron.cli.quickstart import quickstart_command
from mtmegatron.cli.schedule import schedule_command
from mtmegatron.cli.train import train_command
from mtmegatron.cli.upcycle import upcycle_command
from mtmegatron.cli.verify import verify_command
from mtmegatron.errors import UserError

app = typer.Typer(
    help="MT-MegatronLM: hybrid-parallel training of transformers.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)  # fmt: skip
app.command("train")(train_command)
app.add_typer(data_app, name="data")
app.command("generate")(generate_command)
app.command("verify")(verify_command)
app.command("config")(config_command)
app.command("info")(info_command)
app.command("schedule")(schedule_command)
app.command("upcycle")(upcycle_command)
app.command("quickstart")(quickstart_command)


def main() -> None:
    """Entry point."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
