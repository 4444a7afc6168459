"""How processes meet, are started, and what a user sees when one fails.

Children that need no torch do not import it: starting up is what these tests cost.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mtmegatron.device import Device
from mtmegatron.errors import UserError
from mtmegatron.launch import Process, _first_failure, launch, report, start_group, stop_group

ROOT = Path(__file__).resolve().parents[1]
CPU = Device("cpu")

WORKER = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from mtmegatron.device import choose_device
from mtmegatron.errors import UserError
from mtmegatron.launch import find_process, report, start_group, stop_group

process, mode, store = find_process(os.environ), sys.argv[1], None
other = process.rank == 1
try:
    if mode == "user-all":
        raise UserError("tensor 3 does not divide 8: use 2")
    store = start_group(process, choose_device("cpu", process.local_rank), timeout_s=60)
    x = torch.tensor([process.rank + 1.0])
    dist.all_reduce(x)
    if mode == "kill" and other and process.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "raise" and other:
        os.write(1, b"raised at %f\\n" % time.time())
        raise ValueError("boom")
    if mode == "user-one" and other:
        raise UserError("file x is broken: fetch it again")
    dist.all_reduce(x)
    os.write(1, b"rank %d attempt %d sum %d\\n" % (process.rank, process.attempt, int(x)))
except BaseException as error:
    sys.exit(report(process, error, store))
finally:
    stop_group()
"""

LAUNCHER = """
import sys
from mtmegatron.launch import launch
sys.exit(launch([sys.executable, "-c", *sys.argv[1:]], 2))
"""


@pytest.fixture(autouse=True)
def children_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def python(source: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", source, *arguments]


# --- start_group ---


def test_group_of_one_needs_no_port() -> None:
    store = start_group(Process(), CPU, timeout_s=5)
    try:
        x = torch.ones(2)
        dist.all_reduce(x)
        assert isinstance(store, dist.HashStore) and dist.get_world_size() == 1 and x.tolist() == [1, 1]
    finally:
        stop_group()
    assert not dist.is_initialized()


@pytest.fixture
def busy_port():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield other.getsockname()[1]


def test_busy_port_is_named_by_rank_0(busy_port: int) -> None:
    with pytest.raises(UserError, match=f"port {busy_port} is in use.*MASTER_PORT"):
        start_group(Process(0, 2, master_port=busy_port), CPU)


def test_rank_1_does_not_wait_for_ever_on_a_strange_program(busy_port: int) -> None:
    with pytest.raises(UserError, match=f"rank 1: .*127.0.0.1:{busy_port}"):
        start_group(Process(1, 2, master_port=busy_port), CPU, timeout_s=1)


def test_absent_ranks_are_named() -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with pytest.raises(UserError, match="ranks 1, 2 of 3 did not come"):
        start_group(Process(0, 3, master_port=port), CPU, timeout_s=0.5)


# --- report ---


def test_user_error_before_the_group_is_printed_by_rank_0_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert [report(Process(rank, 3), UserError("x: use y")) for rank in range(3)] == [2, 2, 2]
    assert capsys.readouterr().err == "error: x: use y\n"


def test_user_error_of_a_late_rank_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    assert [report(Process(rank, 3), UserError(f"from {rank}"), store) for rank in (2, 0)] == [2, 2]
    assert capsys.readouterr().err == "error: from 2\n"


def test_fault_has_its_traceback_and_a_lost_peer_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError) as caught:
        broken()
    assert report(Process(1, 2), caught.value) == 1
    text = capsys.readouterr().err
    assert text.startswith("rank 1 failed:\nTraceback") and "in broken" in text and text.endswith("ValueError: boom\n")
    assert report(Process(0, 2), RuntimeError("gloo: Connection closed by peer")) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_exits_keep_their_code(capsys: pytest.CaptureFixture[str]) -> None:
    ends = [SystemExit(), SystemExit(3), SystemExit("no room"), KeyboardInterrupt()]
    assert [report(Process(), end) for end in ends] == [0, 3, 1, 130]
    assert capsys.readouterr().err == "no room\n"


# --- which failure was first ---


def failed(*codes: int) -> dict[int, SimpleNamespace]:
    return {rank: SimpleNamespace(exitcode=code, timestamp=100) for rank, code in enumerate(codes) if code}


def records(folder: Path, capsys: pytest.CaptureFixture[str], *errors: tuple[int, Exception]) -> list[Path]:
    """Records of these ranks' errors, written in this order."""
    files = []
    for rank, error in errors:
        files.append(folder / f"{rank}.json")
        report(Process(rank, 4, error_file=str(files[-1])), error)
    assert capsys.readouterr().err == ""  # the agent's to print
    return files


LOST = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    "errors, codes, text, code",
    [
        ([(2, ValueError("first")), (1, ValueError("second"))], (0, 1, 1, 0), "rank 2 failed:\nValueError: first", 1),
        ([(0, LOST), (1, ValueError("cause"))], (1, 1), "rank 1 failed:\nValueError: cause", 1),
        ([(1, UserError("x: use y")), (0, LOST)], (1, 2), "error: x: use y", 2),
        ([(0, LOST)], (1, -9), "rank 1 was killed by SIGKILL (the system does that when memory runs out)", 137),
        ([(0, LOST)], (1, 7), "rank 1 ended with exit code 7; what it printed is above", 7),
        ([(0, ValueError("cause"))], (1, -15), "rank 0 failed:\nValueError: cause", 1),
        ([], (0, -11), "rank 1 was killed by SIGSEGV", 139),
    ],
)
def test_cause_among_failures(tmp_path, capsys, errors, codes, text, code) -> None:
    failure = _first_failure(failed(*codes), records(tmp_path, capsys, *errors))
    assert (failure.text, failure.code, failure.restartable) == (text, code, code != 2)


