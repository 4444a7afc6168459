"""Cross entropy whole, split over an axis, and fused with the projection, against torch, float64 and golden values."""

import threading

import pytest
import torch
from torch.nn import functional as F

from mtmegatron.ops.cross_entropy import (
    cross_entropy,
    cross_entropy_reference,
    linear_cross_entropy,
)
from tests.ops.helpers import assert_near, double, each_dtype, gradients, leaf

T, V = 9, 13
LABELS = torch.tensor([0, 12, -100, 5, 6, 7, -100, 3, 5])
# Sums of up to 13 exponentials or logits, and a dozen operations on them.
ROUNDINGS = 24
SHARES = [[13], [7, 6], [1, 4, 8], [4, 4, 4, 1]]
TERMS = [dict(), dict(smoothing=0.1), dict(z_loss=1e-2), dict(smoothing=0.3, z_loss=1e-2)]


class Threads:
    """An axis whose ranks are threads of this process."""

    def __init__(self, size: int):
        self.size, self.slots, self.barrier = size, [None] * size, threading.Barrier(size, timeout=20)

    def run(self, function) -> list:
        """[function(axis of rank, rank) for every rank], together."""
        results = [None] * self.size
        ranks = [Rank(self, r) for r in range(self.size)]

        def work(rank):
            try:
                results[rank] = function(ranks[rank], rank)
            except BaseException as fault:
                results[rank] = fault
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(r,)) for r in range(self.size)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


class Rank:
    def __init__(self, world: Threads, rank: int):
        self.world, self.size, self.rank, self.calls = world, world.size, rank, 0

    def all_reduce(self, tensor, op):
        self.calls += 1
        self.world.slots[self.rank] = tensor.clone()
        self.world.barrier.wait()
        stacked = torch.stack(self.world.slots)
        self.world.barrier.wait()
        tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))


def split_starts(shares):
    return [sum(shares[:i]) for i in range(len(shares))]


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("size", [1, 1000])
@each_dtype
def test_loss_and_gradient_are_float64_torch(terms, size, dtype):
    logits = (size * leaf(T, V, dtype=dtype)).detach().requires_grad_()
    before = logits.detach().clone()
    loss = gradients(lambda z: cross_entropy(z, LABELS, **terms)[0], logits)
    expected = gradients(lambda z: cross_entropy_reference(z, LABELS, **terms)[0], *double(logits))
    assert loss[0].dtype == torch.promote_types(dtype, torch.float32)
    assert_near(loss, expected, ROUNDINGS)
    assert torch.equal(logits, before)  # never changed


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_reference_is_torch(smoothing):
    logits = leaf(T, V)
    loss, lse = cross_entropy_reference(logits, LABELS, smoothing=smoothing)
    expected = F.cross_entropy(logits, LABELS, label_smoothing=smoothing, reduction="none")
    assert_near([loss, lse], [expected, logits.logsumexp(-1)], ROUNDINGS)


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("size", [1, 1000])
def test_uneven_shares_of_the_vocabulary_give_the_loss_of_the_whole(shares, terms, size):
    logits = (size * leaf(T, V)).detach()
    whole = logits.clone().requires_grad_()
    expected, lse = cross_entropy_reference(whole, LABELS, **terms)
    expected.sum().backward()

    def on(axis, rank):
        share = logits.split(shares, 1)[rank].clone().requires_grad_()
        loss, local_lse = cross_entropy(share, LABELS, axis, split_starts(shares)[rank], V, **terms)
        loss.sum().backward()
        return loss.detach(), local_lse, share.grad, axis.calls

    losses, lses, grads, calls = zip(*Threads(len(shares)).run(on))
    for loss, local_lse in zip(losses, lses):
        assert torch.equal(loss, losses[0])  # every rank has the same bits
        assert_near([loss, local_lse], [expected, lse], ROUNDINGS)
    assert_near([torch.cat(grads, 1)], [whole.grad], ROUNDINGS)
    assert set(calls) == {0 if len(shares) == 1 else 2}


def test_golden_losses_of_four_shards():
    logits = torch.arange(8.0).repeat(16, 4)
    labels = torch.arange(0, 32, 2)
    for loss in Threads(4).run(lambda axis, rank: cross_entropy(logits, labels, axis, 32 * rank, 128)[0]):
        assert torch.allclose(loss, torch.tensor([10.2309, 8.2309, 6.2309, 4.2309]).repeat(4), atol=5e-5)


