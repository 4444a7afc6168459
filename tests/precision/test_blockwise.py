"""The Triton product of blocks, in Triton's interpreter on a CPU: a process of its own, since Triton decides at its import."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CODE = """
import torch
from mtmegatron.precision.blockwise import blockwise_product, fits
from mtmegatron.precision.multiply import multiply, multiplies
from mtmegatron.precision.quantise import Cut, Grid, amax, quantise, scale_of

torch.manual_seed(0)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
for (m, n, k), kind in (((32, 128, 256), E4M3), ((31, 20, 300), E4M3), ((33, 200, 128), E5M2)):
    operands = []
    for size, rows, dtype in ((m, 1, kind), (n, 128, E4M3)):
        x = torch.randn(size, k).exp()
        grid = Grid(Cut.of(size, rows), Cut.of(k, 128))
        operands.append(quantise(x, grid, scale_of(amax(x, grid), dtype), dtype))
    assert fits(*operands) and multiplies(*operands, hardware=True)
    found, right = blockwise_product(*operands, (16, 64)), multiply(*operands, torch.float64, hardware=False)
    size = multiply(*(type(q)(q.codes.float().abs().to(q.codes.dtype), q.scale, q.grid) for q in operands), torch.float64, hardware=False)
    assert bool(((found.double() - right).abs() <= 2 * k * torch.finfo(torch.float32).eps * size).all()), (m, n, k)
shifted = Grid(Cut.of(n, 128), Cut.of(k, 128, 64))
assert not fits(operands[0], type(operands[1])(operands[1].codes, operands[1].scale, shifted))
print("good")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_gives_the_product_of_the_values():
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    child = subprocess.run([sys.executable, "-c", CODE], env=environment, cwd=root, capture_output=True, text=True, timeout=170)
    assert child.stdout.strip() == "good", child.stderr
