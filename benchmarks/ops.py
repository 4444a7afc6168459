"""Speed of the operators beside the plain PyTorch way, medians on one thread: `python -m benchmarks.ops`.

Notable: the two sides of a row alternate inside one run and the table gives their ratio, so that a busy machine slows
both.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mtmegatron.batch import Bounds
from mtmegatron.ops.activation import ACTIVATIONS
from mtmegatron.ops.attention import attention
from mtmegatron.ops.cross_entropy import cross_entropy, linear_cross_entropy
from mtmegatron.ops.norm import add_rms_norm, layer_norm, rms_norm
from mtmegatron.ops.rope import rope, rope_table

S, D, N, H, FFN, V = 256, 256, 8, 32, 768, 2048
ROUNDS = 15
Step = Callable[[], object]


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def both(function: Callable[..., Tensor | tuple[Tensor, ...]], *leaves: Tensor) -> Step:
    """Forward and backward, with incoming gradients made once."""
    outs = function(*leaves)
    incoming = [torch.randn_like(o) for o in (outs if isinstance(outs, tuple) else (outs,))]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        outs = function(*leaves)
        torch.autograd.backward(outs, incoming)

    return step


def medians(steps: list[Step]) -> list[float]:
    """Median milliseconds of each step, the steps taking turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS + 1):
        for step, record in zip(steps, times):
            start = time.perf_counter()
            step()
            record.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(record[1:]) for record in times]  # the first round warms up


def norms(tokens: int) -> Iterator[tuple[str, Step, Step]]:
    x, delta, weight, bias = leaf(tokens, D), leaf(tokens, D), leaf(D), leaf(D)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (D,), weight, 1e-6)

    def plain_residual(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return (total := x + delta), plain(total, weight)

    yield "rms norm", both(plain, x, weight), both(lambda x, w: rms_norm(x, w, 1e-6), x, weight)
    fused = both(lambda x, d, w: add_rms_norm(x, d, w, 1e-6), x, delta, weight)
    yield "residual and rms norm", both(plain_residual, x, delta, weight), fused
    own = both(lambda x, w, b: layer_norm(x, w, b, 1e-6), x, weight, bias)
    yield "layer norm", both(lambda x, w, b: F.layer_norm(x, (D,), w, b, 1e-6), x, weight, bias), own


def activations(tokens: int) -> Iterator[tuple[str, Step, Step]]:
    x = leaf(tokens, 2 * FFN)

    def plain(x: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activate(gate) * up

    for name, activate in (("swiglu", F.silu), ("geglu", F.gelu)):
        yield name, both(lambda x, f=activate: plain(x, f), x), both(ACTIVATIONS[name][0], x)
    yield "squared relu", both(lambda x: F.relu(x) ** 2, x), both(ACTIVATIONS["squared_relu"][0], x)


def rotations(tokens: int) -> Iterator[tuple[str, Step, Step]]:
    x = leaf(tokens, 2 * N, H)
    cos, sin = rope_table(torch.arange(tokens) % S, H, 1e4)
    cos2, sin2 = (torch.cat((t, t), -1)[:, None] for t in (cos, sin))

    def plain(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos2 + torch.cat((-second, first), -1) * sin2

    def plain_pairs(x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2))
        a, b = pairs[..., 0], pairs[..., 1]
        c, s = cos[:, None], sin[:, None]
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    yield "rope", both(plain, x), both(lambda x: rope(x, cos, sin), x)
    yield "rope, interleaved", both(plain_pairs, x), both(lambda x: rope(x, cos, sin, interleaved=True), x)


def attentions(tokens: int) -> Iterator[tuple[str, Step, Step]]:
    def plain(*heads: Tensor, length: int) -> Tensor:
        batch = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in heads)
        return F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    for keys, length in ((N, S), (2, S), (N, 512), (N, 64)):
        heads = leaf(tokens, N, H), leaf(tokens, keys, H), leaf(tokens, keys, H)
        bounds = Bounds.equal(tokens // length, length)
        before = both(lambda *t, n=length: plain(*t, length=n), *heads)
        after = both(lambda *t, b=bounds: attention(*t, b), *heads)
        yield f"attention, length {length}, {keys} key heads", before, after


def losses(tokens: int) -> Iterator[tuple[str, Step, Step]]:
    logits, labels = leaf(tokens, V), torch.randint(0, V, (tokens,))
    hidden, weight, buffer = leaf(tokens, D), leaf(V, D), torch.zeros(V, D)

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), labels)

    def accumulate(dlogits: Tensor, hidden: Tensor) -> None:
        buffer.addmm_(dlogits.t(), hidden)

    def fused() -> None:
        linear_cross_entropy(hidden, weight, labels, 1 / tokens, accumulate)[0].backward()

    def plain_step() -> None:
        weight.grad = None
        plain(hidden, weight).backward()

    own = both(lambda z: cross_entropy(z, labels)[0].mean(), logits)
    yield "cross entropy", both(lambda z: F.cross_entropy(z, labels), logits), own
    yield "projection and cross entropy", plain_step, fused


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'forward and backward, fp32, one thread':44} {'plain ms':>9} {'ours ms':>9} {'plain/ours':>11}")
    for tokens in (2048, 512):
        print(f"{tokens} tokens")
        for room in (norms, activations, rotations, attentions, losses):
            for name, plain, ours in room(tokens):
                before, after = medians([plain, ours])
                print(f"  {name:42} {before:9.2f} {after:9.2f} {before / after:11.2f}")


if __name__ == "__main__":
    main()
