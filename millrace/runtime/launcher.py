"""torchrun for one stage: one process starts its ranks and ends as they did.

    supervisor ─► launcher ─┬─► rank 0, the stage   stdin and stdout are the supervisor's: lifeline and messages
                            └─► rank 1, 2, …        follow rank 0; stderr of all ranks is the stage's log
    SIGTERM ─► launcher ─► rank 0 drains, and its last command ends the others
    SIGUSR1 ─► launcher ─► all ranks write their stacks into the log
    a rank dies ─► launcher ends the others, then itself, by the same exit code or signal
    launcher dies, however ─► the kernel kills all ranks

    python -m millrace.runtime.launcher NUM_RANKS ARGUMENTS OF PYTHON …

The agent is torchrun's own (torch.distributed.elastic), without its restarts: the stage's task restarts the stage.
`millrace.runtime.host_launcher` starts ranks on several hosts, with the functions below.
"""

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from millrace.errors import EXIT_CODES, FINAL
from millrace.forking.process_settings import mark_launcher
from millrace.runtime.messages import SHOW_STACKS

_HOST = "127.0.0.1"
"""Where ranks of a single host meet."""
_LOOK_SECONDS = 0.1
_STACKS_SECONDS = 0.5
"""For all ranks to write their stacks; the supervisor waits twice as long."""
_MEET_SECONDS = 60
"""For all hosts to come to a rendezvous, and to end together."""
_PERMANENT = {EXIT_CODES[kind] for kind in FINAL}
"""Exit codes after which a restart would not help."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one start meet."""

    address: str
    port: int
    run_id: str
    """Different for each start."""
    launchers: Sequence[str] = ("",)
    """Id of the launcher on each host, in the order of their ranks."""


def prepare() -> None:
    """Prepares this process to be a launcher."""
    mark_launcher()
    # torchrun's handlers would end all ranks on SIGTERM; here rank 0 drains, and the others wait for its commands.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"


def rendezvous_store(address: str) -> TCPStore:
    """Opens the store where ranks meet, at this address only; torchrun's own store would listen at all of them.

    torchrun's agent, in this process, asks for a store at the same port and gets this one.
    """
    listening = socket.create_server((address, 0))
    return TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


class RankProcesses:
    """`num_ranks` ranks of this host, each `python ARGUMENTS`, under the agent of `torchrun --rdzv-backend static`.

    `launcher`: this host's id in the rendezvous. No rank is restarted. SIGTERM calls `drain`, by default `self.drain`.
    """

    def __init__(
        self,
        num_ranks: int,
        arguments: Sequence[str],
        rendezvous: Rendezvous,
        launcher: str = "",
        drain: Callable[[], None] | None = None,
    ) -> None:
        hosts = len(rendezvous.launchers)
        parameters = RendezvousParameters(
            backend="static",
            endpoint=f"{rendezvous.address}:{rendezvous.port}",
            run_id=rendezvous.run_id,
            min_nodes=hosts,
            max_nodes=hosts,
            rank=rendezvous.launchers.index(launcher),
            timeout=_MEET_SECONDS,
        )
        spec = WorkerSpec(
            role="train",
            local_world_size=num_ranks,
            entrypoint=sys.executable,
            args=tuple(arguments),
            rdzv_handler=get_rendezvous_handler(parameters),
            max_restarts=0,
            monitor_interval=_LOOK_SECONDS,
        )
        logs = DefaultLogsSpecs(log_dir=os.devnull)
        self._agent = LocalElasticAgent(spec, logs, exit_barrier_timeout=_MEET_SECONDS)
        signal.signal(signal.SIGTERM, lambda *_: (drain or self.drain)())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(SHOW_STACKS, lambda *_: self.show_stacks())

    def run(self) -> int:
        """Runs the ranks to their end. Returns the stage's exit code; see `stage_exit_code`."""
        return stage_exit_code({rank: failure.exitcode for rank, failure in self._agent.run().failures.items()})

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks; none before they have started."""
        return [worker.id for worker in self._agent.get_worker_group().workers if worker.id]

    def drain(self) -> None:
        """Asks this host's first rank to drain; ends this process by SIGTERM if no rank has started yet."""
        pids = self.pids
        if not pids:
            end_as(-signal.SIGTERM)
        _send_signal(pids[0], signal.SIGTERM)

    def show_stacks(self) -> None:
        """Makes all ranks write their stacks into the log, one after the other."""
        pids = self.pids
        for pid in pids:
            _send_signal(pid, SHOW_STACKS)
            time.sleep(_STACKS_SECONDS / len(pids))

    def kill(self) -> None:
        """Kills the ranks; `run` then returns."""
        for pid in self.pids:
            _send_signal(pid, signal.SIGKILL)


def _send_signal(pid: int, signal_number: int) -> None:
    # If the rank has just ended, torchrun's agent will notice.
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def stage_exit_code(codes: Mapping[int, int]) -> int:
    """The stage's exit code, out of `codes` by rank in the order they were seen, signals negative; 0 if there are none.

    First a permanent failure, of rank 0 or else of another rank. Then the signal that killed a rank: errors of the
    other ranks, and their end by SIGTERM, follow from that. Then the first code.
    """
    permanent = [code for code in (codes.get(0, 0), *codes.values()) if code in _PERMANENT]
    killed = [code for code in codes.values() if code < 0 and code != -signal.SIGTERM]
    return next(iter([*permanent, *killed, *codes.values()]), 0)


def end_as(code: int) -> NoReturn:
    """Ends this process with an exit code or, if it is negative, by that signal."""
    if code < 0:
        # SIGKILL has no handler to reset.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def main(num_ranks: int, arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` as `num_ranks` ranks, to their end. Returns the stage's exit code."""
    prepare()
    store = rendezvous_store(_HOST)
    return RankProcesses(
        num_ranks, arguments, Rendezvous(address=_HOST, port=store.port, run_id=uuid.uuid4().hex)
    ).run()


if __name__ == "__main__":
    end_as(main(int(sys.argv[1]), sys.argv[2:]))
