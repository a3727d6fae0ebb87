"""Workers of the pool: scores in order, lost workers replaced, none in another's way."""

import os
import subprocess
import sys

import psutil
import pytest
from support.campaigns.campaigns import wait_until

from configs.scoring import ScoringConfig
from millrace.rewards.base import Score
from millrace.rewards.factory import make_reward
from millrace.rewards.isolation.fork_server import ForkServerLost
from millrace.rewards.isolation.pool import Pool
from millrace.rewards.isolation.sandbox import Limits, scrubbed
from millrace.rewards.isolation.worker import Task, read_score, read_task, task_line
from millrace.types import Prompt

PROMPT = Prompt(prompt_id="p", text="?", answer="42", source="test")
OWN = "tests.support.rewards.own_rewards"


def own(function: str, *responses: str, limits: Limits | None = None) -> list[Score]:
    """What one of our functions says of the responses, in their order."""
    tasks = [Task(reward=f"{OWN}:{function}", prompt=PROMPT, response=response) for response in responses]
    with Pool([make_reward(ScoringConfig(reward=f"{OWN}:{function}"))], limits or Limits()) as pool:
        judged = dict(pool.score(tasks))
    return [judged[number] for number in range(len(tasks))]


def rewards(judged: list[Score]) -> list[float | None]:
    return [one.reward for one in judged]


def test_several_workers_return_the_scores_in_order() -> None:
    reward = make_reward(ScoringConfig(reward="exact_match", answer_pattern=r"(\d+)$"))
    tasks = [
        Task(
            reward="exact_match", prompt=Prompt(prompt_id="p", text="?", answer=str(n), source=""), response=f"{n // 2}"
        )
        for n in range(3000)
    ]
    with Pool([reward], Limits(workers=3)) as pool:
        judged = dict(pool.score(tasks))
    assert [judged[n].reward for n in range(3000)] == [float(n == n // 2) for n in range(3000)]


def test_each_response_to_a_function_has_a_fresh_process() -> None:
    assert rewards(own("number_seen", *"abcde", limits=Limits(workers=2))) == [1.0] * 5


def test_a_worker_that_ends_concerns_its_own_response_alone() -> None:
    judged = own("as_told", "1", "__import__('os')._exit(7)", "2", "__import__('os').abort()", "3")
    assert rewards(judged) == [1.0, None, 2.0, None, 3.0]
    assert judged[1].error == "the process that scored it ended (exit code 7)"


@pytest.mark.slow
def test_responses_behind_a_slow_one_are_scored_first() -> None:
    reward = make_reward(ScoringConfig(reward="math"))
    texts = ["\\boxed{1}"] * 20 + ["9**9**9**9"] + ["\\boxed{42}"] * 20
    tasks = [Task(reward="math", prompt=PROMPT, response=text) for text in texts]
    with Pool([reward], Limits(timeout_seconds=1.0)) as pool:
        judged = dict(pool.score(tasks))
    assert list(judged).index(20) > 20, "it was put behind the others"
    assert [judged[number].reward for number in range(41)] == [0.0] * 20 + [None] + [1.0] * 20


@pytest.mark.slow
def test_slow_scores_are_waited_for_up_to_the_deadline() -> None:
    judged = own("slow", "0.3", "0.01", "0.3", "30", "0.02", limits=Limits(timeout_seconds=2.0))
    assert rewards(judged) == [0.3, 0.01, 0.3, None, 0.02]
    assert judged[3] == Score(reward=None, status="timeout", error="no verdict after 2 s")
    assert 2.0 <= judged[3].seconds < 20.0


def test_leaving_early_ends_the_workers_that_are_at_work() -> None:
    with Pool([make_reward(ScoringConfig(reward=f"{OWN}:slow"))], Limits(workers=2)) as pool:
        found = pool.score([Task(reward=f"{OWN}:slow", prompt=PROMPT, response=text) for text in ("0.01", "99")])
        next(found)
        found.close()
        assert dict(pool.score([Task(reward=f"{OWN}:slow", prompt=PROMPT, response="0.02")]))[0].reward == 0.02


@pytest.mark.slow
def test_the_workers_end_with_the_pool() -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)}

    before = children()
    with Pool([make_reward(ScoringConfig(reward="math"))], Limits(workers=2)) as pool:
        dict(pool.score([Task(reward="math", prompt=PROMPT, response="42")] * 50))
        wait_until(lambda: len(children() - before) == 4, "a fork server, two workers and a spare one")
        during = [psutil.Process(pid) for pid in children() - before]
    _, alive = psutil.wait_procs(during, timeout=10)
    assert alive == []


