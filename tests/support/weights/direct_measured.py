"""A trainer's rank or a generator of `direct` that measures itself. Run as a process by `test_direct_memory.py`.

    rank        offer <version> ─► {"offered": …}          its live shards change in place, as a trainer's do
    generator   ─► {"version": …} for each that it takes
    both        measure ─► {"added_bytes": …, "written_bytes": …, "sent_bytes": …}

`added_bytes` is the most memory it has had at once since it stood ready, shared memory included; `written_bytes` all
that it has written to sockets, files and pipes since then, as the kernel counts.
"""

import json
import sys
import threading
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.direct import finder, id_of
from support.weights.direct_policies import POLICIES

from millrace.weights.base import Manifest, Weights
from millrace.weights.direct.generator import DirectReader
from millrace.weights.direct.member import Member
from millrace.weights.direct.trainer import ShardSender

_SAYING = threading.Lock()


def say(**values: object) -> None:
    with _SAYING:
        print(json.dumps(values), flush=True)


def written() -> int:
    """Bytes."""
    return int(psutil.Process().io_counters().write_chars)


def most_resident() -> int:
    """Bytes. `getrusage` would count what the parent had when it started this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


class Measured:
    """This process from now on."""

    def __init__(self) -> None:
        self._resident = psutil.Process().memory_info().rss
        self._written = written()

    def say(self, member: Member) -> None:
        added = most_resident() - self._resident
        say(added_bytes=added, written_bytes=written() - self._written, sent_bytes=member.wire_bytes)


def be_rank(folder: Path, rank: int, size: int) -> None:
    layout = POLICIES["large"].layout(size, 1)
    live = {
        name: torch.randn([end - begin for begin, end in box], generator=torch.Generator().manual_seed(rank))
        for name, box in layout.held(rank).items()
    }
    measured = Measured()
    sender = ShardSender(finder(folder), layout, rank, device=torch.device("cpu"), deadline_seconds=30.0)
    say(ready=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "measure":
            measured.say(sender)
            continue
        for part in live.values():
            part.add_(1)
        sender.offer(Weights(manifest=Manifest(id=id_of(int(argument))), tensors=live))
        say(offered=int(argument))


def be_generator(folder: Path, number: int) -> None:
    measured = Measured()
    reader = DirectReader(finder(folder), number, folder / f"received-{number}", deadline_seconds=30.0)
    say(ready=True)

    def answer() -> None:
        for _ in sys.stdin:
            measured.say(reader)

    threading.Thread(target=answer, daemon=True).start()
    newest, pause = None, threading.Event()
    while True:
        weights = reader.take(newest)
        if weights is None:
            pause.wait(0.002)
            continue
        newest = weights.id
        say(version=newest.policy_version)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "rank":
        be_rank(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        be_generator(Path(sys.argv[1]), int(sys.argv[3]))
