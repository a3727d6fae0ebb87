"""A stage process that does as it is told: `python fake_stage.py WORD …`, one after the other.

say   a milestone, an event, and a line that breaks off       beat   for four seconds, at work
hang  the main thread goes no further, another one lives      stop   SIGSTOP to itself
child a process that would outlive it                         deaf   to SIGTERM
pid   a milestone                                             drain  `pid`, then waits to be asked to, and ends with 75
exit:3  kill:9

As several ranks, `WORD … / WORD …` for one after the other; of which only rank 0 should say anything.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

from millrace.events import Beat, Event, beat_line, event_line
from millrace.exits import DRAINED, SHOW_STACKS
from millrace.parallel import tether


def say() -> None:
    event = Event(kind="staleness.bound-hit", payload={"rollouts_dropped": 8})
    for line in ("trainer ready", event_line(event), beat_line(Beat(doing="t", ready=True))[:-3]):
        print(line, flush=True)


def beat() -> None:
    for _ in range(40):
        print(beat_line(Beat(doing="train", ready=True)), flush=True)
        time.sleep(0.1)


def hang() -> None:
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    print(beat_line(Beat(doing="train", ready=True)), flush=True)
    stuck_in_the_middle_of_a_step()


def stuck_in_the_middle_of_a_step() -> None:
    time.sleep(3600)


def stop() -> None:
    print(beat_line(Beat(doing="waiting for scored groups", ready=True)), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def child() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print(process.pid, flush=True)


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def pid() -> None:
    print(os.getpid(), flush=True)


def drain() -> None:
    def end(signal_number: int, frame: FrameType | None) -> None:
        sys.exit(DRAINED)

    signal.signal(signal.SIGTERM, end)
    pid()
    time.sleep(3600)


WORDS = {"say": say, "beat": beat, "hang": hang, "stop": stop, "child": child, "deaf": deaf, "pid": pid, "drain": drain}

if __name__ == "__main__":
    words = " ".join(sys.argv[1:]).split("/")[tether.tie()].split()
    faulthandler.register(SHOW_STACKS)
    for word in words:
        name, _, number = word.partition(":")
        if name == "exit":
            sys.exit(int(number))
        if name == "kill":
            os.kill(os.getpid(), int(number))
        WORDS[name]()
