"""The benchmark of streams measures what it says: whole and small, the figures themselves are taken by hand."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores.s3_server import S3Server, aws_environment

from benchmarks.streams import measure, targets_met
from benchmarks.timing import in_turn, median_ratio
from benchmarks.trajectories import GROUP_SIZE, RESPONSE_TOKENS, VOCAB_SIZE, make_rows, renumber, rows_in
from storage.schema import TRAJECTORY
from storage.stores.factory import open_store
from storage.validation import validate

_ROOT = Path(__file__).parents[2]


def test_the_rows_are_valid_whole_groups_of_long_responses() -> None:
    table = make_rows(2 * GROUP_SIZE)
    validate(table, TRAJECTORY, vocab_size=VOCAB_SIZE, group_size=GROUP_SIZE)
    assert {len(tokens) for tokens in table["response_tokens"]} == {RESPONSE_TOKENS}


def test_rows_that_follow_others_are_numbered_on_and_otherwise_the_same() -> None:
    table = make_rows(2 * GROUP_SIZE)
    later = renumber(table, 4 * GROUP_SIZE)
    validate(later, TRAJECTORY, group_size=GROUP_SIZE)
    assert later["row_id"][0].as_py() == 4 * GROUP_SIZE
    assert later["group_id"].to_pylist() == [4] * GROUP_SIZE + [5] * GROUP_SIZE
    assert later.drop(["row_id", "group_id"]).equals(table.drop(["row_id", "group_id"]))


def test_rows_of_part_of_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="not whole groups"):
        make_rows(GROUP_SIZE + 1)


def test_a_part_has_about_the_size_asked_for() -> None:
    assert make_rows(rows_in(1.0)).nbytes == pytest.approx(1e6, rel=0.05)


def test_contenders_take_turns_in_going_first_each_prepared_just_before_its_call() -> None:
    order: list[str] = []

    def contender(name: str) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            order.append(f"prepare {name}")
            return lambda: order.append(f"call {name}")

        return prepare

    for turn in range(3):
        times = in_turn({name: contender(name) for name in "abc"}, turn)
        assert set(times) == set("abc")
    assert order == [f"{what} {name}" for name in "abcbcacab" for what in ("prepare", "call")]


def test_a_share_of_the_bound_is_that_of_the_middle_round() -> None:
    # The second round met a machine ten times slower, for both.
    assert median_ratio([1.0, 10.0, 3.0], [2.0, 20.0, 4.0]) == 0.5


def test_a_whole_measurement_has_every_figure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = measure(str(tmp_path), [0.2, 0.5], repeats=1)
    assert [part["rows"] for part in result["parts"]] == [rows_in(0.2), rows_in(0.5)]
    for part in result["parts"]:
        assert set(part["seconds"]) == {"write bound", "write", "group commit", "read bound", "bytes", "read"}
        assert all(seconds > 0 for seconds in part["seconds"].values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_object_store_is_compared_with_its_client_library(moto_s3: S3Server) -> None:
    bucket = moto_s3.make_bucket()
    with aws_environment(moto_s3.environment):
        (part,) = measure(f"s3://{bucket}/some/where", [0.2], repeats=1)["parts"]
        assert open_store(f"s3://{bucket}").list() == []
    assert set(part["share"]) == {"write", "group commit", "bytes", "read"}


BYTES, VALUES = "read, bytes verified, 8.0 MB", "read, values checked too, 8.0 MB"


def _figures(*, rate: float, write_share: float, read_share: float) -> dict:
    seconds = {"write": 720 / rate, "group commit": 720 / 9_000}
    share = {"write": write_share, "group commit": 0.2, "bytes": read_share + 0.2, "read": read_share}
    part = {"rows": 720, "bytes": 8_000_000, "seconds": seconds, "share": share}
    return {"parts": [part]}


@pytest.mark.parametrize(
    ("figures", "met"),
    [
        (_figures(rate=11_000, write_share=0.3, read_share=0.9), {"write, 8.0 MB", BYTES, VALUES}),
        (_figures(rate=9_000, write_share=0.85, read_share=0.7), {"write, 8.0 MB", BYTES}),
        (_figures(rate=9_000, write_share=0.7, read_share=0.5), set()),
    ],
)
def test_a_write_meets_its_target_by_rate_or_by_share_and_a_read_by_its_share(figures: dict, met: set[str]) -> None:
    targets = targets_met(figures)
    assert set(targets) == {"write, 8.0 MB", "group commit, 8.0 MB", BYTES, VALUES}
    assert {name for name, reached in targets.items() if reached} == met


def test_a_part_of_no_size_is_refused_in_a_sentence() -> None:
    command = [sys.executable, "-m", "benchmarks.streams", "--parts", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
    assert ended.returncode == 2
    assert "parts larger than 0 MB" in ended.stderr
