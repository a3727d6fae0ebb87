"""Names: which run ids are allowed, and where things of a run lie."""

import pytest

from storage import layout
from storage.errors import BadName
from storage.stores.base import checked_path

GOOD_IDS = ["a", "0", "tiny-cpu.2025_01", "-", "a" * 128, "A..b"]
BAD_IDS = ["", ".", "..", ".hidden", "_private", "a/b", "a\\b", "a b", "a\n", "a\0", "é", "a" * 129, "x" * 1_000_000]


def test_other_than_plain_run_ids_are_refused_in_one_printable_line() -> None:
    for run_id in GOOD_IDS:
        assert layout.validate_run_id(run_id) == run_id
    for run_id in BAD_IDS:
        with pytest.raises(BadName) as caught:
            layout.validate_run_id(run_id)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 700


@pytest.mark.parametrize("num_scorers", [1, 2, 3])
def test_each_part_has_one_scorer_and_one_place_in_its_stream(num_scorers: int) -> None:
    streams: list[list[int]] = [[] for _ in range(num_scorers)]
    for part in range(10):
        for scorer, stream in enumerate(streams):
            assert layout.num_annotated_parts(scorer, part, num_scorers) == len(stream)
        scorer = layout.annotator_of_part(part, num_scorers)
        assert layout.annotated_part(scorer, len(streams[scorer]), num_scorers) == part
        streams[scorer].append(part)


@pytest.mark.parametrize("seq", [0, 7, 10**12 - 1, 10**12, 10**15])
def test_a_records_path_has_its_number(seq: int) -> None:
    assert layout.record_seq(layout.record(seq)) == layout.record_seq(f"streams/x/{layout.record(seq)}") == seq


@pytest.mark.parametrize(
    "path", ["head.json", "catalog/000000000001.json", "x/log/1.json", "log/000000000001.json.tmp"]
)
def test_other_paths_have_no_record_number(path: str) -> None:
    assert layout.record_seq(path) is None


def test_fresh_names_are_valid_and_never_repeat() -> None:
    names = [layout.new_part(0) for _ in range(100)] + [layout.new_checkpoint_data(0) for _ in range(100)]
    assert len({checked_path(name) for name in names}) == 200
