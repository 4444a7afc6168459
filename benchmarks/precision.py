"""Training quality and speed of each precision on a CPU: the quickstart's model and corpus, the same samples, in one process.

    python -m benchmarks.precision [--steps 300] [--only bf16,fp8-rowwise]    losses, docs/precision.png; needs the corpus of `mtm quickstart`
    python -m benchmarks.precision --speed [--rounds 5] [--only fp32,bf16]    time of a step, in turns in one run: as a ratio to fp32, and to plain
                                                                              PyTorch (`plain.py`) in fp32 and under torch.autocast in bf16

Curves are kept in runs/precision, so that recipes can be trained one after the other.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from benchmarks.plain import plain_step
from benchmarks.teams import Step, Team, take_turns
from mtmegatron.batch import Batch, Bounds
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.load import load
from mtmegatron.config.schema import Config
from mtmegatron.data.loader import micro_batches
from mtmegatron.device import choose_device
from mtmegatron.mesh import Mesh
from mtmegatron.precision.recipes import PREFIX, RECIPES
from mtmegatron.train.corpus import open_corpus, with_vocabulary
from mtmegatron.train.engine import Engine

PRECISIONS = ("fp32", "bf16", "fp16", *(PREFIX + recipe for recipe in RECIPES))
FOLDER, PICTURE = Path("runs/precision"), Path("docs/precision.png")
EVALUATED = 16  # batches
# every block in fp8: a model of four has no middle to speak of
OVERRIDES = ("parallel.tensor=1", "parallel.pipeline=1", "data.sequence=128", "train.micro_batch=8", "optimizer.lr=3e-3")


def settings(precision: str, *more: str) -> Config:
    own = [*OVERRIDES, f"train.precision={precision}", *more]
    return load(Path("configs/quickstart.yaml"), own + (["train.fp8.high_precision=[]"] if precision.startswith(PREFIX) else [])).config


def engine_of(config: Config) -> Engine:
    return Engine(config, Mesh(layout_of(config)), choose_device("cpu").native_bf16_matmul)


def train(precision: str, steps: int) -> dict:
    """Loss of each step, and at the end that of held-out files."""
    config = check(with_vocabulary(settings(precision, f"train.steps={steps}")), 1)
    corpus, engine, losses = open_corpus(config), engine_of(config), []
    for step in range(steps):
        result = engine.step(micro_batches(config, corpus.train, engine.mesh, step), step)
        losses.append(result.loss)
    sums = [engine.evaluate(micro_batches(config, corpus.valid, engine.mesh, i)) for i in range(EVALUATED)]
    return {"losses": losses, "valid": sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)}


def report(curves: dict[str, dict]) -> None:
    base = curves["fp32"]
    print(f"{'precision':<16} {'last 50 steps':>13} {'of fp32':>8} {'held out':>9} {'of fp32':>8}")
    for name, curve in curves.items():
        last, first = (statistics.mean(c["losses"][-50:]) for c in (curve, base))
        held_out = curve["valid"]
        print(f"{name:<16} {last:>13.4f} {last / first - 1:>+8.2%} {held_out:>9.4f} {held_out / base['valid'] - 1:>+8.2%}", flush=True)


def draw(curves: dict[str, dict]) -> None:
    """The losses, and what each differs from fp32 by, both as means over 10 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    smooth = {name: torch.tensor(curve["losses"]).unfold(0, 10, 1).mean(-1) for name, curve in curves.items()}
    for name, curve in smooth.items():
        above.plot(curve, label=name, linewidth=1)
        below.plot(100 * (curve / smooth["fp32"] - 1), linewidth=1)
    above.set_ylabel("loss")
    above.legend()
    below.set(xlabel="step", ylabel="difference to fp32 (%)", ylim=(-1.5, 1.5))
    figure.savefig(PICTURE, dpi=80)


def step_of(rank: int, world: int, config: Config) -> Step:
    """One training step on random tokens."""
    choose_device("cpu").set_current()
    config = check(config, world)
    engine, sequence, count, number = engine_of(config), config.data.sequence, config.train.micro_batch, [0]
    draw_tokens = torch.Generator().manual_seed(0)

    def step() -> None:
        tokens, labels = (torch.randint(config.model.vocab, (sequence * count,), generator=draw_tokens) for _ in range(2))
        engine.step([Batch(tokens, labels, torch.arange(sequence).repeat(count), Bounds.equal(count, sequence))], number[0])
        number[0] += 1

    return step


def autocast_step(rank: int, world: int, config: Config) -> Step:
    """The plain step in mixed precision. Backward is inside too: its products have bf16 operands from forward, nothing else is cast there."""
    step = plain_step(rank, world, config)

    def cast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            step()

    return cast


PLAIN = {"plain fp32": plain_step, "plain autocast": autocast_step}


def speed(rounds: int, names: list[str]) -> None:
    """A model of products large enough to be products, not calls."""
    shape = ("model.width=512", "model.heads=8", "model.kv_heads=8", "model.tied=false", "model.ffn=1408", "model.vocab=4096", "data.sequence=256")
    shape += ("train.micro_batch=4", "train.global_batch=4")
    teams = [Team(name, make, 1, settings("fp32", *shape)) for name, make in PLAIN.items()]
    teams += [Team(name, step_of, 1, settings(name, *shape)) for name in names]
    take_turns(teams, rounds, 1)
    medians = {team.name: statistics.median(team.seconds) for team in teams}
    bases = [name for name in ("fp32", *PLAIN) if name in medians]
    for team in teams:
        ratios = ", ".join(f"{medians[base] / medians[team.name]:.2f} of {base}" for base in bases)
        print(f"{team.name:<16} {medians[team.name] * 1e3:>8.1f} ms: {ratios}", flush=True)
        team.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default=",".join(PRECISIONS))
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(filter(None, options.only.split(",")))
    if options.speed:
        return speed(options.rounds, names)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        (FOLDER / f"{name}.json").write_text(json.dumps(train(name, options.steps)))
    curves = {name: json.loads(path.read_text()) for name in PRECISIONS if (path := FOLDER / f"{name}.json").exists()}
    if "fp32" in curves:
        report(curves)
        draw(curves)


if __name__ == "__main__":
    main()