def test_record_is_what_torchs_agent_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    (file,) = records(tmp_path, capsys, (1, ValueError("boom")))
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(file))
    assert failure.message["message"] == "ValueError: boom"
    assert abs(failure.timestamp - time.time()) < 60


# --- launch, with children that need no torch ---


@pytest.mark.parametrize("own, threads, expected", [(None, None, None), ("3", None, "3"), ("3", 5, "5")])
def test_threads_are_shared_out_unless_the_user_set_them(monkeypatch, capfd, own, threads, expected) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    source = "import os; os.write(1, (os.environ['OMP_NUM_THREADS'] + '\\n').encode())"
    assert launch(python(source), 2, threads=threads) == 0
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert capfd.readouterr().out.split() == [expected or share] * 2


def test_arguments_arrive_as_given_and_output_is_also_in_files(tmp_path: Path, capfd) -> None:
    words = ["$HOME", "$$", "${local_rank}", "a=b", "two words", ""]
    source = "import sys, json, os; os.write(1, (json.dumps(sys.argv[1:]) + '\\n').encode())"
    assert launch(python(source, *words), 1, log_folder=tmp_path / "logs") == 0
    (log,) = (tmp_path / "logs").rglob("stdout.log")
    assert json.loads(log.read_text()) == words
    assert json.dumps(words) in capfd.readouterr().out


def test_exit_code_of_the_run_and_restarts_are_told(capfd) -> None:
    source = "import os, sys; sys.exit(7 * (os.environ['RANK'] == '1'))"
    assert launch(python(source), 2, max_restarts=1) == 7
    failed_, restarting = "rank 1 ended with exit code 7; what it printed is above", "restarting all 2 processes"
    assert capfd.readouterr().err.splitlines() == [failed_, f"{restarting} (restart 1 of 1)", failed_]


def test_handlers_of_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    launch(python("pass"), 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_busy_explicit_port_is_named(busy_port: int) -> None:
    with pytest.raises(UserError, match=f"port {busy_port} is in use.*another port"):
        launch(python("pass"), 2, port=busy_port)


@pytest.mark.parametrize("arguments", [{"nproc": 0}, {"nproc": 1, "max_restarts": -1}, {"nproc": 1, "port": 70000}])
def test_senseless_numbers(arguments: dict[str, int]) -> None:
    with pytest.raises(UserError, match="launch: "):
        launch(python("pass"), **arguments)


def test_log_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="log folder"):
        launch(python("pass"), 1, log_folder=tmp_path / "file" / "logs")


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_all(number: signal.Signals) -> None:
    quiet = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    child = quiet + "os.write(1, b'%d\\n' % os.getpid()); time.sleep(90)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(python(LAUNCHER, child), **pipes) as launcher:
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(number)
        _, error = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number and error == f"stopped by {number.name}\n"
    assert not any(alive(pid) for pid in pids)


# --- launch, with process groups ---


def test_two_runs_side_by_side(capfd) -> None:
    with subprocess.Popen(python(LAUNCHER, WORKER, "ok")) as neighbour:
        assert launch(python(WORKER, "ok"), 2) == 0
        assert neighbour.wait(60) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["rank 0 attempt 0 sum 6"] * 2 + ["rank 1 attempt 0 sum 6"] * 2


@pytest.mark.parametrize("repeat", range(3))
def test_a_killed_rank_is_recovered_by_one_restart(capfd, repeat: int) -> None:
    assert launch(python(WORKER, "kill"), 2, max_restarts=2) == 0
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["rank 0 attempt 1 sum 6", "rank 1 attempt 1 sum 6"]
    killed, restarting = captured.err.splitlines()
    assert killed.startswith("rank 1 was killed by SIGKILL") and restarting.endswith("(restart 1 of 2)")


def test_the_first_traceback_is_shown_once_and_all_stop(capfd) -> None:
    assert launch(python(WORKER, "raise"), 2) == 1
    end, captured = time.time(), capfd.readouterr()
    assert end - float(captured.out.split()[-1]) < 15  # a bound on hanging, not on speed
    assert captured.err.count("Traceback") == 1
    assert captured.err.startswith("rank 1 failed:\n") and captured.err.endswith("ValueError: boom\n")


@pytest.mark.parametrize(
    "mode, text", [("user-all", "tensor 3 does not divide 8: use 2"), ("user-one", "file x is broken: fetch it again")]
)
def test_a_users_fault_is_told_once_and_not_tried_again(capfd, mode: str, text: str) -> None:
    assert launch(python(WORKER, mode), 2, max_restarts=3) == 2
    assert capfd.readouterr().err == f"error: {text}\n"


# --- without our launcher: rank 0 hosts the store ---


def run_as_tasks(mode: str) -> list[tuple[int, str, str]]:
    """Two processes as srun would start them on one node: exit code, output and errors of each."""
    job = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": str(os.getpid())}
    tasks = [job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(python(WORKER, mode), env=os.environ | task, **pipes) for task in tasks]
    ends = [process.communicate(timeout=60) for process in running]
    return [(process.returncode, *end) for process, end in zip(running, ends)]


def test_tasks_of_slurm_meet() -> None:
    assert run_as_tasks("ok") == [(0, f"rank {rank} attempt 0 sum 6\n", "") for rank in range(2)]


def test_fault_of_one_task_is_told_by_it_and_the_other_has_lost_a_peer() -> None:
    (code_0, _, error_0), (code_1, _, error_1) = run_as_tasks("user-one")
    assert (code_0, code_1) == (1, 2)
    assert error_1 == "error: file x is broken: fetch it again\n"
    assert error_0.startswith("rank 0 lost a peer") and error_0.count("\n") == 1
