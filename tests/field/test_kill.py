"""A rank that is killed at any moment costs no bit: `mtm train` starts all again, and they repeat the run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import yaml

from mtmegatron.data.indexed import IndexedWriter
from tests.field.training import lines_of, same_bits, state_of


def children(parent: int) -> list[int]:
    """Processes whose parent is `parent`, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rsplit(")", 1)[1].split()[1]) == parent:
                found.append(int(entry.name))
    return sorted(found)


def written_config(tmp_path: Path, run: str, **parallel) -> Path:
    tree = {
        "device": "cpu",
        "model": {"layers": 2, "width": 32, "heads": 2, "vocab": 259},
        "data": {"train": str(tmp_path / "corpus"), "sequence": 32, "tokenizer": "bytes"},
        "train": {"folder": str(tmp_path / run), "steps": 60, "global_batch": 4, "micro_batch": 1, "eval_batches": 1},
        "parallel": parallel,
        "checkpoint": {"every": 2},
        "log": {"tensorboard": False},
    }
    path = tmp_path / f"{run}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def steps_in(file: Path) -> int:
    text = file.read_text().splitlines() if file.exists() else []
    return json.loads(text[-1])["step"] if text and text[-1].endswith("}") else 0


def test_a_killed_rank_costs_no_bit(tmp_path):
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        draw = np.random.default_rng(0)
        for _ in range(50):
            writer.add(draw.integers(0, 256, 200))
    mtm = [sys.executable, "-m", "mtmegatron.cli.main", "train"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    settings = {"tensor": 1, "data": 2, "zero": 1}
    quiet = {"env": environ, "stdout": subprocess.DEVNULL, "text": True}
    subprocess.run(
        [*mtm, str(written_config(tmp_path, "whole", **settings)), "--nproc", "2"], check=True, timeout=60, **quiet
    )
    config, at = written_config(tmp_path, "killed", **settings), random.Random(time.time_ns()).randrange(1, 40)
    command = [*mtm, str(config), "--nproc", "2", "--max-restarts", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, **quiet) as launcher:
        try:
            deadline = time.monotonic() + 60
            while steps_in(tmp_path / "killed" / "metrics.jsonl") < at and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(children(launcher.pid)[at % 2], signal.SIGKILL)
            _, errors = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 0 and "killed by SIGKILL" in errors and "restart 1 of 2" in errors, errors
    assert same_bits(state_of(tmp_path / "killed", 60), state_of(tmp_path / "whole", 60)), f"killed at step {at}"
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "whole")
