"""Workers of the pool: scores in order, lost workers replaced, limits enforced, and nothing left behind."""

import os
import subprocess
import sys

import psutil
import pytest

from configs.task import ScoringConfig
from millrace.forking.client import ForkServerLost
from millrace.rewards.base import Reward, Score
from millrace.rewards.factory import make_reward
from millrace.rewards.isolation.pool import Pool
from millrace.rewards.isolation.sandbox import Limits, scrubbed
from millrace.rewards.isolation.worker import Task, read_score, read_task, task_line
from millrace.types import Prompt

PROMPT = Prompt(prompt_id="p", text="?", answer="42", source="test")


def python_reward(function: str) -> Reward:
    return make_reward(ScoringConfig(reward=f"tests.support.rewards.{function}"))


def tasks_of(*responses: str) -> list[Task]:
    return [Task(reward=0, prompt=PROMPT, response=response) for response in responses]


def score(function: str, *responses: str, limits: Limits | None = None) -> list[Score]:
    """Score responses with a function of `own_rewards`, in their order."""
    with Pool([python_reward(f"own_rewards:{function}")], limits or Limits()) as pool:
        scores = dict(pool.score(tasks_of(*responses)))
    return [scores[number] for number in range(len(responses))]


def rewards(scores: list[Score]) -> list[float | None]:
    return [score.reward for score in scores]


def test_several_workers_return_the_scores_of_their_tasks() -> None:
    reward = make_reward(ScoringConfig(reward="exact_match", answer_pattern=r"(\d+)$"))
    prompts = [Prompt(prompt_id="p", text="?", answer=str(n), source="") for n in range(3000)]
    tasks = [Task(reward=0, prompt=prompt, response=f"{n // 2}") for n, prompt in enumerate(prompts)]
    with Pool([reward], Limits(workers=3)) as pool:
        scores = dict(pool.score(tasks))
    assert [scores[n].reward for n in range(3000)] == [float(n == n // 2) for n in range(3000)]


def test_each_response_to_a_function_has_a_fresh_process() -> None:
    assert rewards(score("number_seen", *"abcde", limits=Limits(workers=2))) == [1.0] * 5


def test_the_end_of_a_worker_concerns_only_its_own_response() -> None:
    scores = score("evaluate", "1", "__import__('os')._exit(7)", "2", "__import__('os').abort()", "3")
    assert rewards(scores) == [1.0, None, 2.0, None, 3.0]
    assert scores[1].error == "the process that scored it ended (exit code 7)"


@pytest.mark.slow
def test_each_score_gets_its_time_up_to_the_deadline() -> None:
    scores = score("sleep", "0.3", "0.01", "0.3", "30", "0.02", limits=Limits(timeout_seconds=2.0))
    assert rewards(scores) == [0.3, 0.01, 0.3, None, 0.02]
    assert scores[3] == Score(reward=None, status="timeout", error="no verdict after 2 s")
    assert 2.0 <= scores[3].seconds < 20.0


def test_leaving_early_ends_the_workers_that_are_scoring() -> None:
    with Pool([python_reward("own_rewards:sleep")], Limits(workers=2)) as pool:
        scores = pool.score(tasks_of("0.01", "99"))
        next(scores)
        scores.close()
        assert dict(pool.score(tasks_of("0.02")))[0].reward == 0.02


@pytest.mark.slow
def test_a_worker_sees_no_secret_and_no_file_of_the_scorer() -> None:
    names = [name for name in os.environ if name not in scrubbed(dict(os.environ))]
    assert names, "there is something to hide"
    assert rewards(score("environment", *names, "PATH")) == [0.0] * len(names) + [1.0]
    # Standard input, output and error, its own socket, and the folder that is being listed.
    assert rewards(score("open_files", "")) == [5.0]


def test_a_response_that_is_too_long_is_an_error_at_once() -> None:
    [short, long] = score("length", "1", "x" * (17 * 2**20))
    assert short.reward == 1.0
    assert long.status == "error"
    assert "17,825,792 characters" in (long.error or "")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["\ud800", "\udc00\ud800 é 🎲", "\x00\n\r\u2028", '"}\\'])
def test_any_text_arrives_unchanged(text: str) -> None:
    task = Task(reward=0, prompt=Prompt(prompt_id=text, text=text, answer=text, source=text), response=text)
    line = task_line(task)
    assert line.count(b"\n") == 1
    assert read_task(line) == task
    assert rewards(score("length", text)) == [len(text)]


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
def test_a_line_that_is_not_a_score_is_an_error(line: bytes) -> None:
    score = read_score(line)
    assert (score.reward, score.status) == (None, "error")


SCORER = """
import sys
from configs.task import ScoringConfig
from millrace.rewards.factory import make_reward
from millrace.rewards.isolation.pool import Pool
from millrace.rewards.isolation.sandbox import Limits
from millrace.rewards.isolation.worker import Task
from millrace.types import Prompt

prompt = Prompt(prompt_id="p", text="?", answer="42", source="test")
reward = make_reward(ScoringConfig(reward="tests.support.rewards.own_rewards:sleep"))
with Pool([reward], Limits(workers=2)) as pool:
    tasks = [Task(reward=0, prompt=prompt, response=text) for text in ("0.01", "99", "99")]
    scores = pool.score(tasks)
    next(scores)
    print("scoring", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False])
def test_no_process_outlives_the_scorer(is_killed: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", SCORER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as scorer:
        assert scorer.stdout is not None
        assert scorer.stdout.readline() == b"scoring\n"
        children = psutil.Process(scorer.pid).children(recursive=True)
        assert len(children) >= 3, "a fork server and two workers"
        if is_killed:
            scorer.kill()
        else:
            scorer.communicate(b"\n")
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_the_loss_of_the_fork_server_is_a_fault_and_not_a_score() -> None:
    others = set(psutil.Process().children())
    tasks = [Task(reward=0, prompt=PROMPT, response="42")]
    with Pool([make_reward(ScoringConfig(reward="exact_match", answer_pattern=r"(\d+)"))], Limits()) as pool:
        assert dict(pool.score(tasks))[0].reward == 1.0
        [server] = set(psutil.Process().children()) - others
        workers = server.children()
        server.kill()
        psutil.wait_procs(workers, timeout=10)
        with pytest.raises(ForkServerLost):
            list(pool.score(tasks))


def test_a_reward_whose_import_starts_threads_is_loaded_after_the_fork() -> None:
    with Pool([python_reward("module_that_starts_a_thread:lives")], Limits(workers=2)) as pool:
        assert pool.versions
        scores = dict(pool.score(tasks_of(*"1111")))
    assert [score.reward for score in scores.values()] == [1.0] * 4
