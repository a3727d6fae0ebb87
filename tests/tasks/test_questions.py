"""A question to a module is answered by a process of its own, and its death is an error with its last words."""

from collections.abc import Iterator

import pytest

from millrace.errors import StageDied
from tasks.fork_server import STAGES
from tasks.questions import Question, ask


@pytest.fixture(scope="module", autouse=True)
def _own_fork_server() -> Iterator[None]:
    STAGES.warm_up(["json"])
    yield
    STAGES.close()


def test_the_answer_is_what_the_module_writes_to_its_standard_output() -> None:
    # The standard library's json.tool writes what it reads.
    assert ask("json.tool", {"a": [1, "ü"]}, "nothing") == {"a": [1, "ü"]}


def test_the_asker_goes_on_meanwhile() -> None:
    asked = [Question("json.tool", number, "nothing") for number in range(3)]
    assert [question.answer() for question in asked] == [0, 1, 2]


def test_a_process_that_ends_without_an_answer_is_an_error_with_its_last_lines() -> None:
    with pytest.raises(StageDied):
        ask("no_such_module", None, "the moon")
