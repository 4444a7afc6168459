"""Speed of ours against a plain PyTorch loop with DDP, the same small Llama, in turns in one run.

    python -m benchmarks.speed [--rounds 8] [--steps 4] [--only plain|layouts]

First ours and the plain loop in the same layouts: medians, peak memory per rank, ratios (above 1: ours is faster), and which part of the machine's
own GEMM rate at these shapes is used. Then the same step (as many sequences, the same two cores) in every layout of two processes, against the plain
loop with DDP and against ours in one process with two threads.
"""

import argparse
import statistics
import time

import torch

from benchmarks.plain import plain_step
from benchmarks.teams import Team, take_turns
from mtmegatron.batch import Batch, Bounds
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.load import validate
from mtmegatron.config.schema import Config
from mtmegatron.device import choose_device
from mtmegatron.mesh import Mesh
from mtmegatron.models.size import training_flops
from mtmegatron.parallel.context import ContextSplit
from mtmegatron.train.engine import Engine

# name -> (settings of `parallel`, micro-batches of each rank in a step of 16 sequences)
LAYOUTS: dict[str, tuple[dict, int]] = {
    "one process, 2 threads": ({}, 1),
    "data 2": ({"data": 2}, 1),
    "data 2, ZeRO 1": ({"data": 2, "zero": 1}, 1),
    "data 2, ZeRO 2": ({"data": 2, "zero": 2}, 1),
    "data 2, ZeRO 3": ({"data": 2, "zero": 3}, 1),
    "tensor 2": ({"tensor": 2}, 1),
    "pipeline 2, 1f1b": ({"pipeline": 2}, 4),
    "pipeline 2, zb-v 2,1,2,1": ({"pipeline": 2, "schedule": "zb-v", "pipeline_layers": [2, 1, 2, 1]}, 4),
    "context 2": ({"context": 2}, 1),
}
LARGE, SMALL = 16, 2  # sequences of a step; of the small one each rank has one micro-batch, so no pipeline


def settings(world: int, micro_batch: int, global_batch: int = 0, **parallel: object) -> Config:
    """The benchmark's model and batch: width 256, 6 layers, 8 heads, ffn 768, vocabulary 2,048, sequence 256."""
    tree = {
        "model": {"layers": 6, "width": 256, "heads": 8, "ffn": 768, "vocab": 2048},
        "data": {"sequence": 256},
        "train": {"micro_batch": micro_batch, "global_batch": global_batch or micro_batch * world, "steps": 1_000_000},
        "optimizer": {"lr": 1e-3, "clip": 1.0, "weight_decay": 0.1},
        "parallel": parallel,
    }
    return check(validate(tree, "benchmark"), world)


def our_step(rank: int, world: int, config: Config, threads: int = 1):
    """One training step of ours on random tokens."""
    torch.set_num_threads(threads)
    device = choose_device("cpu")
    device.set_current()
    mesh = Mesh(layout_of(config), rank, connect=world > 1)
    engine = Engine(config, mesh, device.native_bf16_matmul)
    draw, number = torch.Generator().manual_seed(mesh.coordinate("data")), iter(range(10**9))
    split, count = ContextSplit(mesh["context"].size, mesh["context"].rank), config.train.micro_batch
    micro_batches = config.train.global_batch // (count * config.parallel.data)

    def micro_batch() -> Batch:
        sequence = config.data.sequence
        tokens = torch.randint(0, config.model.vocab, (count, sequence + 1), generator=draw)
        inputs, labels = tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
        return split.select(Batch(inputs, labels, torch.arange(sequence).repeat(count), Bounds.equal(count, sequence)), count)

    def step() -> None:
        engine.step([micro_batch() for _ in range(micro_batches)], next(number))

    return step


def gemm_rate(tokens: int, config: Config) -> float:
    """FLOP/s of one thread on the forward products of one block and the head."""
    m = config.model
    shapes = [(m.width, 3 * m.width), (m.width, m.width), (m.width, 2 * m.ffn), (m.ffn, m.width), (m.width, m.vocab)]
    work, best = 0.0, 0.0
    for k, n in shapes:
        x, w = torch.randn(tokens, k), torch.randn(n, k)
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            x @ w.t()
            times.append(time.perf_counter() - begin)
        work, best = work + 2.0 * tokens * k * n, best + min(times)
    return work / best


def against_plain(rounds: int, steps: int) -> None:
    """Ours and the plain loop in one process and as two data ranks, large and small micro-batches."""
    print(f"{'processes':>9} {'micro-batch':>11} {'plain ms':>9} {'ours ms':>9} {'ratio':>6} {'plain MB':>9} {'ours MB':>8} {'of GEMM peak':>12}")
    for world, micro_batch in ((1, 8), (2, 8), (1, 1), (2, 1)):
        config = settings(world, micro_batch)
        teams = [Team("plain", plain_step, world, config), Team("ours", our_step, world, config)]
        take_turns(teams, rounds, steps * (8 if micro_batch == 1 else 1))
        plain, ours = (statistics.median(team.seconds) for team in teams)
        tokens = micro_batch * config.data.sequence
        used = tokens * training_flops(config.model, config.data.sequence) / ours / gemm_rate(tokens, config)
        memory = [team.memory / 2**20 for team in teams]
        print(
            f"{world:>9} {micro_batch:>11} {plain * 1e3:>9.1f} {ours * 1e3:>9.1f} {plain / ours:>6.2f} {memory[0]:>9.0f} {memory[1]:>8.0f} {used:>12.0%}",
            flush=True,
        )
        for team in teams:
            team.close()


def layout_teams(sequences: int) -> list[Team]:
    """The plain loop and every layout of ours that makes sense with so many sequences a step."""
    teams = [Team("plain, DDP", plain_step, 2, settings(2, sequences // 2))]
    for name, (parallel, parts) in LAYOUTS.items():
        if sequences == LARGE or parts == 1:
            world, ranks = 2 if parallel else 1, parallel.get("data", 1)
            config = settings(world, sequences // (parts * ranks), sequences, **parallel)
            teams.append(Team(name, our_step, world, config, 3 - world))
    return teams


def layouts(rounds: int, steps: int) -> None:
    """The same step in every layout of two processes."""
    for sequences in (LARGE, SMALL):
        teams = layout_teams(sequences)
        take_turns(teams, rounds, steps * (LARGE // sequences))
        medians = {team.name: statistics.median(team.seconds) for team in teams}
        print(f"{f'{sequences} sequences a step':<26} {'ms':>8} {'of plain DDP':>13} {'of one process':>15} {'MB per rank':>12}")
        for team in teams:
            mine = medians[team.name]
            of_plain, of_one = medians["plain, DDP"] / mine, medians["one process, 2 threads"] / mine
            print(f"{team.name:<26} {mine * 1e3:>8.1f} {of_plain:>13.2f} {of_one:>15.2f} {team.memory / 2**20:>12.0f}", flush=True)
            team.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", choices=("plain", "layouts"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{choose_device('cpu').name}, torch {torch.__version__}, two cores, fp32")
    if options.only != "layouts":
        against_plain(options.rounds, options.steps)
    if options.only != "plain":
        layouts(options.rounds, options.steps)


if __name__ == "__main__":
    main()
