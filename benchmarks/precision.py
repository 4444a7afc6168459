"""Training quality and speed of each precision on a CPU: the quickstart's model and corpus, the same samples, in one process.

    python -m benchmarks.precision [--model dense] [--seed 1234] [--steps 300] [--only bf16,fp8-rowwise]
        losses of the quickstart's model, or of the same with experts (`--model moe`), docs/precision.png; needs the corpus of `mtm quickstart`
    python -m benchmarks.precision --speed [--rounds 5] [--only fp32,bf16]
        time of a step, in turns in one run: as a ratio to fp32, and to plain PyTorch (`plain.py`) in fp32 and under torch.autocast in bf16

Curves are kept in runs/precision, so that recipes can be trained one after the other. A seed is other first weights and another order of samples: two
runs of one precision that differ in a millionth part of their first weights end some tenths of a percent apart, so one run of each says little.
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
# each token takes as wide a feed-forward layer as in the dense model
MODELS = {"dense": (), "moe": ("model.moe.experts=8", "model.moe.top_k=2", "model.moe.ffn=192", "model.moe.aux_loss=0.01")}


def settings(precision: str, *more: str) -> Config:
    own = [*OVERRIDES, f"train.precision={precision}", *more]
    return load(Path("configs/quickstart.yaml"), own + (["train.fp8.high_precision=[]"] if precision.startswith(PREFIX) else [])).config


def engine_of(config: Config) -> Engine:
    return Engine(config, Mesh(layout_of(config)), choose_device("cpu").native_bf16_matmul)


def train(model: str, precision: str, seed: int, steps: int) -> dict:
    """Loss of each step, and at the end that of held-out files."""
    config = check(with_vocabulary(settings(precision, f"train.steps={steps}", f"train.seed={seed}", *MODELS[model])), 1)
    corpus, engine, losses = open_corpus(config), engine_of(config), []
    for step in range(steps):
        result = engine.step(micro_batches(config, corpus.train, engine.mesh, step), step)
        losses.append(result.loss)
    sums = [engine.evaluate(micro_batches(config, corpus.valid, engine.mesh, i)) for i in range(EVALUATED)]
    return {"losses": losses, "valid": sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)}


def path_of(model: str, precision: str, seed: str | int) -> Path:
    return FOLDER / f"{model}-{precision}-{seed}.json"


def kept(model: str) -> dict[str, list[tuple[dict, dict]]]:
    """By precision, the curve of each seed beside that of the same seed in fp32."""
    found = {}
    for name in PRECISIONS:
        seeds = [path.stem.rsplit("-", 1)[1] for path in sorted(FOLDER.glob(f"{model}-{name}-*.json"))]
        pairs = [[path_of(model, which, seed) for which in (name, "fp32")] for seed in seeds]
        found[name] = [(json.loads(mine.read_text()), json.loads(base.read_text())) for mine, base in pairs if base.exists()]
    return {name: pairs for name, pairs in found.items() if pairs}


def report(model: str, curves: dict[str, list[tuple[dict, dict]]]) -> None:
    """Loss of the last 50 steps and of held-out files: means over seeds, and by how much their mean and each of them differs from fp32."""
    for what, value in (("last 50 steps", lambda curve: statistics.mean(curve["losses"][-50:])), ("held out", lambda curve: curve["valid"])):
        print(f"{model}, {what}")
        for name, pairs in curves.items():
            ratios = [value(mine) / value(base) - 1 for mine, base in pairs]
            own, others = statistics.mean(value(mine) for mine, _ in pairs), " ".join(f"{ratio:+.2%}" for ratio in ratios)
            print(f"  {name:<16} {own:.4f}, of fp32 {statistics.mean(ratios):+.2%}: {others}", flush=True)


def draw(models: dict[str, dict[str, list[tuple[dict, dict]]]]) -> None:
    """A column for each model: the losses, and what each differs from fp32 by, both as means over 10 steps and over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(models), figsize=(7 * len(models), 7), sharex=True, sharey="row", squeeze=False, layout="constrained")
    for (model, curves), (above, below) in zip(models.items(), axes.T):
        for name, pairs in curves.items():
            smooth = torch.tensor([[curve["losses"] for curve in pair] for pair in pairs]).unfold(-1, 10, 1).mean(-1)  # [seeds, 2, steps]
            colour = f"C{PRECISIONS.index(name)}"
            above.plot(smooth[:, 0].mean(0), colour, label=name, linewidth=1)
            below.plot(100 * (smooth[:, 0] / smooth[:, 1] - 1).mean(0), colour, linewidth=1)
        above.set(title=f"{model}, seeds: {len(curves['fp32'])}")
        above.legend()
        below.set(xlabel="step", ylim=(-1.5, 1.5))
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("difference to fp32 (%)")
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
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--seed", type=int, default=1234)
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
        curve = train(options.model, name, options.seed, options.steps)
        path_of(options.model, name, options.seed).write_text(json.dumps(curve))
    models = {model: curves for model in MODELS if (curves := kept(model))}
    for model, curves in models.items():
        report(model, curves)
    if models:
        draw(models)


if __name__ == "__main__":
    main()
