"""Collectives against golden values: four tensor ranks and two stages on eight processes, each holding its rank."""

import pytest
import torch

from mtmegatron.layout import Layout
from mtmegatron.mesh import EXPERTS, GROUPS, SMALL, Mesh
from mtmegatron.parallel.tensor import copy, gather_tokens, reduce, scatter_sum

GRID = Layout(tensor=4, pipeline=2)


def golden_rank(rank, world):
    """What each collective gives on the tensor axis when the input is the rank, and the backward of each move."""
    axis = Mesh(GRID, rank, connect=True)["tensor"]
    mine = torch.full((2, 3), float(rank))
    rows = torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 3).contiguous()
    found = {
        "sum": axis.all_reduce(mine.clone()),
        "max": axis.all_reduce(mine.clone(), "max"),
        "min": axis.all_reduce(mine.clone(), "min"),
        "gather": axis.all_gather(mine),
        "scatter": axis.reduce_scatter(rows),
        "integers": axis.all_reduce(torch.tensor([rank, 2**40])),
        "later": axis.start_all_reduce(mine.clone()).wait(),
    }
    for move in (copy, reduce, gather_tokens, scatter_sum):
        x = (rows if move is scatter_sum else mine).clone().requires_grad_()
        y = move(x, axis)
        y.backward(torch.full_like(y, float(rank + 1)))
        found[move.__name__] = y.detach()
        found[f"{move.__name__} backward"] = x.grad
    return {key: value.tolist() for key, value in found.items()}


def test_golden_values_of_the_tensor_axis(pool):
    for rank, found in enumerate(pool.run(golden_rank, 8)):
        first, place = rank // 4 * 4, rank % 4
        total, gathered = (6.0, 22.0)[rank // 4], [[float(r)] * 3 for r in range(first, first + 4) for _ in range(2)]
        assert found["sum"] == found["later"] == found["reduce"] == [[total] * 3] * 2
        assert found["max"] == [[first + 3.0] * 3] * 2 and found["min"] == [[float(first)] * 3] * 2
        assert found["integers"] == [total, 4 * 2**40]
        assert found["gather"] == found["gather_tokens"] == gathered
        assert found["scatter"] == found["scatter_sum"] == [[4.0 * place] * 3] * 2
        assert found["copy"] == [[float(rank)] * 3] * 2
        # backward: the sum of all ranks' gradients for copy and gather, the own one for reduce, all of them for scatter
        assert found["copy backward"] == found["gather_tokens backward"] == [[total + 4] * 3] * 2
        assert found["reduce backward"] == [[rank + 1.0] * 3] * 2
        assert found["scatter_sum backward"] == [[row[0] + 1] * 3 for row in gathered]


def sums_rank(rank, world, sizes):
    """For each size: whether a whole sum, one in pieces, one begun early and a reduce-scatter agree."""
    axis = Mesh(Layout(data=world), rank, connect=True)["data"]
    x = torch.randn(max(sizes), generator=torch.Generator().manual_seed(rank))
    pieces = torch.cat([axis.all_reduce(piece.clone()) for piece in x.split(999)])
    results = []
    for size in sizes:
        whole, later = axis.all_reduce(x[:size].clone()), axis.start_all_reduce(x[:size].clone()).wait()
        results.append(torch.equal(whole, pieces[:size]) and torch.equal(later, whole))
        if size % world == 0:
            part = axis.reduce_scatter(x[:size].clone())
            results.append(torch.equal(part, whole.chunk(world)[axis.rank]))
    return results, pieces.numpy().tobytes()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_sum_has_the_same_bits_however_it_is_packed_and_on_every_rank(world, pool):
    sizes = [1, 12, SMALL - 1, SMALL, SMALL + 1, 12 * (SMALL // 12 + 1), 3 * SMALL]
    ranks = pool.run(sums_rank, world, sizes)
    assert all(all(results) for results, _ in ranks)
    assert len({data for _, data in ranks}) == 1


def rounding_rank(rank, world, dtype):
    axis = Mesh(Layout(data=world), rank, connect=True)["data"]
    value = 1.0 if rank == 0 else 2.0**-9
    small, large = torch.full((4,), value, dtype=dtype), torch.full((2 * SMALL,), value, dtype=dtype)
    return [
        axis.all_reduce(small.clone()).unique().tolist(),
        axis.all_reduce(large.clone()).unique().tolist(),
        axis.reduce_scatter(large).unique().tolist(),
    ]


def test_16_bit_sums_are_rounded_once(pool):
    # 1 + 3 x 2^-9 lies nearer to 1 + 2^-7 than to 1; rounded after each addition it would stay 1
    assert pool.run(rounding_rank, 4, torch.bfloat16) == [[[1 + 2.0**-7]] * 3] * 4
    assert pool.run(rounding_rank, 4, torch.float64) == [[[1 + 3 * 2.0**-9]] * 3] * 4


def views_rank(rank, world):
    axis = Mesh(Layout(data=world), rank, connect=True)["data"]
    view = torch.ones(4, 2).t()
    lost = []
    for size in (view, torch.ones(SMALL, 2).t()):
        try:
            axis.all_reduce(size)
        except AssertionError as error:
            lost.append(str(error))
    return lost, axis.all_gather(view).shape, axis.reduce_scatter(view).tolist()


def test_a_sum_into_a_view_is_refused_and_other_inputs_may_be_views(pool):
    for lost, gathered, scattered in pool.run(views_rank, 2):
        assert lost == ["an all-reduce of a view would be lost"] * 2
        assert gathered == (4, 4) and scattered == [[2.0] * 4]


def test_an_axis_of_one_returns_its_input():
    axis, x = Mesh(Layout())["tensor"], torch.randn(4, 3)
    assert axis.all_reduce(x) is x and axis.all_gather(x) is x and axis.reduce_scatter(x) is x
    assert axis.start_all_reduce(x).wait() is x and axis.start_reduce_scatter(x).wait() is x
    out = torch.empty_like(x)
    assert axis.all_gather(x, out=out) is out and torch.equal(out, x)
    assert copy(x, axis) is reduce(x, axis) is gather_tokens(x, axis) is scatter_sum(x, axis) is x


@pytest.mark.parametrize(
    "layout", [Layout(tensor=2, data=2, pipeline=3), Layout(tensor=4, data=2, key_value=2), Layout(pipeline=4), Layout(data=4, tensor=2, expert=2)]
)
def test_a_mesh_without_processes_knows_the_place_of_any_rank(layout):
    for rank in range(layout.world):
        mesh = Mesh(layout, rank)
        for names in GROUPS:
            axis = mesh[names]
            if "ends" in names and mesh.coordinate("pipeline") not in (0, layout.pipeline - 1) or names in EXPERTS and not layout.expert:
                assert axis.ranks == (rank,)
            else:
                assert axis.ranks == layout.group(rank, names)
            assert axis.ranks[axis.rank] == rank and axis.size == len(axis.ranks) and axis.group is None
        assert mesh.world.size == layout.world


def groups_rank(rank, world, layout):
    """Names of the process groups, by the ranks of their axes."""
    mesh = Mesh(layout, rank, connect=True)
    return [(mesh[names].ranks, id(mesh[names].group)) for names in GROUPS if mesh[names].size > 1]


@pytest.mark.parametrize("layout", [Layout(tensor=2, data=2), Layout(tensor=2, pipeline=2), Layout(data=4)])
def test_axes_of_the_same_ranks_share_one_group(layout, pool):
    for axes in pool.run(groups_rank, 4, layout):
        assert len({ranks for ranks, _ in axes}) == len({group for _, group in axes}) == len(set(axes))
