"""torchrun for one stage: its ranks, started by one process that ends as they did.

    supervisor ─► launch ─┬─► rank 0, the stage   stdin and stdout are the supervisor's: lifeline and lines
                          └─► rank 1, 2, …        follow rank 0, heard by nobody; stderr of all is the stage's log
    SIGTERM ─► launch ─► rank 0 drains; its last word ends the others
    SIGUSR1 ─► launch ─► all ranks: stacks, into the log
    one dies ─► launch ends the others, then itself, by the same exit code or signal
    launch dies, however ─► the kernel kills all ranks

    python -m millrace.parallel.launch NUM_RANKS ARGUMENTS OF PYTHON …

The agent that does this is torchrun's own (torch.distributed.elastic), at one host and without its restarts: a stage is
started again by its task.
"""

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from millrace.exits import FENCED, MISCOUNTED, MISTAKE, SHOW_STACKS
from millrace.parallel import tether

_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.1
_STACKS_SECONDS = 0.5
"""For all ranks to write down theirs; the supervisor waits twice as long."""
_FOR_GOOD = (MISTAKE, FENCED, MISCOUNTED)


def main(num_ranks: int, arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` as so many ranks, to their end. Returns the exit code of the stage; see `verdict`."""
    tether.hold()
    # The ranks are on one host: what they say to each other need not be open to the network.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    # torchrun's handlers would end all ranks on SIGTERM, where rank 0 is to drain and the others to wait for its word.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"
    place = _meeting_place()
    agent = _agent(num_ranks, arguments, place.port)
    _pass_on_signals(agent)
    failures = agent.run().failures
    return verdict({rank: failure.exitcode for rank, failure in failures.items()})


def verdict(codes: Mapping[int, int]) -> int:
    """What the stage ended of: one of these exit codes by rank, in the order they were seen, signals negative; or 0.

    First what rank 0, or else another, has said for good, whatever became of the others then. Else what killed a rank,
    for the errors of the others and their end, SIGTERM, come of that. Else the first one's.
    """
    said = (code for code in (codes.get(0, 0), *codes.values()) if code in _FOR_GOOD)
    if (code := next(said, None)) is not None:
        return code
    killed = (code for code in codes.values() if code < 0 and code != -signal.SIGTERM)
    return next(killed, next(iter(codes.values()), 0))


def end_as(code: int) -> NoReturn:
    """Ends this process with an exit code or, where it is negative, by that signal."""
    if code < 0:
        # SIGKILL has no handler to take off.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _agent(num_ranks: int, arguments: Sequence[str], port: int) -> LocalElasticAgent:
    """What `torchrun --rdzv-backend static` makes on its only host."""
    rendezvous = RendezvousParameters(
        backend="static", endpoint=f"{_HOST}:{port}", run_id=uuid.uuid4().hex, min_nodes=1, max_nodes=1, rank=0
    )
    spec = WorkerSpec(
        role="train",
        local_world_size=num_ranks,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=_LOOK_SECONDS,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull))


def _meeting_place() -> TCPStore:
    """Where ranks find each other, at this host's loopback only; torchrun's own would be open to the network.

    What asks this process for a store at the same port gets this one.
    """
    listening = socket.create_server((_HOST, 0))
    return TCPStore(
        _HOST,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def _pass_on_signals(agent: LocalElasticAgent) -> None:
    def pids() -> list[int]:
        return [worker.id for worker in agent.get_worker_group().workers if worker.id]

    def drain(signal_number: int, frame: FrameType | None) -> None:
        ranks = pids()
        if not ranks:
            # Nothing has begun.
            end_as(-signal_number)
        _send(ranks[0], signal_number)

    def show_stacks(signal_number: int, frame: FrameType | None) -> None:
        ranks = pids()
        for pid in ranks:
            _send(pid, signal_number)
            # They write into one log, and all at once nobody could read it.
            time.sleep(_STACKS_SECONDS / len(ranks))

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(SHOW_STACKS, show_stacks)


def _send(pid: int, signal_number: int) -> None:
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        # It has just ended, and torchrun's next look finds that.
        return


if __name__ == "__main__":
    end_as(main(int(sys.argv[1]), sys.argv[2:]))
