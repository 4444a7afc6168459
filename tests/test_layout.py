"""Ranks and groups against numpy: the grid is `arange(world)` in shape pipeline x data x context x tensor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.layout import Layout, share

AXES = ("pipeline", "data", "context", "tensor")
degrees = st.tuples(*(st.integers(1, 5) for _ in AXES))


def made(shape: tuple[int, ...], **more) -> Layout:
    return Layout(**dict(zip(AXES, shape)), **more)


@given(shape=degrees, moved=st.sets(st.sampled_from(AXES)))
@settings(max_examples=150, deadline=None)
def test_coordinates_and_groups_are_those_of_the_grid(shape, moved):
    layout, grid = made(shape), np.arange(np.prod(shape)).reshape(shape)
    assert layout.world == grid.size and layout.stage == grid[0].size
    order = [i for i, axis in enumerate(AXES) if axis not in moved] + [
        i for i, axis in enumerate(AXES) if axis in moved
    ]
    count = int(np.prod([n for axis, n in zip(AXES, shape) if axis in moved]))
    groups = {tuple(sorted(row.tolist())) for row in grid.transpose(order).reshape(-1, count)}
    assert {layout.group(rank, tuple(moved)) for rank in range(layout.world)} == groups
    assert layout.size(tuple(moved)) == count
    for rank in range(layout.world):
        place = tuple(layout.coordinate(rank, axis) for axis in AXES)
        assert grid[place] == rank and rank in layout.group(rank, tuple(moved))


def test_golden_groups_of_eight_ranks():
    layout = Layout(tensor=2, pipeline=4)
    assert [layout.group(rank, "tensor") for rank in (0, 3, 6)] == [(0, 1), (2, 3), (6, 7)]
    assert layout.group(0, "pipeline") == (0, 2, 4, 6) and layout.group(1, "pipeline") == (1, 3, 5, 7)
    assert [layout.group(rank, "pipeline")[(layout.coordinate(rank, "pipeline") + 1) % 4] for rank in range(8)] == [
        (r + 2) % 8 for r in range(8)
    ]
    layout = Layout(tensor=4, pipeline=2)
    assert layout.group(5, "tensor") == (4, 5, 6, 7) and layout.group(5, "pipeline") == (1, 5)
    layout = Layout(tensor=2, data=2, pipeline=2)
    assert layout.group(1, "data") == (1, 3) and layout.group(1, ("data", "tensor")) == (0, 1, 2, 3)


@pytest.mark.parametrize("shape", [(12, 16, 7, 8), (16, 84, 1, 8), (1, 10752, 1, 1)])
def test_thousands_of_ranks(shape):
    layout = made(shape)
    assert layout.world == 10752
    for axis in AXES:
        covered: set[int] = set()
        for rank in range(layout.world):
            if rank not in covered:
                group = layout.group(rank, axis)
                assert covered.isdisjoint(group) and layout.group(group[-1], axis) == group
                covered.update(group)


@given(
    parts=st.sampled_from([1, 2, 4, 8]),
    copies=st.sampled_from([1, 2, 4]),
    data=st.integers(1, 3),
    pipeline=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_key_value_heads_cut_the_tensor_axis_in_two(parts, copies, data, pipeline):
    layout = Layout(tensor=parts * copies, data=data, pipeline=pipeline, key_value=parts)
    assert layout.size("key_value") == parts and layout.size("key_value_copies") == copies
    for rank in range(layout.world):
        part, copy = layout.coordinate(rank, "key_value"), layout.coordinate(rank, "key_value_copies")
        assert layout.coordinate(rank, "tensor") == part * copies + copy
        assert layout.group(rank, ("key_value", "key_value_copies")) == layout.group(rank, "tensor")
        # neighbours share a head: the query heads of `copies` tensor ranks in a row use one key/value part
        assert {layout.coordinate(r, "key_value") for r in layout.group(rank, "key_value_copies")} == {part}


@given(shape=degrees)
@settings(max_examples=60, deadline=None)
def test_ends_join_the_first_and_the_last_stage(shape):
    layout = made(shape)
    for rank in range(layout.stage):
        last = rank + layout.stage * (layout.pipeline - 1)
        assert layout.group(rank, "ends") == layout.group(last, "ends") == tuple(sorted({rank, last}))


@given(total=st.integers(0, 10_000), parts=st.integers(1, 300))
@settings(max_examples=150, deadline=None)
def test_shares_tile_the_whole_and_differ_by_at_most_one(total, parts):
    pieces = [share(total, parts, i) for i in range(parts)]
    sizes = [size for _, size in pieces]
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert [start for start, _ in pieces] == [sum(sizes[:i]) for i in range(parts)]


def test_a_layout_describes_itself_as_a_user_writes_it():
    assert Layout().describe() == "serial"
    assert Layout(tensor=2, pipeline=3, data=4, sequence=True).describe() == "tensor=2,pipeline=3,data=4"
