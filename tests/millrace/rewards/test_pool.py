"""Judges in processes: in order, replaced when they are lost, never in each other's way."""

import os
import subprocess
import sys

import psutil
import pytest

from millrace.errors import InputError
from millrace.rewards.base import Score
from millrace.rewards.factory import make_reward
from millrace.rewards.nursery import NurseryLost
from millrace.rewards.pool import Pool
from millrace.rewards.sandbox import Limits, scrubbed
from millrace.rewards.wire import Judged, Task, read_task, read_verdict, task_line, verdict_line
from millrace.types import Prompt

PROMPT = Prompt(prompt_id="p", text="?", answer="42", source="test")
OWN = "tests.support.own_rewards"


def own(function: str, *responses: str, limits: Limits | None = None) -> list[Judged]:
    """What one of our functions says of the responses, in their order."""
    tasks = [Task(reward="python", prompt=PROMPT, response=response) for response in responses]
    with Pool([make_reward("python", function=f"{OWN}:{function}")], limits or Limits()) as pool:
        judged = dict(pool.judge(tasks))
    return [judged[number] for number in range(len(tasks))]


def rewards(judged: list[Judged]) -> list[float | None]:
    return [one.score.reward for one in judged]


def test_many_responses_are_judged_by_several_workers_each_with_its_own_verdict() -> None:
    reward = make_reward("exact_match", answer_pattern=r"(\d+)$")
    tasks = [
        Task(
            reward="exact_match", prompt=Prompt(prompt_id="p", text="?", answer=str(n), source=""), response=f"{n // 2}"
        )
        for n in range(3000)
    ]
    with Pool([reward], Limits(workers=3)) as pool:
        judged = dict(pool.judge(tasks))
    assert [judged[n].score.reward for n in range(3000)] == [float(n == n // 2) for n in range(3000)]


def test_each_response_to_a_function_of_ones_own_has_a_process_that_has_seen_no_other() -> None:
    assert rewards(own("number_seen", *"abcde", limits=Limits(workers=2))) == [1.0] * 5


def test_a_judge_that_ends_concerns_its_own_response_alone() -> None:
    judged = own("as_told", "1", "__import__('os')._exit(7)", "2", "__import__('os').abort()", "3")
    assert rewards(judged) == [1.0, None, 2.0, None, 3.0]
    assert judged[1].score.error == "the process that judged it ended (exit code 7)"


def test_responses_behind_one_that_ends_its_judge_are_judged_all_the_same() -> None:
    reward = make_reward("math")
    texts = ["\\boxed{1}"] * 20 + ["9**9**9**9"] + ["\\boxed{42}"] * 20
    tasks = [Task(reward="math", prompt=PROMPT, response=text) for text in texts]
    with Pool([reward], Limits(timeout_seconds=1.0)) as pool:
        judged = dict(pool.judge(tasks))
    assert list(judged).index(20) > 20, "it was put behind those that wait"
    assert [judged[number].score.reward for number in range(41)] == [0.0] * 20 + [None] + [1.0] * 20


def test_slow_verdicts_are_waited_for_up_to_the_deadline() -> None:
    judged = own("slow", "0.3", "0.01", "0.3", "30", "0.02", limits=Limits(timeout_seconds=2.0))
    assert rewards(judged) == [0.3, 0.01, 0.3, None, 0.02]
    assert judged[3].score == Score(reward=None, status="timeout", error="no verdict after 2 s")
    assert 2.0 <= judged[3].seconds < 20.0


def test_the_pool_judges_again_after_a_time_out() -> None:
    with Pool([make_reward("python", function=f"{OWN}:slow")], Limits(timeout_seconds=0.5)) as pool:
        for response, reward in (("99", None), ("0.01", 0.01)):
            [(_, judged)] = pool.judge([Task(reward="python", prompt=PROMPT, response=response)])
            assert judged.score.reward == reward


def test_leaving_early_ends_the_judges_that_are_at_work() -> None:
    with Pool([make_reward("python", function=f"{OWN}:slow")], Limits(workers=2)) as pool:
        found = pool.judge([Task(reward="python", prompt=PROMPT, response=text) for text in ("0.01", "99")])
        next(found)
        found.close()
        assert dict(pool.judge([Task(reward="python", prompt=PROMPT, response="0.02")]))[0].score.reward == 0.02


def test_the_judges_end_with_the_pool() -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)}

    before = children()
    with Pool([make_reward("math")], Limits(workers=2)) as pool:
        dict(pool.judge([Task(reward="math", prompt=PROMPT, response="42")] * 50))
        during = [psutil.Process(pid) for pid in children() - before]
    assert len(during) == 4, "a nursery, two judges, and the one to come"
    _, alive = psutil.wait_procs(during, timeout=10)
    assert alive == []


