"""torchrun for one stage: one process starts its ranks and ends as they did.

    supervisor ─► launcher ─┬─► rank 0, the stage   stdin and stdout are the supervisor's: lifeline and messages
                            └─► rank 1, 2, …        follow rank 0; stderr of all ranks is the stage's log
    SIGTERM ─► launcher ─► rank 0 drains, and its last command ends the others
    SIGUSR1 ─► launcher ─► all ranks write their stacks into the log
    a rank dies ─► launcher ends the others, then itself, by the same exit code or signal
    launcher dies, however ─► the kernel kills all ranks

    python -m millrace.training.parallel.launcher NUM_RANKS ARGUMENTS OF PYTHON …

The agent is torchrun's own (torch.distributed.elastic), on one host and without its restarts: the stage's task restarts
the stage.
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

from millrace import parent_death
from millrace.runtime.exit_codes import FENCED, MISCOUNTED, SHOW_STACKS, USER_ERROR

_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.1
_STACKS_SECONDS = 0.5
"""For all ranks to write their stacks; the supervisor waits twice as long."""
_PERMANENT = (USER_ERROR, FENCED, MISCOUNTED)


def main(num_ranks: int, arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` as `num_ranks` ranks, to their end. Returns the stage's exit code; see `verdict`."""
    parent_death.mark_launcher()
    # The ranks are on one host, so they listen on loopback only.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    # torchrun's handlers would end all ranks on SIGTERM; here rank 0 drains, and the others wait for its commands.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"
    rendezvous = _rendezvous_store()
    agent = _agent(num_ranks, arguments, rendezvous.port)
    _pass_on_signals(agent)
    failures = agent.run().failures
    return verdict({rank: failure.exitcode for rank, failure in failures.items()})


def verdict(codes: Mapping[int, int]) -> int:
    """The stage's exit code, out of `codes` by rank in the order they were seen, signals negative; 0 if there are none.

    First a permanent failure, of rank 0 or else of another rank. Then the signal that killed a rank: errors of the
    other ranks, and their end by SIGTERM, follow from that. Then the first code.
    """
    permanent = (code for code in (codes.get(0, 0), *codes.values()) if code in _PERMANENT)
    if (code := next(permanent, None)) is not None:
        return code
    killed = (code for code in codes.values() if code < 0 and code != -signal.SIGTERM)
    return next(killed, next(iter(codes.values()), 0))


def end_as(code: int) -> NoReturn:
    """Ends this process with an exit code or, if it is negative, by that signal."""
    if code < 0:
        # SIGKILL has no handler to reset.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _agent(num_ranks: int, arguments: Sequence[str], port: int) -> LocalElasticAgent:
    """The agent that `torchrun --rdzv-backend static` makes on a single host."""
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


def _rendezvous_store() -> TCPStore:
    """Where ranks find each other, on loopback only; torchrun's own store would be open to the network.

    torchrun's agent, in this process, asks for a store at the same port and gets this one.
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
            # No rank has started yet.
            end_as(-signal_number)
        _send(ranks[0], signal_number)

    def show_stacks(signal_number: int, frame: FrameType | None) -> None:
        ranks = pids()
        for pid in ranks:
            _send(pid, signal_number)
            # One after the other: they write into the same log.
            time.sleep(_STACKS_SECONDS / len(ranks))

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(SHOW_STACKS, show_stacks)


def _send(pid: int, signal_number: int) -> None:
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        # It has just ended; torchrun's agent will notice.
        return


if __name__ == "__main__":
    end_as(main(int(sys.argv[1]), sys.argv[2:]))
