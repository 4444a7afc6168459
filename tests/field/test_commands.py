"""The command line where it failed for users: ports, numbers of processes, values that win silently, exit codes.

Each test is named after its report. What needs no process is in tests/config (L04, L05) and tests/test_launch.py (L06).
"""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from mtmegatron.data.indexed import IndexedWriter

CONFIG = """
device: cpu
model: {layers: 1, width: 16, heads: 2}
data: {train: CORPUS, tokenizer: bytes, sequence: 16, split: [0.9, 0.1, 0.0]}
train: {folder: FOLDER, steps: 2, global_batch: 4, eval_batches: 1}
log: {tensorboard: false}
"""


@pytest.fixture
def mtm(tmp_path):
    """Runs a command of `mtm` in a fresh folder with a small corpus and `run.yaml`; the completed process."""
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        for document in range(20):
            writer.add(np.arange(document, document + 60) % 256)
    text = CONFIG.replace("CORPUS", str(tmp_path / "corpus")).replace("FOLDER", str(tmp_path / "run"))
    (tmp_path / "run.yaml").write_text(text)

    def call(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "mtmegatron.cli.main", *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )

    return call


def one_message(done: subprocess.CompletedProcess, *words: str) -> None:
    """The command was refused with one message that has these words, and without a traceback."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_l01_a_port_that_is_taken_is_named(mtm):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        one_message(mtm("train", "run.yaml", "--nproc", "2", "--port", str(port)), f"port {port}", "free one")


def test_l02_a_wrong_number_of_processes_is_one_message_with_the_equation(mtm):
    done = mtm("train", "run.yaml", "parallel.tensor=2", "parallel.data=3", "--nproc", "4")
    one_message(done, "`parallel.tensor: 2` x `pipeline: 1` x `data: 3` is 6", "4 processes", "--nproc 6")
    one_message(mtm("train", "run.yaml", "parallel.tensor=2"), "tensor: 2", "1 processes")  # started plainly


def test_l07_the_final_values_are_printed_with_their_origin(mtm):
    done = mtm("config", "run.yaml", "optimizer.lr=2e-3", "--nproc", "2")
    lines = {line.split(":")[0]: line for line in done.stdout.splitlines()}
    assert done.returncode == 0
    assert "0.002" in lines["optimizer.lr"] and lines["optimizer.lr"].endswith("# override")
    assert lines["model.width"].endswith("# file run.yaml") and lines["train.seed"].endswith("# default")
    assert "2" in lines["parallel.data"] and lines["parallel.data"].endswith("# derived")


def test_l07_a_value_against_the_checkpoint_is_refused_by_the_command_too(mtm):
    assert mtm("train", "run.yaml").returncode == 0
    one_message(
        mtm("train", "run.yaml", "optimizer.lr=1e-2"),
        "optimizer.lr: 0.0003 in the checkpoint, 0.01 now",
        "accept_changes",
    )
    one_message(mtm("train", "run.yaml", "train.resume=never"), "resume: never", "checkpoints of an earlier run")


@pytest.mark.parametrize(
    "command, words",
    [
        ("train absent.yaml", ["absent.yaml"]),
        ("train run.yaml data.train=nowhere", ["nowhere"]),
        ("train run.yaml train.folder=/proc/none", ["train.folder", "/proc/none"]),
        ("train run.yaml optimizer.rl=1", ["optimizer.rl", "did you mean lr"]),
        ("train run.yaml data.tokenizer=no.json", ["no.json"]),
        ("generate empty", ["empty"]),
        ("data prepare absent.jsonl --output out --tokenizer bytes", ["absent.jsonl"]),
        ("data prepare empty.jsonl --output out --tokenizer bytes", ["empty.jsonl"]),
        ("verify run.yaml --layouts tensor", ["tensor"]),
        ("config empty.jsonl", ["empty.jsonl"]),
    ],
)
def test_l08_missing_and_empty_inputs_end_with_one_message(command, words, mtm, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    one_message(mtm(*command.split()), *words)
