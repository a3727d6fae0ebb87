"""The inside of a fork server: a process that imports once, then forks a child per request.

    client ──recipe──────────────────────► load: imports what every child needs
           ◄──reply──────────────────────┘
           ──order, birth socket, fds────► serve ──fork─► go-between ──fork─► child: returns from `serve`
           ◄──pid, on the birth socket───────────────────── (ends) ───────────┘
           ──end of file─────────────────► serve returns None

The go-between ends at once, so the kernel gives the child to the client, which has made itself a subreaper for that
moment (prctl(2), PR_SET_CHILD_SUBREAPER). The client waits for its children and signals them as if it had started them
itself, and they survive the fork server.

A process must have one thread when it forks: what other threads hold, such as locks, would stay held in the child.
"""

import gc
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.failpoints import failpoint

LONGEST_MESSAGE = 2**18
"""Bytes of a message on the control socket, which keeps messages apart."""
MOST_DESCRIPTORS = 8
"""Most descriptors that come with an order, the birth socket included."""
_ADOPTED_SECONDS = 0.0002


@dataclass(frozen=True)
class Order:
    """What a forked child was asked for."""

    values: Mapping[str, Any]
    """Plain JSON."""
    birth: int
    """Its birth socket, on which it has sent its process id as a line. The child closes it, or goes on using it."""
    descriptors: tuple[int, ...]
    """The descriptors that came with the order."""
    client: int
    """Process id of the client, now the child's parent."""


def control_socket() -> socket.socket:
    """Standard input as the control socket. From then on standard input reads as empty."""
    control = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    return control


def read_recipe(control: socket.socket) -> dict[str, Any]:
    """The client's first message: what to load. Plain JSON."""
    recipe: dict[str, Any] = json.loads(control.recv(LONGEST_MESSAGE))
    return recipe


def reply(control: socket.socket, values: Mapping[str, Any]) -> None:
    """Answers the recipe."""
    control.send(json.dumps(values).encode("ascii"))


def num_threads() -> int:
    """Threads of this process, those of native libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def serve(control: socket.socket) -> Order | None:
    """Forks a child per order. Returns its order in each child, and None in the fork server once the client has gone.

    The child has left the client's and the fork server's sessions and process groups: it leads its own.
    """
    # Nothing loaded so far ever becomes garbage. Without freeze, a child's collector would copy every page of it.
    gc.collect()
    gc.freeze()
    client = os.getppid()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, LONGEST_MESSAGE, MOST_DESCRIPTORS)
        except ConnectionResetError:
            # The client ended before it read the last reply.
            return None
        if not message:
            return None
        failpoint("fork_server.asked")
        go_between = os.fork()
        if go_between == 0:
            go_between = os.getpid()
            if os.fork():
                failpoint("fork_server.forked")
                os._exit(0)
            control.close()
            order = Order(json.loads(message), birth=descriptors[0], descriptors=tuple(descriptors[1:]), client=client)
            _begin(order, go_between)
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(go_between, 0)
        failpoint("fork_server.served")


def _begin(order: Order, go_between: int) -> None:
    """Waits until the client is this process's parent, and tells it so. Ends this process if the client has gone."""
    while (parent := os.getppid()) == go_between:
        time.sleep(_ADOPTED_SECONDS)
    if parent != order.client:
        os._exit(1)
    os.setsid()
    try:
        os.write(order.birth, b"%d\n" % os.getpid())
    except BrokenPipeError:
        os._exit(1)
