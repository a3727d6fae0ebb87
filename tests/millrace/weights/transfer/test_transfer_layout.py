"""A layout says what each rank holds, and survives JSON."""

import json

import pytest

from millrace.weights.transfer.layout import Layout, Region, TensorSpec

SPECS = (TensorSpec("a", "bfloat16", (4, 2)), TensorSpec("b", "float32", ()), TensorSpec("c", "float32", (0, 3)))
HELD: list[dict[str, Region]] = [{"a": ((0, 3), (0, 2)), "b": ()}, {"a": ((3, 4), (1, 2))}, {}]


def test_a_rank_holds_what_was_said() -> None:
    layout = Layout.of(SPECS, HELD)
    assert [layout.held(rank) for rank in range(layout.size)] == HELD
    assert [layout.nbytes(rank) for rank in range(layout.size)] == [3 * 2 * 2 + 4, 2, 0]


def test_a_box_without_elements_is_nothing() -> None:
    assert Layout.of(SPECS, [{"a": ((2, 2), (0, 2)), "c": ((0, 0), (0, 3))}]) == Layout.of(SPECS, [{}])


def test_a_layout_survives_json() -> None:
    layout = Layout.of(SPECS, HELD)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"size": 2}, ValueError),
        ({"divisions": []}, IndexError),
        ({"divisions": [[None, None, [[0, 9], [0, 2]]]] * 3}, ValueError),
        ({"tensors": [["a", "float77", [4, 2], 0]]}, ValueError),
        ({"tensors": [["a", "float32"]]}, ValueError),
        ({"tensors": 3}, TypeError),
    ],
)
def test_json_that_is_no_layout_is_refused(change: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        Layout.from_json(Layout.of(SPECS, HELD).to_json() | change)


def test_tensors_that_are_divided_alike_share_a_division() -> None:
    specs = [TensorSpec(f"{index}", "float32", (4,)) for index in range(3)]
    layout = Layout.of(specs, [{"0": ((0, 2),), "1": ((0, 2),), "2": ((0, 3),)}])
    assert layout.divisions[0] is layout.divisions[1]
    assert layout.divisions[0] != layout.divisions[2]


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        ({"x": ((0, 1),)}, "rank 0 holds x, which is not in the layout"),
        ({"a": ((0, 4),)}, r"not a box of a \[4, 2\]"),
        ({"a": ((0, 5), (0, 2))}, r"not a box of a \[4, 2\]"),
        ({"a": ((-1, 2), (0, 2))}, r"not a box of a \[4, 2\]"),
        ({"a": ((3, 2), (0, 2))}, r"not a box of a \[4, 2\]"),
    ],
)
def test_a_box_outside_its_tensor_is_refused(held: dict[str, Region], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Layout.of(SPECS, [held])


def test_a_tensor_is_named_once() -> None:
    with pytest.raises(ValueError, match="two tensors of the same name"):
        Layout.of([SPECS[0], SPECS[0]], [{}])