def test_golden_loss_of_whole_logits_and_their_refusal_with_an_axis():
    logits, label = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([3])
    assert cross_entropy(logits, label)[0].item() == pytest.approx(0.4401897, abs=1e-7)
    with pytest.raises(AssertionError, match="whole logits take no axis"):  # not loss + log 2
        cross_entropy(logits, label, Rank(Threads(2), 0), 0, 4)


def test_bf16_logits_give_an_fp32_loss():
    logits = torch.zeros(1, 4, dtype=torch.bfloat16)
    logits[0, 0] = 36.3
    loss, _ = cross_entropy(logits, torch.tensor([1]))
    assert loss.item() == pytest.approx(cross_entropy(logits.float(), torch.tensor([1]))[0].item(), abs=1e-5)
    assert loss.item() == pytest.approx(logits[0, 0].item(), abs=1e-5)


def test_a_logit_of_minus_infinity_is_a_masked_id():
    logits = leaf(3, 5).detach()
    masked = torch.cat((logits, torch.full((3, 2), -torch.inf, dtype=logits.dtype)), 1).requires_grad_()
    loss, lse = cross_entropy(masked, torch.tensor([0, 1, 4]), z_loss=0.1)
    assert_near([loss, lse], list(cross_entropy_reference(logits, torch.tensor([0, 1, 4]), z_loss=0.1)), ROUNDINGS)
    loss.sum().backward()
    assert masked.grad.isfinite().all() and not masked.grad[:, 5:].any()


def test_a_label_outside_the_vocabulary_is_refused():
    for label in (13, -1):
        with pytest.raises(AssertionError, match="outside the vocabulary"):
            cross_entropy(leaf(1, V), torch.tensor([label]))


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_gradcheck(terms):
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z, LABELS, **terms)[0], leaf(T, V))


# the fused projection


def projection(dtype=torch.float64, width=6):
    return leaf(T, width, dtype=dtype), leaf(V, width, dtype=dtype), leaf(V, dtype=dtype)


