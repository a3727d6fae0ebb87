"""The benchmark of streams, whole and small; the figures themselves are taken by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores.s3_server import S3Server, aws_environment

from benchmarks.harness import median_ratio, time_in_turn
from benchmarks.streams import measure, targets_met
from benchmarks.trajectories import GROUP_SIZE, RESPONSE_TOKENS, VOCAB_SIZE, make_rows, renumber, rows_in
from storage.schema import TRAJECTORY
from storage.stores.factory import open_store
from storage.validation import validate

_ROOT = Path(__file__).parents[2]


def test_the_rows_are_valid_whole_groups_of_long_responses_numbered_on() -> None:
    table = make_rows(2 * GROUP_SIZE)
    for rows in (table, renumber(table, 4 * GROUP_SIZE)):
        validate(rows, TRAJECTORY, vocab_size=VOCAB_SIZE, group_size=GROUP_SIZE)
        assert {len(tokens) for tokens in rows["response_tokens"]} == {RESPONSE_TOKENS}


def test_contenders_take_turns_in_going_first_each_prepared_just_before_its_call() -> None:
    order: list[str] = []

    def contender(name: str) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            order.append(f"prepare {name}")
            return lambda: order.append(f"call {name}")

        return prepare

    for turn in range(3):
        times = time_in_turn({name: contender(name) for name in "abc"}, turn)
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
