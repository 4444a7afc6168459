"""Dispatchers: on 1, 2 and 4 ranks each token gets what its experts make of it, and each gradient is that of one process."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.parallel.expert import Experts, allgather, alltoall
from mtmegatron.placement import Init, Placement

WIDTH, FFN, TOKENS, CHOICES = 6, 5, 7, 2
LAYOUTS = [
    Layout(data=2, expert=2), Layout(data=2, expert=1, expert_tensor=2), Layout(data=4, expert=2, expert_tensor=2), Layout(data=4, expert=4),
    Layout(tensor=2, context=2, expert=2), Layout(context=2, data=2, expert=1, expert_tensor=4),
]  # fmt: skip


def choices(case: str, experts: int, rank: int) -> torch.Tensor:
    """Experts of a rank's tokens, [T, k]; `experts`: none."""
    draw = torch.Generator().manual_seed(rank)
    chosen = torch.rand(TOKENS, experts, generator=draw).topk(CHOICES, 1).indices
    if case == "one expert gets all":
        return torch.full_like(chosen, experts - 1)
    if case == "rank 0 sends nothing" and rank == 0:
        return torch.full_like(chosen, experts)
    if case == "all is dropped":
        return torch.full_like(chosen, experts)
    return chosen.masked_fill(torch.rand(chosen.shape, generator=draw) < 0.2, experts)  # some are dropped


def tensors(experts: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, weights) of a rank, and the matrices of all experts: up [E, F, D], down [E, D, F]."""
    draw = torch.Generator().manual_seed(100 + rank)
    x, weights = torch.randn(TOKENS, WIDTH, generator=draw, dtype=torch.float64), torch.rand(TOKENS, CHOICES, generator=draw, dtype=torch.float64)
    draw = torch.Generator().manual_seed(7)
    shapes = (experts, FFN, WIDTH), (experts, WIDTH, FFN)
    return x.requires_grad_(), weights.requires_grad_(), *(torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes)


def expert(x, up, down):
    return torch.tanh(x @ up.t()) @ down.t()


def each(up, down, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([expert(r, up[e], down[e]) for e, r in enumerate(rows.split(counts))])


def serial(case: str, experts: int, rank: int) -> list[torch.Tensor]:
    """A rank's outputs, and what its tokens alone give as gradients of x, weights and all matrices."""
    x, weights, up, down = tensors(experts, rank)
    chosen, y = choices(case, experts, rank), torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    for e in range(experts):
        factor = (weights * (chosen == e)).sum(1, keepdim=True)
        y = y + factor * expert(x, up[e], down[e])
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), (x, weights, up, down))]


def rank_of(rank: int, world: int, layout: Layout, how: dict, experts: int, cases: list[str]) -> list:
    """For each case: the outputs, the gradients of x and weights, and those of this rank's part of the matrices."""
    mesh, found = Mesh(layout, rank, connect=world > 1), []
    split = ((0, "expert"), (1, "expert_tensor")), ((0, "expert"), (2, "expert_tensor"))
    dispatch = allgather if how.get("dispatcher") == "allgather" else alltoall
    more = {"parts": how["parts"]} if "parts" in how else {}
    for case in cases:
        x, weights, *matrices = tensors(experts, rank)
        places = [Placement(tuple(m.shape), Init(), True, s, ("expert_data",)) for m, s in zip(matrices, split)]
        up, down = (place.part(m.detach(), layout, rank).clone().requires_grad_() for place, m in zip(places, matrices))
        ran: list[int] = []
        y = dispatch(x, weights, choices(case, experts, rank), Experts(mesh, experts), partial(each, up, down), partial(ran.append, 1), **more)
        assert ran == [1], "what runs while tokens travel runs once"
        found.append([y.detach(), *torch.autograd.grad(y.sin().sum(), (x, weights, up, down))])
    return found