def by_reference(hidden, weight, bias, scale, **terms):
    return cross_entropy_reference(hidden @ weight.t() + bias, LABELS, **terms)[0].sum() * scale


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
def test_fused_loss_and_all_gradients_are_those_of_the_parts(terms, chunk):
    def fused(h, w, b):
        return linear_cross_entropy(h, w, LABELS, 0.3, bias_V=b, chunk=chunk, **terms)[0]

    actual = gradients(fused, *projection())
    assert_near(actual, gradients(lambda *t: by_reference(*t, 0.3, **terms), *projection()), 4 * ROUNDINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_loss_in_low_precision(dtype):
    scale = torch.tensor(0.25)  # exact in every dtype

    def fused(h, w, b):
        return linear_cross_entropy(h, w, LABELS, scale, bias_V=b, chunk=4)[0]

    loss, *grads = gradients(fused, *projection(dtype))
    expected, *expected_grads = gradients(lambda *t: by_reference(*t, 0.25), *double(*projection(dtype)))
    assert loss.dtype == torch.float32 and all(g.dtype == dtype for g in grads)
    # the logits and their gradient are rounded to dtype, the loss is not
    assert_near([loss.to(dtype), *grads], [expected, *expected_grads], 4 * ROUNDINGS)


def test_sums_for_the_log_leave_out_the_scale_and_tell_the_z_term_apart():
    hidden, weight, _ = projection()
    loss, ce_sum, z_sum = linear_cross_entropy(hidden, weight, LABELS, 0.25, z_loss=0.01, chunk=4)
    logits, valid = hidden @ weight.t(), LABELS != -100
    assert_near([ce_sum], [F.cross_entropy(logits, LABELS, reduction="sum")], ROUNDINGS)
    assert_near([z_sum], [0.01 * (logits.logsumexp(-1) ** 2 * valid).sum()], ROUNDINGS)
    assert_near([loss], [0.25 * (ce_sum + z_sum)], 4)
    assert loss.requires_grad and not ce_sum.requires_grad and not z_sum.requires_grad


def test_accumulate_takes_the_weight_gradient_and_refuses_a_factor():
    hidden, weight, bias = projection()
    dweight, dbias = torch.zeros_like(weight), torch.zeros_like(bias)

    def accumulate(dlogits, chunk):
        dweight.addmm_(dlogits.t(), chunk)
        dbias.add_(dlogits.sum(0))

    def fused(accumulate):
        return linear_cross_entropy(hidden, weight, LABELS, 0.3, accumulate, bias, chunk=4, smoothing=0.1)[0]

    fused(accumulate).backward()
    assert weight.grad is None and bias.grad is None
    expected = torch.autograd.grad(by_reference(hidden, weight, bias, 0.3, smoothing=0.1), (hidden, weight, bias))
    assert_near([hidden.grad, dweight, dbias], expected, 4 * ROUNDINGS)
    with pytest.raises(AssertionError, match="already accumulated"):
        (2 * fused(accumulate)).backward()


def test_chunks_stay_in_the_cache_of_a_cpu_and_fill_another_device():
    chunks = {}
    for device in ("cpu", "meta"):
        hidden, weight = torch.zeros(96, 1, device=device), torch.zeros(2**15, 1, device=device)
        labels = torch.zeros(96, dtype=torch.long, device=device)
        sizes = chunks[device] = []
        linear_cross_entropy(hidden.requires_grad_(), weight, labels, 1.0, lambda dlogits, h, sizes=sizes: sizes.append(dlogits.shape[0]))
    assert chunks == {"cpu": [32, 32, 32], "meta": [96]}


def test_without_autograd_only_the_loss_is_made():
    hidden, weight, _ = projection()
    products = []

    def matmul(a, b):
        products.append((a.shape, b.shape))
        return a @ b

    with torch.no_grad():
        refuse = lambda *_: pytest.fail("a gradient was made")
        loss, *_ = linear_cross_entropy(hidden, weight, LABELS, 1.0, refuse, matmul=matmul)
    assert len(products) == 1 and not loss.requires_grad


def test_all_three_products_go_through_matmul():
    hidden, weight, _ = projection()
    double_matmul = lambda a, b: 2 * (a @ b)
    loss, *_ = linear_cross_entropy(hidden, weight, LABELS, 1.0, chunk=4, matmul=double_matmul)
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    logits = (2 * hidden @ weight.t()).detach().requires_grad_()
    dlogits = torch.autograd.grad(cross_entropy_reference(logits, LABELS)[0].sum(), logits)[0]
    assert_near([dhidden, dweight], [2 * dlogits @ weight, 2 * dlogits.t() @ hidden], 4 * ROUNDINGS)


def test_all_labels_ignored_is_zero_loss_and_zero_gradient():
    hidden, weight, _ = projection()
    ignored = torch.full((T,), -100)
    outs = linear_cross_entropy(hidden, weight, ignored, 0.5, z_loss=0.1, smoothing=0.1)
    outs[0].backward()
    assert not any(t.any() for t in (*outs, hidden.grad, weight.grad))
    assert not gradients(lambda z: cross_entropy(z, ignored)[0], leaf(T, V))[1].any()


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    hidden, weight, _ = projection()
    loss, *_ = linear_cross_entropy(hidden[:tokens], weight, LABELS[:tokens], 1.0)
    loss.backward()
    expected = F.cross_entropy(hidden[:tokens] @ weight.t(), LABELS[:tokens], reduction="sum")
    assert_near([loss], [expected], 4 * ROUNDINGS)


@pytest.mark.parametrize("shares", SHARES[1:], ids=str)
def test_fused_over_shares_of_the_vocabulary(shares):
    hidden, weight, bias = projection()
    loss = by_reference(hidden, weight, bias, 0.3, smoothing=0.1, z_loss=0.01)
    expected = torch.autograd.grad(loss, (hidden, weight, bias))

    def on(axis, rank):
        parts = hidden, weight.split(shares)[rank], bias.split(shares)[rank]
        h, w, b = (t.detach().clone().requires_grad_() for t in parts)
        start = split_starts(shares)[rank]
        out, *_ = linear_cross_entropy(h, w, LABELS, 0.3, None, b, axis, start, V, smoothing=0.1, z_loss=0.01, chunk=4)
        return out.detach(), *torch.autograd.grad(out, (h, w, b))

    outs, *grads = zip(*Threads(len(shares)).run(on))
    assert all(torch.equal(out, outs[0]) for out in outs)
    joined = sum(grads[0]), torch.cat(grads[1]), torch.cat(grads[2])
    assert_near([outs[0], *joined], [loss, *expected], 4 * ROUNDINGS)
