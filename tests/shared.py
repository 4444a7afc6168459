"""Real files for tests lie in `../shared/data`, outside the repository: where they are absent the test that needs them skips."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared(name: str) -> Path:
    """Path of a shared test file; skips the calling test when it is not there."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"../shared/data/{name} is not here")
    return path
