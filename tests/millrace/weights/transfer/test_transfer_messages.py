"""Regions are cut along rows, and a row only if no bucket holds it."""

from collections.abc import Iterator

from millrace.weights.transfer.layout import Region, TensorSpec, volume
from millrace.weights.transfer.messages import pack

_SPEC = TensorSpec("a", "float32", (10, 4))
"""16 bytes a row."""


def _sized(spec: TensorSpec, *regions: Region) -> Iterator[tuple[TensorSpec, Region, int]]:
    return ((spec, region, volume(region) * spec.itemsize) for region in regions)


def _regions(bucket_bytes: int, *regions: Region) -> list[list[Region]]:
    packed = pack(_sized(_SPEC, *regions), bucket_bytes)
    return [[one.region for one in slices] for slices, _, _ in packed]


def test_a_message_is_filled_with_whole_rows() -> None:
    assert _regions(40, ((0, 5), (0, 4))) == [[((0, 2), (0, 4))], [((2, 4), (0, 4))], [((4, 5), (0, 4))]]


def test_small_regions_travel_together() -> None:
    assert _regions(64, ((0, 1), (0, 1)), ((1, 2), (0, 1)), ((2, 3), (0, 4))) == [
        [((0, 1), (0, 1)), ((1, 2), (0, 1)), ((2, 3), (0, 4))]
    ]


def test_the_rest_of_a_message_holds_the_first_rows_of_the_next_region() -> None:
    assert _regions(48, ((0, 2), (0, 4)), ((5, 8), (0, 4))) == [
        [((0, 2), (0, 4)), ((5, 6), (0, 4))],
        [((6, 8), (0, 4))],
    ]


def test_large_regions_come_first_and_alone_if_that_is_asked_for() -> None:
    regions: list[Region] = [((0, 1), (0, 4)), ((1, 7), (0, 4)), ((7, 8), (0, 4))]
    packed = pack(_sized(_SPEC, *regions), 80, alone_bytes=32)
    assert [[one.region for one in slices] for slices, _, _ in packed] == [
        [((1, 6), (0, 4))],
        [((6, 7), (0, 4))],
        [regions[0], regions[2]],
    ]


def test_a_row_larger_than_a_bucket_is_cut() -> None:
    spec = TensorSpec("a", "float32", (2, 6))
    packed = pack(_sized(spec, ((0, 2), (0, 6))), 16)
    assert [[one.region for one in slices] for slices, _, _ in packed] == [
        [((0, 1), (0, 4))],
        [((0, 1), (4, 6))],
        [((1, 2), (0, 4))],
        [((1, 2), (4, 6))],
    ]


def test_a_slice_begins_at_a_multiple_of_sixteen_bytes() -> None:
    ((slices, nbytes, payload),) = pack(_sized(_SPEC, ((0, 1), (0, 1)), ((1, 2), (0, 2))), 64)
    assert ([one.offset for one in slices], nbytes, payload) == ([0, 16], 24, 12)