@pytest.mark.slow
def test_a_worker_sees_no_secret_and_no_file_of_the_scorer() -> None:
    names = [name for name in os.environ if name not in scrubbed(dict(os.environ))]
    assert names, "there is something to hide"
    assert rewards(own("environment", *names, "PATH")) == [0.0] * len(names) + [1.0]
    # Standard input, output and error, its own socket, and the folder that is being listed.
    assert rewards(own("open_files", "")) == [5.0]


def test_a_response_that_is_too_long_is_an_error_at_once() -> None:
    [short, long] = own("length", "1", "x" * (17 * 2**20))
    assert short.reward == 1.0
    assert long.status == "error"
    assert "17,825,792 characters" in (long.error or "")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["\ud800", "\udc00\ud800 é 🎲", "\x00\n\r\u2028", '"}\\'])
def test_any_text_arrives_as_it_was(text: str) -> None:
    task = Task(reward="r", prompt=Prompt(prompt_id=text, text=text, answer=text, source=text), response=text)
    line = task_line(task)
    assert line.count(b"\n") == 1
    assert read_task(line) == task
    assert rewards(own("length", text)) == [len(text)]


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
def test_what_is_no_score_is_an_error(line: bytes) -> None:
    score = read_score(line)
    assert (score.reward, score.status) == (None, "error")


SCORER = """
import os, sys
from configs.scoring import ScoringConfig
from millrace.rewards.factory import make_reward
from millrace.rewards.isolation.pool import Pool
from millrace.rewards.isolation.sandbox import Limits
from millrace.rewards.isolation.worker import Task
from millrace.types import Prompt

prompt = Prompt(prompt_id="p", text="?", answer="42", source="test")
reward = make_reward(ScoringConfig(reward="tests.support.rewards.own_rewards:slow"))
with Pool([reward], Limits(workers=2)) as pool:
    tasks = [Task(reward=reward.name, prompt=prompt, response=text) for text in ("0.01", "99", "99")]
    found = pool.score(tasks)
    next(found)
    print("at work", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_scorer_that_is_killed_leaves_nobody_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", SCORER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as scorer:
        assert scorer.stdout is not None
        assert scorer.stdout.readline() == b"at work\n"
        left = psutil.Process(scorer.pid).children(recursive=True)
        assert len(left) >= 3, "a fork server and two workers"
        scorer.kill()
    _, alive = psutil.wait_procs(left, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_the_loss_of_the_fork_server_is_a_fault_and_no_score() -> None:
    before = set(psutil.Process().children())
    tasks = [Task(reward="exact_match", prompt=PROMPT, response="42")]
    with Pool([make_reward(ScoringConfig(reward="exact_match", answer_pattern=r"(\d+)"))], Limits()) as pool:
        assert dict(pool.score(tasks))[0].reward == 1.0
        [server] = set(psutil.Process().children()) - before
        workers = server.children()
        server.kill()
        psutil.wait_procs(workers, timeout=10)
        with pytest.raises(ForkServerLost):
            list(pool.score(tasks))


def test_a_reward_whose_import_starts_threads_is_loaded_after_the_fork() -> None:
    function = "tests.support.rewards.module_that_starts_a_thread:lives"
    with Pool([make_reward(ScoringConfig(reward=function))], Limits(workers=2)) as pool:
        assert pool.versions[function].startswith(function)
        judged = dict(pool.score([Task(reward=function, prompt=PROMPT, response="1")] * 4))
    assert [scored.reward for scored in judged.values()] == [1.0] * 4
