"""What the pool and its workers send each other: one line of JSON per response, there and back.

    pool ──{"reward": "math", "prompt": {…}, "response": "…"}──► worker
         ◄──{"reward": 1.0, "components": {…}, "status": "ok", "error": null, "seconds": 0.002}──

It is JSON because reading JSON runs nothing, and a hostile response may have written what comes back. Only ASCII is
sent: half a surrogate pair, which UTF-8 cannot encode, arrives unchanged.
"""

import json
from dataclasses import asdict, dataclass, replace

from millrace.rewards.base import Score, failed
from millrace.types import Prompt

LONGEST_SCORE = 2**20
"""Bytes of a score's line. A worker that writes more is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A response to be scored."""

    reward: str
    """Name of the reward that scores it."""
    prompt: Prompt
    response: str


def task_line(task: Task) -> bytes:
    """The task as a line, with its newline."""
    return json.dumps(asdict(task)).encode("ascii") + b"\n"


def read_task(line: bytes) -> Task:
    """Inverse of `task_line`."""
    values = json.loads(line)
    return Task(reward=values["reward"], prompt=Prompt.from_json(values["prompt"]), response=values["response"])


def score_line(score: Score) -> bytes:
    """The score as a line, with its newline."""
    return json.dumps(asdict(score)).encode("ascii") + b"\n"


def read_score(line: bytes) -> Score:
    """What a worker sent. Never raises: anything that is no score becomes a score with status `error`."""
    try:
        values = json.loads(line)
        seconds = float(values.pop("seconds"))
        components = {str(name): float(value) for name, value in values.pop("components").items()}
        reward, status, error = values.pop("reward"), values.pop("status"), values.pop("error")
        if status != "ok":
            return replace(failed(str(error)), seconds=seconds)
        return Score(reward=float(reward), components=components, seconds=seconds)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        return failed(f"the verdict can't be read ({type(error).__name__}: {error})")
