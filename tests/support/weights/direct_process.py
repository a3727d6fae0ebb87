"""A member of `direct`, or of `gloo` with a worker's engine alone, as a process of `direct.py`. It prints JSON lines.

    train-<r> DATA TENSOR POLICY    offer <version> ─► {"offered": …}
    sync_weights-0 GENERATORS       {"version": …, "missing": […]} whenever that changes
    generate-<g> LAST_VERSION       {"version": …, "digest": …} or {"refused": …}
    trainer rank and generator      measure ─► {"added_bytes": …, "written_bytes": …, "sent_bytes": …}

`added_bytes` is the most memory it has had at once since it stood ready, shared memory included; `written_bytes` all
that it has written to sockets, files and pipes since then, as the kernel counts. A generator ends with an error if a
version ran backwards.
"""

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.weights.direct import finder, publish_address
from support.weights.direct_policies import POLICIES, id_of, shards
from support.weights.live import serve

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.direct.member import Member
from millrace.weights.direct.receiver import DirectReceiver, LiveReceiver
from millrace.weights.direct.relay import DirectRelay
from millrace.weights.direct.sender import ShardSender
from millrace.weights.fingerprint import fingerprint
from storage import failpoints

_SAYING = threading.Lock()


def say(**values: object) -> None:
    with _SAYING:
        print(json.dumps(values), flush=True)


class Measured:
    """This process from now on."""

    def __init__(self) -> None:
        self._resident = psutil.Process().memory_info().rss
        self._written = psutil.Process().io_counters().write_chars

    def say(self, member: Member) -> None:
        # `getrusage` would count the parent's memory at the start of this process.
        lines = Path("/proc/self/status").read_text().splitlines()
        most = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
        written = psutil.Process().io_counters().write_chars - self._written
        say(added_bytes=most - self._resident, written_bytes=written, sent_bytes=member.wire_bytes)


def train(folder: Path, deadline: float, transport: str, rank: int, data: str, tensor: str, policy: str) -> None:
    layout = POLICIES[policy].layout(int(data), int(tensor))
    # As a trainer's live shards, which change in place.
    live = {name: part.clone() for name, part in shards(POLICIES[policy].tensors(0), layout, rank).items()}
    if transport != "direct":
        # Imports vLLM, whose memory does not depend on the policy.
        import millrace.weights.live.trainer  # noqa: F401
    measured = Measured()
    sender = ShardSender(
        finder(folder), layout, rank, device=torch.device("cpu"), deadline_seconds=deadline, transport=transport
    )
    say(ready=True)
    for line in sys.stdin:
        command, _, version = line.strip().partition(" ")
        if command == "measure":
            measured.say(sender)
            continue
        if policy != "large":
            live = shards(POLICIES[policy].tensors(int(version)), layout, rank)
        sender.publish(Weights(manifest=Manifest(id=id_of(int(version))), tensors=live))
        say(offered=int(version))


def sync_weights(folder: Path, deadline: float, transport: str, num_generators: str) -> None:
    relay = DirectRelay(int(num_generators), deadline_seconds=deadline, log=partial(print, file=sys.stderr))
    publish_address(folder, relay.address)
    say(ready=True)
    newest, missing = None, None
    while True:
        weights = relay.poll(newest)
        if weights is None:
            time.sleep(0.002)
        else:
            newest, missing = weights.id, None
            relay.publish(weights)
        if newest is not None and relay.missing != missing:
            missing = relay.missing
            say(version=newest.policy_version, missing=sorted(missing))


def generate(folder: Path, deadline: float, transport: str, number: int, last_version: str) -> None:
    if transport != "direct":
        receive_live(folder, deadline, number)
        return
    measured = Measured()
    receiver = DirectReceiver(finder(folder), number, folder / f"received-{number}", deadline_seconds=deadline)
    say(ready=True)

    def answer() -> None:
        for _ in sys.stdin:
            measured.say(receiver)

    threading.Thread(target=answer, daemon=True).start()
    newest: WeightsId | None = None
    while newest is None or newest.policy_version < int(last_version):
        try:
            weights = receiver.poll(newest)
        except WeightsCorrupt as error:
            say(refused=str(error))
            continue
        if weights is None:
            time.sleep(0.002)
            continue
        if not weights.id.newer_than(newest):
            raise AssertionError(f"{weights.id} came after {newest}")
        newest = weights.id
        say(version=newest.policy_version, digest=fingerprint(weights.tensors).digest)
    # The receiver is not closed: the interpreter must end well all the same.


def receive_live(folder: Path, deadline: float, number: int) -> None:
    # Late: it imports vLLM.
    from support.weights.live_engine import WorkerAlone

    engine = WorkerAlone()
    receiver = LiveReceiver(finder(folder), number, deadline_seconds=deadline)
    say(ready=True)
    held: WeightsId | None = None
    while True:
        newest = serve(engine, receiver, held)
        if newest is not None and newest != held:
            held = newest
            say(version=newest.policy_version, digest=fingerprint(engine.received).digest)


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, folder, deadline, transport = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    arguments = sys.argv[5:]
    failpoints.arm(role)
    kind, _, own = role.rpartition("-")
    match kind:
        case "train":
            train(folder, deadline, transport, int(own), *arguments)
        case "generate":
            generate(folder, deadline, transport, int(own), *arguments)
        case _:
            sync_weights(folder, deadline, transport, *arguments)
