"""Who is asked to take part in a push, and who no longer, with generators that the test plays itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.broadcasting import wait_until, weights_of

from millrace.weights.broadcast import BroadcastReader, BroadcastWriter
from millrace.weights.gathering import Board, Go, Push, Seat
from millrace.weights.shared import shapes_of

DEADLINE = 0.8
LONG = 10.0


@pytest.fixture
def writer() -> Iterator[BroadcastWriter]:
    """For two generators."""
    made = BroadcastWriter(2, deadline_seconds=DEADLINE)
    yield made
    made.close()


@pytest.fixture
def board() -> Board:
    return Board("127.0.0.1")


def announced(board: Board, version: int, *asked: int) -> Push:
    weights = weights_of(version)
    return board.announce(weights.manifest, shapes_of(weights.tensors), asked)


def test_who_does_not_answer_is_asked_once_and_again_only_after_another_hello(writer: BroadcastWriter) -> None:
    silent = Seat(writer.address, 1, LONG)
    writer.offer(weights_of(1))
    asked = silent.news()
    assert asked is not None
    assert asked.asked == (1,)
    for version in (2, 3):
        writer.offer(weights_of(version))
        assert silent.news() is None
    silent.hello()
    writer.offer(weights_of(4))
    asked = silent.news()
    assert asked is not None
    assert (asked.asked, asked.manifest) == ((1,), weights_of(4).manifest)
    assert writer.missing == {0, 1}


def test_a_push_goes_on_with_those_that_are_ready(writer: BroadcastWriter, tmp_path: Path) -> None:
    silent = Seat(writer.address, 1, LONG)
    reader = BroadcastReader(lambda: writer.address, 0, tmp_path / "landing", deadline_seconds=LONG)

    def offered() -> bool:
        writer.offer(weights_of(1))
        return 0 not in writer.missing

    wait_until(offered, "generator 0 has it")
    assert silent.news() is not None
    writer.offer(weights_of(2))
    push = silent.news()
    assert push is not None
    assert push.asked == (0,)
    assert writer.missing == {1}
    taken = reader.take(None)
    assert taken is not None
    assert taken.id == weights_of(2).id
    reader.close()


def test_a_push_says_all_that_a_generator_must_know(board: Board) -> None:
    seat = Seat(board.address, 3, LONG)
    assert seat.news() is None
    push = announced(board, 7, 3, 5)
    assert seat.news() == push
    assert seat.news() is None


def test_who_comes_late_hears_of_the_newest_push_alone(board: Board) -> None:
    announced(board, 1, 0)
    newest = announced(board, 2, 0)
    seat = Seat(board.address, 0, LONG)
    assert seat.news() == newest
    assert seat.news() is None


def test_a_generator_that_answers_after_the_others_went_is_told_so(board: Board) -> None:
    seat = Seat(board.address, 0, LONG)
    push = announced(board, 1, 0)
    assert board.ready(push, 0.01) == {}
    board.go(push, Go(group="1", ranks={}))
    assert seat.ready(push, LONG) is None


def test_a_generator_that_wakes_after_a_push_is_over_stays_out_of_its_group(board: Board) -> None:
    seat = Seat(board.address, 0, LONG)
    push = announced(board, 1, 0)
    board.go(push, Go(group="1", ranks={0: 1}))
    board.over(push)
    assert seat.ready(push, LONG) is None


def test_answers_reach_the_board(board: Board) -> None:
    seats = {g: Seat(board.address, g, LONG) for g in (0, 1)}
    push = announced(board, 1, 0, 1)
    seats[0].done(push)
    seats[1].done(push, "embed differs")
    assert board.done(push, [0, 1], LONG) == {0: "", 1: "embed differs"}


def test_hellos_differ_each_time(board: Board) -> None:
    assert board.hello(0) is None
    seat = Seat(board.address, 0, LONG)
    first = board.hello(0)
    seat.hello()
    assert None not in (first, board.hello(0))
    assert first != board.hello(0)


def test_nobody_sits_down_where_nobody_listens(board: Board) -> None:
    address = board.address
    board.close()
    with pytest.raises(ConnectionRefusedError):
        Seat(address, 0, LONG)