def test_something_is_called_again_and_again_while_the_judges_work() -> None:
    called: list[None] = []
    with Pool([make_reward("python", function=f"{OWN}:slow")], Limits()) as pool:
        tasks = [Task(reward="python", prompt=PROMPT, response="0.5")]
        list(pool.judge(tasks, each=lambda: called.append(None)))
    assert len(called) > 3


def test_a_judge_sees_no_secret_and_no_file_of_the_scorer() -> None:
    names = [name for name in os.environ if name not in scrubbed(dict(os.environ))]
    assert names, "there is something to hide"
    assert rewards(own("environment", *names, "PATH")) == [0.0] * len(names) + [1.0]
    # Standard input, output and error, its own socket, and the folder that is being listed.
    assert rewards(own("open_files", "")) == [5.0]


def test_a_response_that_is_too_long_is_an_error_at_once() -> None:
    [short, long] = own("length", "1", "x" * (17 * 2**20))
    assert short.score.reward == 1.0
    assert long.score.status == "error"
    assert "17,825,792 characters" in (long.score.error or "")


def test_a_megabyte_is_judged() -> None:
    assert rewards(own("length", "é" * 10**6)) == [10**6]


@pytest.mark.parametrize("text", ["\ud800", "\udc00\ud800 é 🎲", "\x00\n\r\u2028", '"}\\'])
def test_any_text_arrives_as_it_was(text: str) -> None:
    task = Task(reward="r", prompt=Prompt(prompt_id=text, text=text, answer=text, source=text), response=text)
    line = task_line(task)
    assert line.count(b"\n") == 1
    assert read_task(line) == task
    assert rewards(own("length", text)) == [len(text)]


@pytest.mark.parametrize(
    "score",
    [Score(reward=0.5, components={"a": 1.0}), Score(reward=None, status="error", error="bad")],
)
def test_a_verdict_arrives_as_it_was(score: Score) -> None:
    judged = Judged(score=score, seconds=0.25)
    assert read_verdict(verdict_line(judged)) == judged


GOOD = b'"components": {}, "error": null, "seconds": 0.1'


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"reward": NaN, "status": "ok", ' + GOOD + b"}",
        b'{"reward": 1e999, "status": "ok", ' + GOOD + b"}",
        b'{"reward": null, "status": "ok", ' + GOOD + b"}",
        b'{"reward": [], "status": "ok", ' + GOOD + b"}",
        b'{"reward": 1, "status": "perfect", ' + GOOD + b"}",
        b'{"reward": 1, "status": "ok", "components": [], "error": null, "seconds": 0.1}',
    ],
)
def test_what_is_no_verdict_is_an_error(line: bytes) -> None:
    score = read_verdict(line).score
    assert (score.reward, score.status) == (None, "error")


@pytest.mark.parametrize("function", ["", "no_colon", ":f", "m:"])
def test_a_reward_that_can_not_be_made_is_refused_before_any_process(function: str) -> None:
    with pytest.raises(InputError, match=r"expected package.module:function"):
        make_reward("python", function=function)


SCORER = """
import os, sys
from millrace.rewards.factory import make_reward
from millrace.rewards.pool import Pool
from millrace.rewards.sandbox import Limits
from millrace.rewards.wire import Task
from millrace.types import Prompt

prompt = Prompt(prompt_id="p", text="?", answer="42", source="test")
with Pool([make_reward("python", function="tests.support.own_rewards:slow")], Limits(workers=2)) as pool:
    tasks = [Task(reward="python", prompt=prompt, response=text) for text in ("0.01", "99", "99")]
    found = pool.judge(tasks)
    next(found)
    print("at work", flush=True)
    sys.stdin.read()
"""


def test_a_scorer_that_is_killed_leaves_nobody_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", SCORER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as scorer:
        assert scorer.stdout is not None
        assert scorer.stdout.readline() == b"at work\n"
        left = psutil.Process(scorer.pid).children(recursive=True)
        assert len(left) >= 3, "a nursery and two judges"
        scorer.kill()
    _, alive = psutil.wait_procs(left, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_the_loss_of_the_nursery_is_a_fault_and_no_verdict() -> None:
    before = set(psutil.Process().children())
    with Pool([make_reward("python", function=f"{OWN}:length")], Limits()) as pool:
        [(_, judged)] = pool.judge([Task(reward="python", prompt=PROMPT, response="1")])
        assert judged.score.reward == 1.0
        [nursery] = set(psutil.Process().children()) - before
        nursery.kill()
        with pytest.raises(NurseryLost, match="exit code -9"):
            list(pool.judge([Task(reward="python", prompt=PROMPT, response="1")] * 3))
