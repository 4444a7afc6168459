"""Geometry of rectangles, against index sets counted one by one."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.checkpoint.rectangle import Box, Rectangle, flat_rectangles, tiling_fault

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@settings(deadline=None)
@given(shapes, st.data())
def test_flat_rectangles_hold_exactly_the_flat_range_in_order(shape, data):
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = flat_rectangles(shape, start, stop)
    index = torch.arange(total).reshape(shape)
    found = [i for box in boxes for i in index[box.slices((0,) * len(shape))].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_flat_rectangles_of_a_matrix():
    assert flat_rectangles((4, 10), 7, 33) == [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 3))]
    assert flat_rectangles((4, 10), 0, 40) == [((0, 0), (4, 10))]
    assert flat_rectangles((4, 10), 12, 15) == [((1, 2), (1, 3))]
    assert flat_rectangles((4, 10), 5, 5) == []
    assert flat_rectangles((), 0, 1) == [((), ())]
    assert flat_rectangles((0, 3), 0, 0) == []


@settings(deadline=None)
@given(shapes, st.data())
def test_tiling_fault_agrees_with_counting(shape, data):
    total = prod(shape)
    bounds = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
    boxes = [box for start, stop in zip(bounds, bounds[1:]) for box in flat_rectangles(shape, start, stop)]
    assert tiling_fault(shape, boxes) == ""
    victim = data.draw(st.integers(0, len(boxes) - 1))
    assert "hole" in tiling_fault(shape, boxes[:victim] + boxes[victim + 1 :])
    assert "overlap" in tiling_fault(shape, [*boxes, boxes[victim]])


def test_tiling_that_no_straight_cut_divides():
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert tiling_fault((3, 3), pinwheel) == ""
    assert tiling_fault((3, 3), pinwheel[:-1]) == "hole at (1, 1)"
    same_volume = [*pinwheel[:-1], Box((0, 0), (1, 1))]
    assert tiling_fault((3, 3), same_volume) == "overlap at (0, 0)"


def test_tiling_of_an_empty_tensor_and_of_a_scalar():
    assert tiling_fault((0, 3), [Box((0, 0), (0, 3))]) == ""
    assert tiling_fault((0, 3), []) == "0 rectangles for an empty tensor"
    assert tiling_fault((), [Box((), ())]) == ""
    assert tiling_fault((), []) == "hole at ()"


def test_rectangles_outside_their_tensor_are_our_own_fault():
    for offset, size in (((0, 3), (1, 2)), ((-1, 0), (1, 1)), ((0,), (1,)), ((1, 1), (0, 2))):
        with pytest.raises(AssertionError):
            Rectangle("w", (2, 4), "float32", offset, size)
    with pytest.raises(AssertionError):
        Rectangle("w", (2,), "complex64", (0,), (2,))


def test_key_is_the_name_where_the_rectangle_is_all_of_the_tensor():
    assert Rectangle.whole("w", torch.zeros(2, 3)).key == "w"
    assert Rectangle("w", (2, 3), "float32", (1, 0), (1, 3)).key == "w@1,0"
