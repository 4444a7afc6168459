"""TFLOP/s of our linear layer on an accelerator in bf16 and each fp8 recipe, and the step of a Llama-8B-shaped block. Under 5 minutes.

    python -m benchmarks.gpu
"""

import time
from collections.abc import Callable

import torch

from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.load import validate
from mtmegatron.device import Device, choose_device
from mtmegatron.layers.build import Build
from mtmegatron.layers.linear import Linear
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.precision.fp8 import Fp8
from mtmegatron.precision.gemm import Gemm
from mtmegatron.precision.recipes import PREFIX, RECIPES
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import batches

CURRENT = [name for name, recipe in RECIPES.items() if not recipe.delayed]


def seconds(device: Device, work: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(5):
        work()
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    device.synchronize()
    return (time.perf_counter() - begin) / repeats


def linear(device: Device, size: int, recipe: str | None) -> tuple[float, float]:
    """TFLOP/s of forward, and of forward and backward, of [size, size] x [size, size] with quantisation in it."""
    mesh = Mesh(Layout(), 0, device.torch_device)
    with torch.device(device.torch_device):
        layer = Linear(size, size, Build(mesh, torch.bfloat16, Gemm(True, device.mixed_products)), split=None, bias=False, std=0.02)
    torch.nn.init.normal_(layer.weight, std=0.02)
    if recipe:
        layer.multiply_in_fp8(Fp8(RECIPES[recipe], "e4m3", mesh.layout, 0, device.native_fp8))
    x = torch.randn(size, size, dtype=torch.bfloat16, device=device.torch_device, requires_grad=True)
    dy = torch.randn_like(x)
    forward = seconds(device, lambda: layer(x))
    both = seconds(device, lambda: layer(x).backward(dy))
    return 2 * size**3 / forward / 1e12, 6 * size**3 / both / 1e12


def block(device: Device, precision: str) -> float:
    """Seconds of a training step of 8192 tokens through one block as Llama 3 8B has 32 of."""
    fp8 = {"fp8": {"high_precision": []}} if precision.startswith(PREFIX) else {}
    tree = {
        "device": device.type,
        "model": {"layers": 1, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000, "rope_base": 500000.0},
        "data": {"sequence": 4096}, "train": {"global_batch": 2, "micro_batch": 2, "precision": precision, **fp8},
    }  # fmt: skip
    config = check(validate(tree, "benchmark"), 1)
    engine = Engine(config, Mesh(layout_of(config), 0, device.torch_device, ordered_sum=False), device.native_bf16_matmul, device=device)
    mine = batches(engine, 0)
    return seconds(device, lambda: engine.step(mine, 0), 5)


def main() -> None:
    device = choose_device("auto")
    device.set_current()
    print(f"{device.name}, torch {torch.__version__}; TFLOP/s of forward, and of forward with backward")
    sizes = (4096, 8192) if device.type != "cpu" else (512,)
    for size in sizes:
        for name, recipe in (("bf16", None), *((PREFIX + r, r) for r in CURRENT)):
            forward, both = linear(device, size, recipe)
            print(f"{size:>6} {name:<16} {forward:>8.1f} {both:>8.1f}", flush=True)
    if device.type == "cpu":
        return print("the block is for an accelerator")
    for name in ("bf16", *(PREFIX + r for r in CURRENT)):
        print(f"block  {name:<16} {block(device, name) * 1e3:>8.1f} ms a step of 8192 tokens", flush=True)


if __name__ == "__main__":
    main()
