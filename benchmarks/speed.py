"""Speed of ours against a plain PyTorch loop with DDP, the same small Llama, in turns in one run.

    python -m benchmarks.speed [--rounds 8] [--steps 4]

Prints medians, peak memory per rank, ratios (above 1: ours is faster), and which part of the machine's own GEMM rate at these shapes is used.
"""

import argparse
import statistics
import time

import torch

from benchmarks.plain import plain_step
from benchmarks.teams import Team, take_turns
from mtmegatron.batch import Batch, Bounds
from mtmegatron.config.constraints import check, layout_of
from mtmegatron.config.load import validate
from mtmegatron.config.schema import Config
from mtmegatron.device import choose_device
from mtmegatron.mesh import Mesh
from mtmegatron.models.size import training_flops
from mtmegatron.train.engine import Engine


def settings(world: int, micro_batch: int, **parallel: object) -> Config:
    """The benchmark's model and batch: width 256, 6 layers, 8 heads, ffn 768, vocabulary 2,048, sequence 256."""
    tree = {
        "model": {"layers": 6, "width": 256, "heads": 8, "ffn": 768, "vocab": 2048},
        "data": {"sequence": 256},
        "train": {"micro_batch": micro_batch, "global_batch": micro_batch * world, "steps": 1_000_000},
        "optimizer": {"lr": 1e-3, "clip": 1.0, "weight_decay": 0.1},
        "parallel": parallel,
    }
    return check(validate(tree, "benchmark"), world)


def our_step(rank: int, world: int, config: Config):
    """One training step of ours on random tokens."""
    device = choose_device("cpu")
    device.set_current()
    mesh = Mesh(layout_of(config), rank, connect=world > 1)
    engine = Engine(config, mesh, device.native_bf16_matmul)
    draw, number = torch.Generator().manual_seed(rank), iter(range(10**9))
    batch, sequence = config.train.micro_batch, config.data.sequence

    def step() -> None:
        tokens = torch.randint(0, config.model.vocab, (batch, sequence + 1), generator=draw)
        inputs, labels = tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
        engine.step([Batch(inputs, labels, torch.arange(sequence).repeat(batch), Bounds.equal(batch, sequence))], next(number))

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{choose_device('cpu').name}, torch {torch.__version__}, one thread per process, fp32")
    print(f"{'processes':>9} {'micro-batch':>11} {'plain ms':>9} {'ours ms':>9} {'ratio':>6} {'plain MB':>9} {'ours MB':>8} {'of GEMM peak':>12}")
    for world, micro_batch in ((1, 8), (2, 8), (1, 1), (2, 1)):
        config = settings(world, micro_batch)
        teams = [Team("plain", plain_step, world, config), Team("ours", our_step, world, config)]
        take_turns(teams, options.rounds, options.steps * (8 if micro_batch == 1 else 1))
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


if __name__ == "__main__":
    main()
