"""Norm, clip and update of a small Llama's parameters: ours on flat buckets against torch.optim.AdamW(fused=True) with clip_grad_norm_, in turns.

    python -m benchmarks.optim [--rounds 9] [--width 512]

Ours as torch's fused kernel and as one compiled pass (`optimizer.compiled`). Medians of one thread in one run and their ratio (above 1: ours is faster). With bf16 weights torch's side has the fp32 masters and the two copies
between them and the weights that such a loop needs, as ours has. `clipped`: the norm is above the limit, so gradients are scaled.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.load import validate
from mtmegatron.mesh import Mesh
from mtmegatron.optim.elementwise import ELEMENTWISE
from mtmegatron.train.engine import Engine


def engine_of(width: int, precision: str, **optimizer: object) -> Engine:
    """A model of 6 layers, with random gradients."""
    tree = {
        "model": {"layers": 6, "width": width, "heads": 8, "ffn": 3 * width, "vocab": 8192},
        "data": {"sequence": 256}, "train": {"global_batch": 1, "precision": precision}, "optimizer": optimizer,
    }  # fmt: skip
    config = check(validate(tree, "benchmark"), 1)
    engine = Engine(config, Mesh(layout_of(config)))
    for bucket in engine.buckets.buckets:
        bucket.gradients.normal_()
    return engine


def ours(engine: Engine, clipped: bool) -> Callable[[], None]:
    def step() -> None:
        norm = float(engine.buckets.squared_norm()) ** 0.5
        engine.optimizer.step(1e-3, 0.5 if clipped and norm > 0 else 1.0)

    return step


def torchs(engine: Engine, clipped: bool) -> Callable[[], None]:
    """Parameters of the same shapes. What is clipped is set back by its factor, which costs nothing that is counted."""
    weights = [p.detach().clone() for p in engine.names]
    masters = [torch.nn.Parameter(w.float()) for w in weights]
    for master, w in zip(masters, weights):
        master.grad = torch.randn_like(w, dtype=torch.float32)
    c, wide = engine.config.optimizer, weights[0].dtype == torch.float32
    optimizer = torch.optim.AdamW(masters, lr=1e-3, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(masters, 1.0 if clipped else 1e9)
        optimizer.step()
        if not wide:
            torch._foreach_copy_(weights, masters)

    return step


def seconds(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for precision in ("fp32", "bf16"):
        engine, compiled = (engine_of(options.width, precision, compiled=way) for way in (False, True))
        count = sum(p.numel() for p in engine.names) / 1e6
        for clipped in (False, True):
            steps = ours(engine, clipped), ours(compiled, clipped), torchs(engine, clipped)
            with torch.no_grad():
                times = [[seconds(step) for step in steps] for _ in range(options.rounds)][1:]
            *mine, theirs = (statistics.median(column) for column in zip(*times))
            told = ", ".join(f"{way} {time * 1e3:.1f} ms (ratio {theirs / time:.2f})" for way, time in zip(("fused", "compiled"), mine))
            print(f"adamw {precision}{' clipped' if clipped else ''}: {count:.0f} M parameters, torch {theirs * 1e3:.1f} ms, ours {told}")
    for kind in ("adam", "sgd", "lion", "lamb", "muon"):
        ways = [ours(engine_of(options.width, "fp32", kind=kind, compiled=way), True) for way in ((False, True) if kind in ELEMENTWISE else (False,))]
        with torch.no_grad():
            times = [statistics.median([seconds(step) for _ in range(5)][1:]) for step in ways]
        print(f"{kind} fp32 clipped: ours {', compiled '.join(f'{time * 1e3:.0f} ms' for time in times)}")
    for narrow in ({"moments": "bf16"}, {"moments": "fp8"}, {"moments": "fp8", "masters": False}):
        step = ours(engine_of(options.width, "bf16", **narrow), True)
        with torch.no_grad():
            print(f"adamw bf16 {narrow} clipped: ours {statistics.median(seconds(step) for _ in range(3)) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