CASES = ["some are dropped", "one expert gets all", "rank 0 sends nothing", "all is dropped"]
HOW = [{"parts": 1}, {"parts": 3}, {"dispatcher": "allgather"}]


@pytest.mark.parametrize("experts", [4, 5])
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_outputs_and_gradients_are_those_of_one_process(layout, how, experts, pool):
    ranks = pool.run(rank_of, layout.world, layout, how, experts, CASES)
    for number, case in enumerate(CASES):
        right = [serial(case, experts, rank) for rank in range(layout.world)]
        totals = [sum(answers[i] for answers in right) for i in (3, 4)]
        for rank in range(layout.world):
            y, dx, dweights, *_ = ranks[rank][number]
            for got, expected in zip((y, dx, dweights), right[rank]):
                torch.testing.assert_close(got, expected)
            # the gradients of a part add up over the ranks that hold it
            held = layout.group(rank, "expert_data")
            for i, (total, dim) in enumerate(zip(totals, (1, 2))):
                place = Placement(tuple(total.shape), Init(), True, ((0, "expert"), (dim, "expert_tensor")), ("expert_data",))
                torch.testing.assert_close(sum(ranks[r][number][3 + i] for r in held), place.part(total, layout, rank))


@given(experts=st.integers(1, 6), parts=st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_one_rank_in_any_number_of_parts(experts, parts):
    if experts < CHOICES:
        return
    (found,) = rank_of(0, 1, Layout(expert=1), {"parts": parts}, experts, [CASES[0]])
    for got, expected in zip(found, serial(CASES[0], experts, 0)):
        torch.testing.assert_close(got, expected)


def twice(rank: int, world: int, layout: Layout, how: dict) -> bool:
    first, second = (rank_of(rank, world, layout, how, 4, CASES) for _ in range(2))
    return all(torch.equal(a, b) for x, y in zip(first, second) for a, b in zip(x, y))


@pytest.mark.parametrize("how", HOW, ids=str)
def test_the_same_bits_every_time(how, pool):
    assert all(pool.run(twice, 4, LAYOUTS[2], how))


def rows_rank(rank: int, world: int, shared: bool, dtype: torch.dtype) -> list:
    """Rank r sends r * place rows, each with its own value, to each place; from some to some there are none."""
    axis = Mesh(Layout(data=world, expert=world), rank, connect=True, shared=shared)["expert"]
    send, receive = [rank * place for place in range(world)], [place * rank for place in range(world)]
    x = torch.arange(sum(send), dtype=dtype)[:, None].repeat(1, 2) + 100 * rank
    begun = [axis.start_all_to_all_rows(x, send, receive) for _ in range(2)]  # two on their way at one time
    gathered = axis.all_gather(torch.ones(1))
    results = [pending.wait().tolist() for pending in begun]
    assert results[0] == results[1] and gathered.sum() == world
    return results[0]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_rows_of_any_number_arrive_in_rank_order(shared, dtype, pool):
    world = 3
    for rank, rows in enumerate(pool.run(rows_rank, world, shared, dtype)):
        expected = []
        for source in range(world):
            start = sum(source * place for place in range(rank))
            expected += [[float(torch.tensor(start + i + 100 * source, dtype=dtype))] * 2 for i in range(source * rank)]
        assert rows == expected


def test_the_second_view_of_a_stage_has_each_rank_once():
    layout = Layout(tensor=2, context=2, data=3, pipeline=2, expert=3, expert_tensor=2)
    for rank in range(layout.world):
        ranks = {axis: set(layout.group(rank, axis)) for axis in ("expert_tensor", "expert", "expert_data")}
        assert [len(ranks[axis]) for axis in ranks] == [2, 3, 2] and set.intersection(*ranks.values()) == {rank}
        assert set(layout.group(rank, ("expert_tensor", "expert", "expert_data"))) == set(layout.group(rank, ("tensor", "context", "data")))
    assert Placement((4, 4), Init(), True, ((0, "expert"),), ("expert_data",)).copies == ()
