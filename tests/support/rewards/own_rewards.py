"""Reward functions, good ones and bad ones. Called as `tests.support.rewards.own_rewards:<name>`."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

seen: list[str] = []
NOT_A_FUNCTION = 1


def length(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> int:
    return len(response)


def parts(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> dict[str, float]:
    return {"reward": 0.5, "is_the_answer": response == answer, "named": meta["prompt_id"] == prompt}


def evaluate(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> object:
    """Returns the value of the response, a Python expression."""
    return eval(response)


def execute(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> float:
    """The most dangerous reward: runs the response as a program, and calls it wrong."""
    exec(response, {})
    return 0.0


def number_seen(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> int:
    """How many responses this process has judged, this one included."""
    seen.append(response)
    return len(seen)


def sleep(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> float:
    time.sleep(float(response))
    return float(response)


def environment(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> bool:
    """Whether the process that judges has a variable of this name."""
    return response in os.environ


def open_files(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def looks_into(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> int:
    """How many of the fork server and the scorer let this process open the file in /proc that the response names."""
    fork_server = os.getppid()
    scorer = int(Path(f"/proc/{fork_server}/stat").read_text().rpartition(")")[2].split()[1])
    opened = 0
    for pid in (fork_server, scorer):
        with suppress(PermissionError), Path(f"/proc/{pid}/{response}").open("rb"):
            opened += 1
    return opened


def of_two(prompt: str, response: str) -> float:
    return 0.0


async def later(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> float:
    return 0.0


def one_by_one(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> Iterator[float]:
    """A generator, which is not called as a function."""
    yield 1.0


def without_result(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> None:
    """Forgets to return a reward."""


def one_over_response(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> float:
    return 1 / int(response)


def framed(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> float:
    """Whether the response is two digits between two signs."""
    return float(re.fullmatch("=[0-9]{2}=", response) is not None)
