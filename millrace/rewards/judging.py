"""The nursery: a process that loads the rewards once, and whose children judge. `python -m millrace.rewards.judging`.

    scorer ──stdin: recipes, limits──►  nursery: loads, says the versions, then waits for
           ──"fork", with a socket───►      │ fork ─► judge: enters the sandbox, says ready, then a verdict a line
           ──"reap"──────────────────►      │ wait ─► how it ended
           ──end of file─────────────►      └ ends, and with it every judge

A judge that is killed is replaced in milliseconds, for nothing has to be loaded again. The nursery itself sees no
response: nothing that a judge is told to do reaches the next one it forks.
"""

import ctypes
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
from millrace.rewards.base import Reward, failed, safe_score
from millrace.rewards.factory import make_reward
from millrace.rewards.sandbox import Limits, Sandbox
from millrace.rewards.wire import Judged, Task, read_task, verdict_line

LONGEST_COMMAND = 2**16
"""Bytes of a message on the control socket, which keeps messages apart."""
READY = b"\n"
"""What a judge says first: that it is ready for a task."""
_PR_SET_PDEATHSIG = 1
_CHUNK = 2**18


def main() -> None:
    """Loads what the first message asks for, answers with versions or a person's mistake, then forks when told to."""
    # Ctrl-C is for the command; its end ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    control = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    asked = json.loads(control.recv(LONGEST_COMMAND))
    limits = Limits(**asked["limits"])
    try:
        sandbox = Sandbox(limits)
        _try_out(sandbox)
        rewards = _load(asked["rewards"])
    except InputError as error:
        control.send(json.dumps({"mistake": str(error)}).encode("ascii"))
        return
    # What is there now never becomes garbage: the collector of a child would copy every page of it.
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"versions": {name: reward.version for name, reward in rewards.items()}}).encode("ascii"))
    _serve(control, rewards, sandbox)


def _try_out(sandbox: Sandbox) -> None:
    nursery, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            sandbox.enter(nursery)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        reason = os.strerror(os.waitstatus_to_exitcode(status))
        raise InputError(f"rewards are judged under Linux's seccomp, which refuses ({reason}); expected it to be there")


def _load(recipes: Mapping[str, Mapping[str, Any]]) -> dict[str, Reward]:
    rewards = {name: make_reward(name, **options) for name, options in recipes.items()}
    # Standard output belongs to the stage's own lines.
    with open(2, "w", closefd=False) as log, redirect_stdout(log):
        for reward in rewards.values():
            reward.load()
    return rewards


def _serve(control: socket.socket, rewards: Mapping[str, Reward], sandbox: Sandbox) -> None:
    nursery = os.getpid()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, LONGEST_COMMAND, 1)
        except ConnectionResetError:
            # The scorer has ended before it heard the last answer.
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
            _be_a_judge(descriptor, rewards, sandbox, nursery)
        os.close(descriptor)
        control.send(json.dumps({"pid": pid}).encode("ascii"))


def _be_a_judge(descriptor: int, rewards: Mapping[str, Reward], sandbox: Sandbox, nursery: int) -> NoReturn:
    try:
        # What is printed while judging goes nowhere: it would be a log of whatever responses want to see there.
        for number in (1, 2):
            os.dup2(0, number)
        sandbox.enter(nursery)
        _judge(descriptor, rewards, sandbox)
    finally:
        os._exit(0)


def _judge(descriptor: int, rewards: Mapping[str, Reward], sandbox: Sandbox) -> None:
    """In the main thread, where libraries may set an alarm; until the scorer closes its end."""
    for reward in rewards.values():
        reward.warm_up()
    _write(descriptor, READY)
    inbox = b""
    while chunk := os.read(descriptor, _CHUNK):
        *lines, inbox = (inbox + chunk).split(b"\n") if b"\n" in chunk else (inbox + chunk,)
        for line in lines:
            sandbox.bound_cpu()
            _write(descriptor, verdict_line(_verdict(read_task(line), rewards)))


def _verdict(task: Task, rewards: Mapping[str, Reward]) -> Judged:
    started = time.perf_counter()
    score = safe_score(rewards[task.reward], task.prompt, task.response)
    try:
        verdict_line(Judged(score=score, seconds=0.0))
    except (TypeError, ValueError, RecursionError) as error:
        score = failed(f"the verdict can't be sent ({type(error).__name__}: {error})")
    return Judged(score=score, seconds=time.perf_counter() - started)


def _write(descriptor: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    main()
