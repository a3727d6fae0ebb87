"""The fork server of the rewards: a process that loads them once. The workers it forks score responses.

`python -m millrace.rewards.isolation.worker`

    pool ──rewards, limits──►  fork server: loads, replies with the versions
         ──order────────────►      │ fork ─► worker: enters the sandbox, sends READY

         ──{"reward": 0, "prompt": {…}, "response": "…"}───────────────────────────────────────► worker
         ◄──{"reward": 1.0, "components": {…}, "status": "ok", "error": null, "seconds": 0.002}──

A killed worker is replaced in milliseconds, since nothing has to be loaded again. The fork server itself sees no
response, so nothing that a worker is made to do reaches the next one. When the fork server ends, the kernel kills its
workers. A process that has started threads or used a CUDA device can't fork: with `late`, each worker loads
the rewards itself.

Messages are JSON because reading JSON runs nothing, and a hostile response may have written them. They are ASCII, so
half a surrogate pair, which UTF-8 can't encode, arrives unchanged.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

from configs.sources import naming_source
from millrace.errors import InputError
from millrace.forking.process_settings import die_with_parent
from millrace.forking.server import Order, control_socket, num_threads, read_recipe, reply, serve
from millrace.rewards.base import Reward, Score, failed, safe_score
from millrace.rewards.factory import make_part
from millrace.rewards.isolation.sandbox import Limits, Sandbox, hide
from millrace.types import Prompt

READY = b"\n"
"""Sent by a worker once it is ready for a task."""
CHUNK = 2**18
"""Bytes read at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A response to be scored by one of the rewards, given by its index."""

    reward: int
    prompt: Prompt
    response: str


def task_line(task: Task) -> bytes:
    """Write the task as a line of JSON."""
    return json.dumps(asdict(task)).encode("ascii") + b"\n"


def read_task(line: bytes) -> Task:
    """Inverse of `task_line`."""
    values = json.loads(line)
    return Task(reward=values["reward"], prompt=Prompt.from_json(values["prompt"]), response=values["response"])


def score_line(score: Score) -> bytes:
    """Write the score as a line of JSON."""
    return json.dumps(asdict(score)).encode("ascii") + b"\n"


def read_score(line: bytes) -> Score:
    """Read a worker's line. Never raises: anything but a score becomes a score with status `error`."""
    try:
        values = json.loads(line)
        seconds = float(values["seconds"])
        if values["status"] != "ok":
            return replace(failed(str(values["error"])), seconds=seconds)
        components = {str(name): float(value) for name, value in values["components"].items()}
        return Score(reward=float(values["reward"]), components=components, seconds=seconds)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        return failed(f"the verdict can't be read ({type(error).__name__}: {error})")


def main() -> None:
    """Load the rewards of the recipe, reply with their versions or with an InputError, then fork on command."""
    # When the scorer ends, this ends too, even while it loads.
    die_with_parent()
    hide()
    control = control_socket()
    recipe = read_recipe(control)
    late = recipe["late"]
    try:
        sandbox = Sandbox(Limits(**recipe["limits"]))
        sandbox.try_out()
        rewards: list[Reward] = []
        for source, name, options in recipe["rewards"]:
            with naming_source(source):
                rewards.append(make_part(name, options))
                if not late:
                    rewards[-1].load()
    except InputError as error:
        reply(control, {"refusal": error.fields()})
        return
    # A child of this process works if there is one thread and no CUDA context.
    torch = sys.modules.get("torch")
    can_fork = num_threads() == 1 and not (torch is not None and torch.cuda.is_initialized())
    versions = [] if late else [reward.version for reward in rewards]
    reply(control, {"versions": versions, "can_fork": can_fork})
    if can_fork and (order := serve(control, adopted=False)) is not None:
        _work(order, rewards, sandbox, late=late)


def _work(order: Order, rewards: Sequence[Reward], sandbox: Sandbox, *, late: bool) -> NoReturn:
    """Score until the scorer closes its end. Runs in the main thread, where libraries may set an alarm."""
    try:
        for reward in rewards if late else []:
            reward.load()
        # Discard output while scoring: responses could write anything into the log.
        for number in (1, 2):
            os.dup2(0, number)
        sandbox.enter(order.parent)
        # A forked process copies each page that it first touches: do that before the first response's time begins.
        for reward in rewards:
            reward.warm_up()
        _write(order.birth, READY)
        inbox = b""
        while chunk := os.read(order.birth, CHUNK):
            *lines, inbox = (inbox + chunk).split(b"\n")
            for task in map(read_task, lines):
                started = time.perf_counter()
                score = safe_score(rewards[task.reward], task.prompt, task.response)
                _write(order.birth, score_line(replace(score, seconds=time.perf_counter() - started)))
    finally:
        os._exit(0)


def _write(descriptor: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    main()
