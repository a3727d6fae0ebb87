"""torchrun for one stage: one process starts its ranks and ends as they did.

    supervisor ─► launcher ─┬─► rank 0, the stage   stdin and stdout are the supervisor's: lifeline and messages
                            └─► rank 1, 2, …        follow rank 0; stderr of all ranks is the stage's log
    SIGTERM ─► launcher ─► rank 0 drains, and its last command ends the others
    SIGUSR1 ─► launcher ─► all ranks write their stacks into the log
    a rank dies ─► launcher ends the others, then itself, by the same exit code or signal
    launcher dies, however ─► the kernel kills all ranks

    python -m millrace.training.parallel.launcher NUM_RANKS ARGUMENTS OF PYTHON …

The agent is torchrun's own (torch.distributed.elastic), on one host and without its restarts: the stage's task restarts
the stage. Ranks on several hosts have `millrace.training.parallel.hosts.launcher`.
"""

import sys
import uuid
from collections.abc import Sequence

from millrace.training.parallel.agent import (
    Rendezvous,
    drain_rank_0,
    end_as,
    make_agent,
    on_signals,
    prepare,
    rendezvous_store,
    run,
    show_stacks,
    verdict,
)

_HOST, _INTERFACE = "127.0.0.1", "lo"


def main(num_ranks: int, arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` as `num_ranks` ranks, to their end. Returns the stage's exit code; see `verdict`."""
    # The ranks are on one host, so they listen on loopback only.
    prepare(_INTERFACE)
    store = rendezvous_store(_HOST)
    agent = make_agent(num_ranks, arguments, Rendezvous(address=_HOST, port=store.port, run_id=uuid.uuid4().hex))
    on_signals(lambda: drain_rank_0(agent), lambda: show_stacks(agent))
    return verdict(run(agent))


if __name__ == "__main__":
    end_as(main(int(sys.argv[1]), sys.argv[2:]))
