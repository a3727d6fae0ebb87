"""A stage process that follows a script: `python fake_stage.py WORD …`, one word after the other.

say    writes a milestone, an event and an incomplete line     beat   sends heartbeats for four seconds
hang   the main thread hangs, another one lives                stop   sends itself SIGSTOP
child  starts a process that would outlive it                  deaf   ignores SIGTERM
pid    writes its process id as a milestone                    drain  `pid`, then waits for SIGTERM and exits with 75
facts  writes what it finds about itself, as JSON              lifeline  waits until standard input ends
exit:3  kill:9  error:76  reports the error of this exit code in `ERRORS`, and exits

Several ranks: `WORD … / WORD …`, rank by rank. Only rank 0 should write messages; the others may write their pid.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from millrace.errors import (
    DRAINED,
    FENCED,
    MISCOUNTED,
    ROLLED_BACK,
    USER_ERROR,
    YIELDED,
    InputError,
    LedgerMismatch,
    PlaceYielded,
    RolledBack,
)
from millrace.forking import process_settings
from millrace.runtime.messages import SHOW_STACKS, Event, Heartbeat, encode_line
from storage.errors import Fenced

ERRORS = {
    USER_ERROR: InputError("0", file="a.yaml", key="training.max_steps", expected="at least 1"),
    FENCED: Fenced("the log has epoch 3"),
    MISCOUNTED: LedgerMismatch("2 rows more"),
    YIELDED: PlaceYielded("host 0 is away"),
    ROLLED_BACK: RolledBack("the reward is gone"),
}


def write_line(line: str) -> None:
    """One write, newline included: the ranks share a pipe, where parts of two lines could run together."""
    os.write(1, f"{line}\n".encode())


def say() -> None:
    event = Event(kind="staleness.bound-hit", payload={"rollouts_dropped": 8})
    for line in ("trainer ready", encode_line(event), encode_line(Heartbeat(doing="t", ready=True))[:-3]):
        write_line(line)


def beat() -> None:
    for _ in range(40):
        write_line(encode_line(Heartbeat(doing="train", ready=True)))
        time.sleep(0.1)


def hang() -> None:
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    write_line(encode_line(Heartbeat(doing="train", ready=True)))
    stuck_in_the_middle_of_a_step()


def stuck_in_the_middle_of_a_step() -> None:
    time.sleep(3600)


def stop() -> None:
    write_line(encode_line(Heartbeat(doing="waiting for scored groups", ready=True)))
    os.kill(os.getpid(), signal.SIGSTOP)


def child() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    write_line(str(process.pid))


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def pid() -> None:
    write_line(str(os.getpid()))


def drain() -> None:
    def end(signal_number: int, frame: FrameType | None) -> None:
        sys.exit(DRAINED)

    signal.signal(signal.SIGTERM, end)
    pid()
    time.sleep(3600)


def facts() -> None:
    torch = sys.modules.get("torch")
    result = {
        "parent": os.getppid(),
        "session": os.getsid(0),
        "group": os.getpgrp(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "omp": os.environ["OMP_NUM_THREADS"],
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cuda": torch is not None and torch.cuda.is_initialized(),
        "argv": sys.argv[1:],
        "descriptors": sorted(int(file.name) for file in Path("/proc/self/fd").iterdir()),
    }
    write_line(json.dumps(result))
    # Its supervisor looks at it while it lives.
    lifeline()


def lifeline() -> None:
    while os.read(0, 1):
        pass


WORDS = {
    "say": say, "beat": beat, "hang": hang, "stop": stop, "child": child, "deaf": deaf, "pid": pid, "drain": drain,
    "facts": facts, "lifeline": lifeline,
}  # fmt: skip

if __name__ == "__main__":
    words = " ".join(sys.argv[1:]).split("/")[process_settings.tie_to_launcher()].split()
    faulthandler.register(SHOW_STACKS)
    for word in words:
        name, _, number = word.partition(":")
        if name == "error":
            write_line(encode_line(ERRORS[int(number)]))
        if name in ("exit", "error"):
            sys.exit(int(number))
        if name == "kill":
            os.kill(os.getpid(), int(number))
        WORDS[name]()
