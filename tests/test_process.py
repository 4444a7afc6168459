"""What a process reads from the environments that torchrun, srun, mpirun and nobody leave to it."""

import pytest

from mtmegatron.errors import UserError
from mtmegatron.process import Process, find_process


def place(process: Process) -> tuple[int, int, int, int]:
    return process.rank, process.world, process.local_rank, process.local_world


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "71"}


@pytest.mark.parametrize(
    "environ, origin, expected",
    [
        ({}, "single", (0, 1, 0, 1)),
        ({"PATH": "/bin", "MASTER_ADDR": "left over"}, "single", (0, 1, 0, 1)),
        (TORCHRUN, "torchrun", (5, 8, 1, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "torchrun", (1, 2, 0, 1)),
        (SRUN, "slurm", (5, 8, 1, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "71"}, "single", (0, 1, 0, 1)),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "71"}, "single", (0, 1, 0, 1)),  # a shell of salloc
        (BATCH | {"SLURM_NTASKS": "1"}, "single", (0, 1, 0, 1)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "slurm", (0, 1, 0, 1)),
        (MPIRUN, "openmpi", (3, 4, 3, 4)),
        (BATCH | MPIRUN | {"ENVIRONMENT": ""}, "openmpi", (3, 4, 3, 4)),  # mpirun in a Slurm allocation
        (HYDRA, "pmi", (1, 2, 1, 2)),
        # one agent per node, started by srun
        (TORCHRUN | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "torchrun", (5, 8, 1, 4)),
        (TORCHRUN | SRUN, "torchrun", (5, 8, 1, 4)),  # both agree
    ],
)
def test_place_by_launcher(environ: dict[str, str], origin: str, expected: tuple[int, ...]) -> None:
    process = find_process(environ)
    assert (process.origin, place(process)) == (origin, expected)


@pytest.mark.parametrize("family", ["slurm", "openmpi"])
def test_one_node_has_each_rank_once(family: str) -> None:
    """Four tasks on one node are ranks 0 to 3 of one run, meeting at one port of this machine."""
    base = SRUN | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    found = []
    for rank in map(str, range(4)):
        slurm = base | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        mpi = MPIRUN | {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        found.append(find_process(slurm if family == "slurm" else mpi))
    assert [place(process) for process in found] == [(rank, 4, rank, 4) for rank in range(4)]
    assert {process.master_address for process in found} == {"127.0.0.1"}
    assert len({process.master_port for process in found}) == 1


def test_torchrun_extras() -> None:
    process = find_process(TORCHRUN | {"TORCHELASTIC_ERROR_FILE": "/e.json"})
    assert (process.attempt, process.agent_store, process.error_file) == (2, True, "/e.json")
    assert (process.master_address, process.master_port) == ("host0", 1234)


@pytest.mark.parametrize(
    "nodelist, host",
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[07-08]", "gpu07"), ("a[3,5-9]-ib[0-1],b", "a3-ib0"), ("x-1.y,z[1]", "x-1.y")],
)
def test_slurm_meets_at_its_first_host(nodelist: str, host: str) -> None:
    assert find_process(SRUN | {"SLURM_STEP_NODELIST": nodelist}).master_address == host


def test_slurm_tasks_per_node_may_differ() -> None:
    environ = SRUN | {"SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    assert [find_process(environ | {"SLURM_NODEID": node}).local_world for node in "012"] == [4, 4, 3]


def test_jobs_and_steps_meet_at_ports_of_their_own() -> None:
    jobs = [SRUN, SRUN | {"SLURM_STEP_ID": "1"}, SRUN | {"SLURM_JOB_ID": "72"}]
    ports = {find_process(environ).master_port for environ in jobs}
    assert len(ports) == 3 and all(1024 < port < 32768 for port in ports)
    assert find_process(SRUN | {"MASTER_PORT": "99"}).master_port == 99


@pytest.mark.parametrize(
    "environ, words",
    [
        (TORCHRUN | {"RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"]),
        ({"RANK": "0"}, ["RANK", "WORLD_SIZE"]),
        (TORCHRUN | {"WORLD_SIZE": "many"}, ["WORLD_SIZE='many'"]),
        (TORCHRUN | {"MASTER_PORT": ""}, ["MASTER_PORT"]),
        (TORCHRUN | SRUN | {"SLURM_STEP_NUM_TASKS": "6"}, ["5 of 8", "5 of 6", "slurm"]),
        (TORCHRUN | SRUN | {"SLURM_PROCID": "4"}, ["5 of 8", "4 of 8"]),
        (TORCHRUN | MPIRUN, ["5 of 8", "3 of 4", "openmpi"]),
        (BATCH, ["SLURM_NTASKS=4", "srun"]),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, ["MASTER_ADDR"]),
    ],
)
def test_contradictions_name_both_sides(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        find_process(environ)
    assert all(word in str(caught.value) for word in words), str(caught.value)
