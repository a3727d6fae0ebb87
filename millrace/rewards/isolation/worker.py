"""The fork server: a process that loads the rewards once. The workers it forks score responses.

`python -m millrace.rewards.isolation.worker`

    scorer ──stdin: recipes, limits──►  fork server: loads, sends the versions, then waits for
           ──{}, with a socket───────►      │ fork ─► worker: enters the sandbox, sends READY, then a line per score
           ──{"reap": pid}───────────►      │ wait ─► how it ended
           ──end of file─────────────►      └ ends, and all workers with it

A killed worker is replaced in milliseconds, since nothing has to be loaded again. The fork server itself sees no
response, so nothing that a worker is made to do reaches the next one.
"""

import gc
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any, NoReturn

from millrace.errors import InputError
from millrace.parent_death import die_with_parent
from millrace.rewards.base import Reward, failed, safe_score
from millrace.rewards.factory import make_part
from millrace.rewards.isolation.messages import Task, TimedScore, read_task, score_line
from millrace.rewards.isolation.seccomp import Limits, Sandbox

LONGEST_COMMAND = 2**16
"""Bytes of a message on the control socket, which keeps messages apart."""
READY = b"\n"
"""What a worker sends first, once it is ready for a task."""
CHUNK = 2**18
"""Bytes read at once."""


def main() -> None:
    """Load what the first message asks for, reply with versions or an error, then fork on command."""
    # Ctrl-C is for the command line. When the scorer ends, this ends too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    asked = json.loads(control.recv(LONGEST_COMMAND))
    try:
        sandbox = Sandbox(Limits(**asked["limits"]))
        _try_out(sandbox)
        rewards = _load(asked["rewards"])
    except InputError as error:
        control.send(json.dumps({"error": str(error)}).encode("ascii"))
        return
    # Nothing loaded so far ever becomes garbage. Without freeze, a worker's collector would copy every page of it.
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"versions": {name: reward.version for name, reward in rewards.items()}}).encode("ascii"))
    _serve(control, rewards, sandbox)


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


def _load(recipes: Mapping[str, Mapping[str, Any]]) -> dict[str, Reward]:
    rewards = {name: make_part(name, options) for name, options in recipes.items()}
    # Standard output is for the stage's own lines.
    with open(2, "w", closefd=False) as log, redirect_stdout(log):
        for reward in rewards.values():
            reward.load()
    return rewards


def _serve(control: socket.socket, rewards: Mapping[str, Reward], sandbox: Sandbox) -> None:
    server = os.getpid()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, LONGEST_COMMAND, 1)
        except ConnectionResetError:
            # The scorer ended before it read the last reply.
            return
        if not message:
            return
        asked = json.loads(message)
        if "reap" in asked:
            _, status = os.waitpid(asked["reap"], 0)
            if asked["answer"]:
                control.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode("ascii"))
            continue
        [descriptor] = descriptors
        pid = os.fork()
        if pid == 0:
            control.close()
            _work(descriptor, rewards, sandbox, server)
        os.close(descriptor)
        control.send(json.dumps({"pid": pid}).encode("ascii"))


def _work(descriptor: int, rewards: Mapping[str, Reward], sandbox: Sandbox, server: int) -> NoReturn:
    try:
        # Discard what is printed while scoring: responses could write anything into the log.
        for number in (1, 2):
            os.dup2(0, number)
        sandbox.enter(server)
        _score_all(descriptor, rewards, sandbox)
    finally:
        os._exit(0)


def _score_all(descriptor: int, rewards: Mapping[str, Reward], sandbox: Sandbox) -> None:
    """Score until the scorer closes its end. Runs in the main thread, where libraries may set an alarm."""
    for reward in rewards.values():
        reward.warm_up()
    _write(descriptor, READY)
    inbox = b""
    while chunk := os.read(descriptor, CHUNK):
        *lines, inbox = (inbox + chunk).split(b"\n") if b"\n" in chunk else (inbox + chunk,)
        for line in lines:
            sandbox.bound_cpu()
            _write(descriptor, score_line(_score(read_task(line), rewards)))


def _score(task: Task, rewards: Mapping[str, Reward]) -> TimedScore:
    started = time.perf_counter()
    score = safe_score(rewards[task.reward], task.prompt, task.response)
    try:
        score_line(TimedScore(score=score, seconds=0.0))
    except (TypeError, ValueError, RecursionError) as error:
        score = failed(f"the verdict can't be sent ({type(error).__name__}: {error})")
    return TimedScore(score=score, seconds=time.perf_counter() - started)


def _write(descriptor: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    main()
