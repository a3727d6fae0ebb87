"""torchrun for a trainer over several hosts: one launcher per host, which starts the host's ranks and ends as they did.

    supervisor ─► launcher of host 0 ──go──► launcher of host 1, 2, … ◄─ supervisor there
                     └─► rank 0, 1, …  ◄══════► ranks …                  ranks meet in torch's store at host 0

    SIGTERM at host 0 ─► rank 0 drains, and its last command ends all ranks
    SIGTERM elsewhere ─► host 0 has rank 0 drain, and starts the ranks again without that host
    SIGUSR1 at host 0 ─► the ranks of all hosts write their stacks into their logs
    a host is lost, or a rank fails ─► every launcher ends its ranks and itself; their tasks start them again

    python -m millrace.training.parallel.hosts.launcher HOSTS-AS-JSON ARGUMENTS OF PYTHON …

The launchers stay connected (`link.py`), so that the loss of a host is noticed even while no rank waits for another.
"""

import sys
from collections.abc import Sequence

from millrace.errors import InputError
from millrace.runtime.exit_codes import ERROR_PREFIX, USER_ERROR
from millrace.runtime.interfaces import own_interface
from millrace.runtime.messages import milestone_line, send
from millrace.training.parallel.agent import end_as, prepare
from millrace.training.parallel.hosts.leader import Leader
from millrace.training.parallel.hosts.member import Member
from millrace.training.parallel.hosts.network import Hosts


def main(hosts: Hosts, arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` as the ranks of this host, to their end. Returns the stage's exit code; see `verdict`."""
    try:
        interface = own_interface(hosts.network, "placement.train.network")
    except InputError as error:
        send(milestone_line(f"{ERROR_PREFIX}{error}"))
        return USER_ERROR
    prepare(interface.name)
    kind = Member if hosts.host else Leader
    return kind(hosts, interface.address, arguments).run()


if __name__ == "__main__":
    end_as(main(Hosts.from_json(sys.argv[1]), sys.argv[2:]))
