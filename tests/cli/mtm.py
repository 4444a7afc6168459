"""The command line in this process: what `mtm` prints and returns, without paying for a new interpreter each time."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from mtmegatron.cli.main import main


class Result(NamedTuple):
    """How a command ended. What processes that it started print is not in `out` and `err`."""

    code: int
    out: str
    err: str


def mtm(*words: object) -> Result:
    """Runs `mtm` with these words."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", ["mtm", *map(str, words)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return Result(code, out.getvalue(), err.getvalue())
