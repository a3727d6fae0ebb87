"""The fork server of the rewards: a process that loads them once. The workers it forks score responses.

`python -m millrace.rewards.isolation.worker`

    scorer ──rewards, limits──►  fork server: loads, replies with the versions
           ──order────────────►      │ fork ─► worker: enters the sandbox, sends READY, then a line per score

A killed worker is replaced in milliseconds, since nothing has to be loaded again. The fork server itself sees no
response, so nothing that a worker is made to do reaches the next one. When the fork server ends, the kernel kills its
workers.

A reward whose loading starts threads or uses a CUDA device can't be loaded before a fork. Then `late` is asked for:
each worker loads the rewards itself.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from typing import NoReturn

from millrace.errors import InputError
from millrace.forking.process_settings import die_with_parent
from millrace.forking.server import Order, control_socket, num_threads, read_recipe, reply, serve
from millrace.rewards.base import Reward, Score, failed, safe_score
from millrace.rewards.factory import make_part
from millrace.rewards.isolation.messages import Task, read_task, score_line, task_line
from millrace.rewards.isolation.sandbox import Limits, Sandbox, hide
from millrace.types import Prompt

READY = b"\n"
"""What a worker sends once it is ready for a task."""
CHUNK = 2**18
"""Bytes read at once."""


def main() -> None:
    """Loads the rewards of the recipe, replies with versions, an error, or that it is `late`; then forks on command."""
    # When the scorer ends, this ends too, even while it loads.
    die_with_parent()
    hide()
    control = control_socket()
    recipe = read_recipe(control)
    rewards = {name: make_part(name, options) for name, options in recipe["rewards"].items()}
    try:
        sandbox = Sandbox(Limits(**recipe["limits"]))
        _try_out(sandbox)
        versions = _versions_in_a_child(rewards) if recipe["late"] else _load(rewards)
    except InputError as error:
        reply(control, {"error": str(error)})
        return
    if not can_fork():
        reply(control, {"late": True})
        return
    reply(control, {"versions": versions})
    order = serve(control, adopted=False)
    if order is not None:
        _work(order, rewards, sandbox, late=recipe["late"])


def can_fork() -> bool:
    """Whether a child of this process works: there is one thread, and no CUDA context."""
    torch = sys.modules.get("torch")
    return num_threads() == 1 and not (torch is not None and torch.cuda.is_initialized())


def _try_out(sandbox: Sandbox) -> None:
    server, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            sandbox.enter(server)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        reason = os.strerror(os.waitstatus_to_exitcode(status))
        raise InputError(f"rewards are judged under Linux's seccomp, which refuses ({reason}); expected it to be there")


def _load(rewards: Mapping[str, Reward]) -> dict[str, str]:
    """Loads the rewards, and returns their versions."""
    # Standard output is for the stage's own lines.
    with open(2, "w", closefd=False) as log, redirect_stdout(log):
        for reward in rewards.values():
            reward.load()
    return {name: reward.version for name, reward in rewards.items()}


def _versions_in_a_child(rewards: Mapping[str, Reward]) -> dict[str, str]:
    """What `_load` returns, or raises, in a child: nothing of it is left here."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            theirs.sendall(json.dumps([_load(rewards), None]).encode("ascii"))
        except InputError as error:
            theirs.sendall(json.dumps([{}, str(error)]).encode("ascii"))
        finally:
            os._exit(0)
    theirs.close()
    with ours, ours.makefile("rb") as file:
        answer = file.read()
    _, status = os.waitpid(pid, 0)
    if not answer:
        code = os.waitstatus_to_exitcode(status)
        raise InputError(f"scoring: loading {', '.join(rewards)} ended its process (exit code {code})")
    versions: dict[str, str]
    versions, sentence = json.loads(answer)
    if sentence is not None:
        raise InputError(sentence)
    return versions


def _work(order: Order, rewards: Mapping[str, Reward], sandbox: Sandbox, *, late: bool) -> NoReturn:
    try:
        if late:
            _load(rewards)
        # Discard what is printed while scoring: responses could write anything into the log.
        for number in (1, 2):
            os.dup2(0, number)
        sandbox.enter(order.parent)
        _score_all(order.birth, rewards, sandbox)
    finally:
        os._exit(0)


def _score_all(descriptor: int, rewards: Mapping[str, Reward], sandbox: Sandbox) -> None:
    """Score until the scorer closes its end. Runs in the main thread, where libraries may set an alarm."""
    _warm_up(rewards, sandbox)
    _write(descriptor, READY)
    inbox = b""
    while chunk := os.read(descriptor, CHUNK):
        *lines, inbox = (inbox + chunk).split(b"\n") if b"\n" in chunk else (inbox + chunk,)
        for line in lines:
            sandbox.bound_cpu()
            _write(descriptor, score_line(_score(read_task(line), rewards)))


def _warm_up(rewards: Mapping[str, Reward], sandbox: Sandbox) -> None:
    """Make the first response as fast as later ones: a forked process copies each page that it first touches."""
    for reward in rewards.values():
        reward.warm_up()
    sandbox.bound_cpu()
    prompt = Prompt(prompt_id="", text="", answer="", source="")
    read_task(task_line(Task(reward="", prompt=prompt, response="")))
    score_line(Score(reward=0.0))


def _score(task: Task, rewards: Mapping[str, Reward]) -> Score:
    started = time.perf_counter()
    score = safe_score(rewards[task.reward], task.prompt, task.response)
    try:
        score_line(score)
    except (TypeError, ValueError, RecursionError) as error:
        score = failed(f"the verdict can't be sent ({type(error).__name__}: {error})")
    return replace(score, seconds=time.perf_counter() - started)


def _write(descriptor: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    main()
