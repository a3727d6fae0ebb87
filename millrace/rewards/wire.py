"""What the pool and the processes that judge say to each other: a line of JSON a response, there and back.

    pool ──{"reward": "math", "prompt": {…}, "response": "…"}──► judge
         ◄──{"reward": 1.0, "components": {…}, "status": "ok", "error": null, "seconds": 0.002}──

JSON, for it runs nothing when it is read: what comes back may have been written by what a response told a function to
do. Only ASCII is sent, so that half of a surrogate pair, which no UTF-8 can hold, arrives as it was.
"""

import json
from dataclasses import asdict, dataclass

from millrace.rewards.base import Score, failed
from millrace.types import Prompt

LONGEST_VERDICT = 2**20
"""Bytes of a line that is a verdict; a judge that writes more is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A response that waits to be judged."""

    reward: str
    """Name of the one that judges."""
    prompt: Prompt
    response: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A score, and what it took."""

    score: Score
    seconds: float
    """By the clock, without any wait for its turn."""


def task_line(task: Task) -> bytes:
    """The task as a line, its end included."""
    return json.dumps(asdict(task)).encode("ascii") + b"\n"


def read_task(line: bytes) -> Task:
    """The task that `task_line` wrote."""
    values = json.loads(line)
    return Task(reward=values["reward"], prompt=Prompt(**values["prompt"]), response=values["response"])


def verdict_line(judged: Judged) -> bytes:
    """The verdict as a line, its end included."""
    return json.dumps({**asdict(judged.score), "seconds": judged.seconds}).encode("ascii") + b"\n"


def read_verdict(line: bytes) -> Judged:
    """What a judge said; a score with status `error` for what is no verdict. Raises nothing, whatever it was sent."""
    try:
        values = json.loads(line)
        seconds = float(values.pop("seconds"))
        components = {str(name): float(value) for name, value in values.pop("components").items()}
        reward, status, error = values.pop("reward"), values.pop("status"), values.pop("error")
        if status != "ok":
            return Judged(score=failed(str(error)), seconds=seconds)
        return Judged(score=Score(reward=float(reward), components=components), seconds=seconds)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        return Judged(score=failed(f"the verdict can't be read ({type(error).__name__}: {error})"), seconds=0.0)
