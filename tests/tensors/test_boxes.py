from hypothesis import given
from hypothesis import strategies as st

from slipstream.tensors.boxes import (
    exact_cover,
    full_box,
    intersect,
    is_inside,
    shape_of,
    shift,
    split,
    unshift,
    volume,
)


def test_intersect_shift_and_unshift():
    assert intersect(((0, 4), (2, 8)), ((2, 6), (0, 3))) == ((2, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 8),)) is None
    assert intersect((), ()) == ()
    assert shift(((6, 8),), ((4, 8),)) == ((2, 4),)
    assert unshift(((2, 4),), ((4, 8),)) == ((6, 8),)
    assert shape_of(((2, 5), (0, 7))) == (3, 7) and volume(((2, 5), (0, 7))) == 21 and volume(()) == 1


def test_split_returns_equal_parts_or_the_full_box():
    assert [split(full_box((6, 4)), 0, i, 3) for i in range(3)] == [
        ((0, 2), (0, 4)),
        ((2, 4), (0, 4)),
        ((4, 6), (0, 4)),
    ]
    assert split(full_box((6, 4)), None, 1, 3) == ((0, 6), (0, 4))


def test_is_inside():
    assert is_inside(((0, 3), (1, 2)), (3, 2))
    assert not is_inside(((0, 4), (1, 2)), (3, 2))
    assert not is_inside(((0, 3),), (3, 2))


def test_exact_cover_finds_gaps_overlaps_and_strays():
    frame = full_box((4, 4))
    assert exact_cover([((0, 2), (0, 4)), ((2, 4), (0, 4))], frame) is None
    assert "not written" in exact_cover([((0, 2), (0, 4))], frame)
    assert "overlap" in exact_cover([((0, 3), (0, 4)), ((2, 4), (0, 4))], frame)
    assert "is not inside" in exact_cover([((0, 5), (0, 4))], frame)
    assert exact_cover([()], ()) is None
    assert "2 times" in exact_cover([(), ()], ())


@st.composite
def guillotine(draw):
    """Partition a frame into boxes by random straight cuts."""
    frame = tuple((0, draw(st.integers(1, 9))) for _ in range(draw(st.integers(1, 3))))
    boxes = [frame]
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(frame) - 1))
        start, stop = boxes[index][dim]
        if stop - start < 2:
            continue
        cut = draw(st.integers(start + 1, stop - 1))
        box = boxes.pop(index)
        boxes += [(*box[:dim], (start, cut), *box[dim + 1 :]), (*box[:dim], (cut, stop), *box[dim + 1 :])]
    return frame, draw(st.permutations(boxes))


@given(guillotine(), st.data())
def test_exact_cover_accepts_any_partition_and_refuses_missing_or_repeated_boxes(partition, data):
    frame, boxes = partition
    assert exact_cover(list(boxes), frame) is None
    index = data.draw(st.integers(0, len(boxes) - 1))
    assert exact_cover([b for i, b in enumerate(boxes) if i != index], frame) is not None
    assert exact_cover([*boxes, boxes[index]], frame) is not None
