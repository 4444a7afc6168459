"""Operators on a device that is not the CPU: the meta device runs shapes and types of the same code, without values."""

import pytest
import torch

from mtmegatron.batch import Bounds
from mtmegatron.ops.activation import ACTIVATIONS
from mtmegatron.ops.attention import attention, attention_backward, attention_cached, attention_forward
from mtmegatron.ops.cross_entropy import cross_entropy, linear_cross_entropy
from mtmegatron.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from mtmegatron.ops.rope import rope

T, D = 6, 8
LABELS = torch.zeros(T, dtype=torch.int64, device="meta")


def leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


FUNCTIONS = {
    "rms norm": (lambda x, w: rms_norm(x, w, 1e-6), [(T, D), (D,)]),
    "residual": (lambda x, d, w: add_rms_norm(x, d, w, 1e-6)[1], [(T, D), (T, D), (D,)]),
    "layer norm": (lambda x, w, b: layer_norm(x, w, b, 1e-6), [(T, D), (D,), (D,)]),
    "residual layer norm": (lambda x, d, w: add_layer_norm(x, d, w, None, 1e-6)[1], [(T, D), (T, D), (D,)]),
    "rope": (lambda x, c: rope(x, c, c), [(T, 2, D), (T, D // 2)]),
    "rope pairs": (lambda x, c: rope(x, c, c, interleaved=True), [(T, 2, D), (T, D // 2)]),
    "attention": (lambda q, k, v: attention(q, k, v, Bounds.equal(2, 3)), [(T, 4, D), (T, 2, D), (T, 2, D)]),
    "documents": (lambda q, k, v: attention(q, k, v, Bounds((0, 1, 6))), [(T, 4, D), (T, 4, D), (T, 4, D)]),
    "cross entropy": (lambda z: cross_entropy(z, LABELS, smoothing=0.1, z_loss=0.1)[0], [(T, D)]),
    "projection": (lambda h, w: linear_cross_entropy(h, w, LABELS, 0.5, chunk=4)[0], [(T, D), (9, D)]),
} | {name: (function, [(T, D)]) for name, (function, _) in ACTIVATIONS.items()}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_run_and_keep_shapes_types_and_device(name, dtype):
    function, shapes = FUNCTIONS[name]
    inputs = [leaf(*shape, dtype=dtype) for shape in shapes]
    out = function(*inputs)
    grads = torch.autograd.grad(out.sum(), inputs, allow_unused=name.startswith("rope"))
    assert out.device.type == "meta" and len(grads) == len(shapes)
    for grad, x in zip(grads, inputs):
        assert grad is None or (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, x.device)


def test_attention_on_blocks_and_caches_runs():
    query, key = leaf(1, 3, 4, D, dtype=torch.bfloat16), leaf(1, 5, 2, D, dtype=torch.bfloat16)
    with torch.no_grad():
        out, lse = attention_forward(query, key, key, False)
        grads = attention_backward(out, query, key, key, out, lse, False)
        assert out.shape == query.shape and lse.shape == query.shape[:3] and lse.dtype == torch.float32
        assert [g.shape for g in grads] == [query.shape, key.shape, key.shape]
        assert attention_cached(query[0], key[0], key[0], [1, 2], [2, 3]).shape == query.shape[1:]
