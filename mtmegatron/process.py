"""The place of this process among those of the run, read from what its launcher left in the environment.

Notable: a pure function of a mapping, so every launcher can be tested without having it; it reads no variable by
itself, and imports no torch.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from mtmegatron.errors import UserError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Process:
    """This process among those of the run.

    `attempt` counts restarts from 0. `origin` is who started us: single, torchrun, openmpi, slurm or pmi.
    `agent_store`: the store at master_address:master_port is hosted by an agent, else by rank 0. `error_file`: where an
    agent expects the record of a failure.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    attempt: int = 0
    master_address: str = LOOPBACK
    master_port: int = 0
    origin: str = "single"
    agent_store: bool = False
    error_file: str = ""


def find_process(environ: Mapping[str, str]) -> Process:
    """Read the place of this process from what its launcher left in the environment.

    torchrun's variables win; then mpirun (Open MPI), because inside a Slurm allocation its own daemons are Slurm tasks;
    then srun; then another MPI's PMI. None of them: a single process.

    Raises: UserError for an incomplete or contradictory set.
    """
    agent = _from_torchrun(environ)
    outer = _from_openmpi(environ) or _from_slurm(environ) or _from_pmi(environ)
    if agent and outer:
        _check_same_run(agent, outer, _number(environ, "GROUP_WORLD_SIZE"))
    return _checked(agent or outer or Process())


def _from_torchrun(environ: Mapping[str, str]) -> Process | None:
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None and world is None:
        return None
    if rank is None or world is None:
        missing, given = ("RANK", "WORLD_SIZE") if rank is None else ("WORLD_SIZE", "RANK")
        raise UserError(f"environment: {given} is set, {missing} is not: set both, or unset both for a single process")
    return Process(
        rank=rank,
        world=world,
        # Without the local ones (Kubernetes, by hand) each process has a node of its own.
        local_rank=_number(environ, "LOCAL_RANK") or 0,
        local_world=_number(environ, "LOCAL_WORLD_SIZE") or 1,
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
        master_address=environ.get("MASTER_ADDR", ""),
        master_port=_number(environ, "MASTER_PORT") or 0,
        origin="torchrun",
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        error_file=environ.get("TORCHELASTIC_ERROR_FILE", ""),
    )


def _from_openmpi(environ: Mapping[str, str]) -> Process | None:
    names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _from_mpi(environ, "openmpi", names, _text(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))


def _from_pmi(environ: Mapping[str, str]) -> Process | None:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _from_mpi(environ, "pmi", names, _text(environ, "PMI_JOBID"))


def _from_mpi(environ: Mapping[str, str], origin: str, names: tuple[str, ...], job: str) -> Process | None:
    rank, world, local_rank, local_world = (_number(environ, name) for name in names)
    if rank is None or world is None:
        return None
    one_node = local_world in (None, world)
    return Process(
        rank=rank,
        world=world,
        local_rank=rank if local_rank is None else local_rank,
        local_world=local_world or world,
        master_address=_text(environ, "MASTER_ADDR") or (LOOPBACK if one_node else ""),
        master_port=_number(environ, "MASTER_PORT") or (_derived_port(job) if job else DEFAULT_PORT),
        origin=origin,
    )


def _from_slurm(environ: Mapping[str, str]) -> Process | None:
    rank, world = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    in_step = any(name.startswith("SLURM_STEP_") for name in environ)
    if rank is None or world is None or (world == 1 and not in_step):
        return None
    if not in_step and environ.get("ENVIRONMENT") == "BATCH":
        raise UserError(
            f"environment: this batch script has SLURM_NTASKS={world} but the command was not started through srun and "
            f"would run once: put `srun` before it, or ask for one task (--ntasks=1)"
        )
    hosts = _text(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    job = f"{_text(environ, 'SLURM_JOB_ID')}.{_text(environ, 'SLURM_STEP_ID')}"
    local_world = _slurm_local_world(environ, world)
    return Process(
        rank=rank,
        world=world,
        local_rank=_number(environ, "SLURM_LOCALID") or 0,
        local_world=local_world,
        master_address=_text(environ, "MASTER_ADDR") or (LOOPBACK if local_world == world else _first_host(hosts)),
        master_port=_number(environ, "MASTER_PORT") or _derived_port(job),
        attempt=_number(environ, "SLURM_RESTART_COUNT") or 0,
        origin="slurm",
    )


def _slurm_local_world(environ: Mapping[str, str], world: int) -> int:
    """Tasks on this node, from Slurm's run-length list of tasks per node: "4(x2),3" is 4, 4, 3."""
    text = _text(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    if not counts:
        return -(-world // (_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1))
    node = _number(environ, "SLURM_NODEID") or 0
    return min(counts[min(node, len(counts) - 1)], world)


def _first_host(nodelist: str) -> str:
    """The first host of a Slurm list: "gpu[03-10,12],login1" is gpu03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _derived_port(job: str) -> int:
    """The same port on all ranks, another one for another job, below those that the system hands out itself."""
    return 20000 + zlib.crc32(job.encode()) % 12000


def _text(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is set; "" when none is."""
    return next((environ[name] for name in names if environ.get(name)), "")


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is set, as a number; None when none is."""
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return None
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(f"environment: {name}={environ[name]!r} is no whole number: correct it or unset it") from None


def _check_same_run(agent: Process, outer: Process, agents: int | None) -> None:
    """torchrun under srun is fine when each task is one agent or one rank; else there would be several equal runs."""
    if agent.world == 1 or outer.world == 1 or outer.world == agents:
        return
    if (agent.rank, agent.world) != (outer.rank, outer.world):
        raise UserError(
            f"environment: torchrun's variables (RANK, WORLD_SIZE) say rank {agent.rank} of {agent.world} and those of "
            f"{outer.origin} say rank {outer.rank} of {outer.world}: start the processes with one launcher only, or "
            f"unset the variables of the other"
        )


def _checked(process: Process) -> Process:
    where = f"environment ({process.origin})"
    if not 0 <= process.rank < process.world:
        raise UserError(f"{where}: RANK={process.rank} is not in 0 to WORLD_SIZE={process.world} less 1: correct one")
    if not 0 <= process.local_rank < process.local_world:
        raise UserError(
            f"{where}: LOCAL_RANK={process.local_rank} is not in 0 to LOCAL_WORLD_SIZE={process.local_world} less 1: "
            f"correct one"
        )
    if process.local_world > process.world:
        raise UserError(
            f"{where}: LOCAL_WORLD_SIZE={process.local_world} processes on this node are more than "
            f"WORLD_SIZE={process.world} in all: correct one"
        )
    if process.world > 1 and not (process.master_address and 0 < process.master_port < 65536):
        raise UserError(
            f"{where}: {process.world} processes need a place to meet: set MASTER_ADDR (the host of rank 0) and "
            f"MASTER_PORT (1 to 65535)"
        )
    return process
