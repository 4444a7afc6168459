"""`.ci/run` fails when the suite fails, and when a test skipped for want of a file of ../shared that should be there.

Notable: `make` is a stand-in that prints what pytest would."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / ".ci/run"
PASSED = "7 passed in 1.23s"
SKIPPED = "SKIPPED [2] tests/shared.py:14: ../shared/data/text/a.jsonl is not here\\n5 passed, 2 skipped in 1.23s"
OTHER = "SKIPPED [1] tests/test_device.py:5: no accelerator\\n6 passed, 1 skipped in 1.23s"
FAILED = "FAILED tests/a.py::b\\n1 failed, 6 passed in 61.23s (0:01:01)"


@pytest.mark.parametrize(
    ("output", "code", "shared", "expected"),
    [
        (PASSED, 0, True, 0), (SKIPPED, 0, True, 1), (SKIPPED, 0, False, 0), (OTHER, 0, True, 0), (FAILED, 2, True, 2),
        ("no rule", 2, False, 2),
    ],
)  # fmt: skip
def test_exit_code(tmp_path, output, code, shared, expected):
    copy, tools = tmp_path / "clone/.ci/run", tmp_path / "bin"
    copy.parent.mkdir(parents=True)
    shutil.copy(RUN, copy)
    tools.mkdir()
    (tools / "make").write_text(f"#!/bin/sh\necho \"called: $*\"\nprintf '{output}\\n'\nexit {code}\n")
    (tools / "make").chmod(0o755)
    if shared:
        (tmp_path / "shared").mkdir()
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([copy], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == expected, done.stderr
    assert "called: test TESTFLAGS=-rs" in done.stdout
    assert ("error: ../shared is here" in done.stderr) == (shared and output == SKIPPED)
    closing = output.split("\\n")[-1] if "passed" in output else "did not come to its end"
    assert done.stdout.splitlines()[-1] == f"pytest: {closing}"
