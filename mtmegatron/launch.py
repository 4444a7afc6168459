"""The processes of a run: how they meet, who starts them, and what a user sees when one of them fails.

Notable:
- Environment variables are read here, once, at start-up (`find_process(os.environ)`, `launch`), and nowhere else.
- The store of a run is always our own and prefixed by the attempt. With the agent's bare store a restarted Gloo job
  dials the addresses of the dead attempt, and half of such jobs never came back.
- torch's elastic agent starts, watches and stops the local processes. We call it once per attempt, so that between two
  attempts the user is told why, and so that a fault that only the user can repair is not tried again.
- A rank that fails writes a record; the launcher prints the one that came first. Errors that only say "my peer is gone"
  come last.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from mtmegatron.device import Device
from mtmegatron.errors import UserError
from mtmegatron.process import LOOPBACK, Process, find_process

__all__ = ["Process", "find_process", "launch", "leave", "report", "start_group", "stop_group"]

USER_FAULT = 2  # exit code of a fault that the user can repair
# Texts of errors of a rank whose peer went away: true, but never the cause.
CONSEQUENCES = ("closed by peer", "reset by peer", "broken pipe", "connection refused")


# --- how they meet ---


def start_group(process: Process, device: Device, timeout_s: float = 600.0) -> dist.Store:
    """Meet the other processes and make the default process group; returns the store of this attempt.

    `timeout_s` limits the wait for the others, and each collective. A single process is a group of one and opens no
    port.

    Raises: UserError when the port is taken or some rank does not come.
    """
    device.set_current()
    timeout = timedelta(seconds=timeout_s)
    store = dist.HashStore() if process.world == 1 else _meet(process, timeout)
    dist.init_process_group(
        device.collective_backend_string, store=store, rank=process.rank, world_size=process.world, timeout=timeout
    )
    return store


def stop_group() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(process: Process, code: int) -> NoReturn:
    """Leave the group and end this process of a run, after everything was written, closed and said.

    One of several goes at once, with its group as it is: tearing down the collective library's threads has been seen to
    abort a process whose work was done.
    """
    if process.world == 1:
        stop_group()
        raise SystemExit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _meet(process: Process, timeout: timedelta) -> dist.Store:
    """A store of this attempt at which all ranks have arrived."""
    hosts = process.rank == 0 and not process.agent_store
    common = _host(process, timeout) if hosts else _dial(process, timeout)
    store = dist.PrefixStore(f"attempt-{process.attempt}", common)
    store.set(f"here-{process.rank}", "")
    try:
        if process.rank == 0:
            store.wait([f"here-{rank}" for rank in range(process.world)], timeout)
            store.set("all-here", "")
        store.wait(["all-here"], timeout)
    except dist.DistError:
        raise UserError(_nobody(process, timeout, _absent(process, store))) from None
    return store


def _absent(process: Process, store: dist.Store) -> str:
    if process.rank > 0:
        return "not all ranks came"
    absent = [rank for rank in range(process.world) if not store.check([f"here-{rank}"])]
    return f"ranks {', '.join(map(str, absent))} of {process.world} did not come"


def _host(process: Process, timeout: timedelta) -> dist.Store:
    try:
        return dist.TCPStore(process.master_address, process.master_port, None, True, timeout, wait_for_workers=False)
    except dist.DistNetworkError as error:
        raise UserError(_port_refused(process.master_port, error, "set MASTER_PORT to a free one")) from None


def _dial(process: Process, timeout: timedelta) -> dist.Store:
    """Connect to the store. In a thread, because torch waits for ever when another program listens on the port."""
    result: Future = Future()

    def connect() -> None:
        try:
            result.set_result(dist.TCPStore(process.master_address, process.master_port, None, False, timeout))
        except dist.DistError as error:
            result.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        return result.result(timeout.total_seconds())
    except (TimeoutError, dist.DistError):
        raise UserError(_nobody(process, timeout, "no store of ours answers")) from None


def _nobody(process: Process, timeout: timedelta, what: str) -> str:
    return (
        f"rank {process.rank}: {what} at {process.master_address}:{process.master_port} within "
        f"{timeout.total_seconds():.0f} s: see why the others did not start, whether MASTER_ADDR is the host of rank 0 "
        f"and whether another program holds MASTER_PORT"
    )


def _port_refused(port: int, error: Exception, repair: str) -> str:
    why = "is in use by another program" if "EADDRINUSE" in str(error) else f"cannot be opened ({error})"
    return f"port {port} {why}: {repair}"


# --- what a failing rank says ---


def report(process: Process, error: BaseException, store: dist.Store | None = None) -> int:
    """Say once for the whole run what ended this process; returns the exit code. Call it before the group is stopped.

    Under an agent the record goes to the agent, which prints the first one. Else a UserError is printed by the first
    rank that claims it in `store`; without a store, i.e. before the group exists, all ranks have read the same input
    and rank 0 prints. Other errors are printed with their traceback by each rank, except those that only say that a
    peer went away: one line.
    """
    code = _exit_code(error)
    if process.error_file and isinstance(error, Exception):
        _write_record(process, error, code)
    elif isinstance(error, UserError):
        if _claims(process, store):
            _say(f"error: {error}")
    elif isinstance(error, SystemExit):
        if not isinstance(error.code, int | None):
            _say(str(error.code))
    elif _is_consequence(error):
        _say(f"rank {process.rank} lost a peer; the cause is with the rank that failed first ({error})")
    elif not isinstance(error, KeyboardInterrupt):
        _say(f"rank {process.rank} failed:\n{_traceback(error)}")
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return USER_FAULT if isinstance(error, UserError) else 1


def _claims(process: Process, store: dist.Store | None) -> bool:
    if store is None:
        return process.rank == 0
    try:
        return store.add("user-error", 1) == 1
    except dist.DistError:  # the host of the store has gone already: better twice than never
        return True


def _is_consequence(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in CONSEQUENCES)
    )


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _write_record(process: Process, error: BaseException, code: int) -> None:
    """The JSON that torch's agent reads, and what it lacks to find the cause: nanoseconds, a mark on consequences."""
    now = time.time_ns()
    user = isinstance(error, UserError)
    details = {
        "py_callstack": str(error) if user else _traceback(error),
        "timestamp": str(now // 10**9),
        "time_ns": now,
        "rank": process.rank,
        "consequence": _is_consequence(error),
        "exit_code": code,
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    Path(process.error_file).write_text(json.dumps({"message": message}))


# --- who starts them ---


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt: exit code and what to tell the user."""

    code: int
    text: str
    restartable: bool


def launch(
    command: list[str],
    nproc: int,
    *,
    max_restarts: int = 0,
    port: int | None = None,
    log_folder: str | Path | None = None,
    threads: int | None = None,
) -> int:
    """Run `nproc` processes of `command` (a program and its arguments) on this machine; returns the run's exit code.

    0 when all ranks ended well; 2 for a UserError; 128 + n for signal n; else the exit code of the rank that failed
    first. When a rank fails the others are stopped, and up to `max_restarts` times all are started again. `port`: where
    they meet; None takes a free one. `threads`: OMP_NUM_THREADS of each, by default the user's own setting, else the
    cores divided by `nproc`. With `log_folder` the output of each rank goes also into a file there.

    Raises: UserError when the port is taken, the folder cannot be made, or a number makes no sense.
    """
    from torch.distributed.elastic.multiprocessing import SignalException  # slow to import, and only needed here

    assert command
    if nproc < 1 or max_restarts < 0 or not 0 <= (port or 0) < 65536:
        raise UserError(
            f"launch: {nproc} processes, {max_restarts} restarts, port {port}: give at least 1 process, at least 0 "
            f"restarts and a port from 1 to 65535, or no port for a free one"
        )
    with _quiet_agent(), _signals_kept(), _folder(log_folder) as folder:
        store = _free_store(port)
        own = os.environ.get("OMP_NUM_THREADS")
        settings = {"OMP_NUM_THREADS": str(threads or own or max(1, _cores() // nproc))}
        try:
            for attempt in range(max_restarts + 1):
                tee = log_folder is not None
                failure = _run_attempt(command, nproc, attempt, store.port, folder, settings, tee)
                if failure is None:
                    return 0
                _say(failure.text)
                if attempt == max_restarts or not failure.restartable:
                    return failure.code
                _say(f"restarting all {nproc} processes (restart {attempt + 1} of {max_restarts})")
        except SignalException as stop:
            _say(f"stopped by {signal.Signals(stop.sigval).name}")
            return 128 + stop.sigval
    raise AssertionError("unreachable: the last attempt returns")


def _run_attempt(
    command: list[str], nproc: int, attempt: int, port: int, folder: Path, settings: Mapping[str, str], tee: bool
) -> Failure | None:
    """One start of all processes under torch's agent; None when all ended well."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    run = f"attempt-{attempt}-{uuid.uuid4().hex[:8]}"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=run,
        rdzv_backend="static",
        rdzv_endpoint=f"{LOOPBACK}:{port}",
        rdzv_configs={"rank": 0, "timeout": 60},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), tee=Std.ALL if tee else Std.NONE),
        log_line_prefix_template="[rank ${rank}] ",
    )
    # `env` and not os.environ: what we set is for the children alone. The agent expands $ in arguments: ours are final.
    settings = {**settings, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    arguments = [*(f"{name}={value}" for name, value in settings.items()), *command]
    try:
        elastic_launch(config, "env")(*(argument.replace("$", "$$") for argument in arguments))
    except ChildFailedError as error:
        return _first_failure(error.failures, list(folder.glob(f"{run}_*/**/error.json")))
    return None


def _first_failure(failures: Mapping[int, Any], files: Sequence[Path]) -> Failure:
    """The cause among all failures of an attempt.

    It is the earliest record, unless every record only tells of a lost peer and some rank went without a word (a crash,
    a kill): then that rank. The agent lists those in the order in which it found them, before those that it stopped.
    """
    records = [json.loads(path.read_text())["message"]["extraInfo"] for path in files]
    first = min(records, key=lambda record: (record["consequence"], record["time_ns"]), default=None)
    silent = [rank for rank in failures if rank not in {record["rank"] for record in records}]
    if first is None or (first["consequence"] and silent):
        rank = min(silent, key=lambda rank: failures[rank].timestamp)
        return _silent_failure(rank, failures[rank].exitcode)
    user = first["exit_code"] == USER_FAULT
    head = "error: " if user else f"rank {first['rank']} failed:\n"
    return Failure(first["exit_code"], head + first["py_callstack"], restartable=not user)


def _silent_failure(rank: int, exit_code: int) -> Failure:
    if exit_code < 0:
        number = signal.Signals(-exit_code)
        hint = " (the system does that when memory runs out)" if number == signal.SIGKILL else ""
        return Failure(128 + number, f"rank {rank} was killed by {number.name}{hint}", restartable=True)
    text = f"rank {rank} ended with exit code {exit_code}; what it printed is above"
    return Failure(exit_code, text, restartable=exit_code != USER_FAULT)


def _free_store(port: int | None) -> dist.TCPStore:
    """The store that the agent serves to its processes. Opened first and shared by port: a free port cannot be lost."""
    try:
        return dist.TCPStore(LOOPBACK, port or 0, 1, True, timedelta(seconds=60), multi_tenant=True)
    except dist.DistNetworkError as error:
        raise UserError(_port_refused(port or 0, error, "give another port, or none for a free one")) from None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _folder(log_folder: str | Path | None) -> Iterator[Path]:
    """Where logs and records go: the user's folder, or a temporary one."""
    if log_folder is None:
        with tempfile.TemporaryDirectory(prefix="mtmegatron-") as folder:
            yield Path(folder)
        return
    try:
        Path(log_folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"log folder {log_folder} cannot be made ({error.strerror}): name another") from None
    yield Path(log_folder)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs what we say better ourselves."""
    logger = logging.getLogger("torch.distributed.elastic")
    silence, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(silence)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(silence)
        logger.propagate = propagate


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """The agent installs handlers and leaves them; give the old ones back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
