"""The inside of a fork server: a process that imports once, then forks a child per order.

    client ──recipe──────────────────────► load: imports what every child needs
           ◄──reply──────────────────────┘
           ──order, birth socket, fds────► serve ──fork─► go-between ──fork─► child: returns from `serve`
           ◄──pid, on the birth socket───────────────────── (ends) ───────────┘
           ──end of file─────────────────► serve returns None

The go-between ends at once, so the kernel gives the child to the client, which has made itself a subreaper for that
moment (prctl(2), PR_SET_CHILD_SUBREAPER). The client's children survive the fork server. That costs a second fork, so
many short-lived children are not adopted: the fork server waits for them on command.

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
    """An order of a child, as the forked child gets it."""

    values: Mapping[str, Any]
    """Plain JSON."""
    birth: int
    """Its birth socket, on which it has sent its process id as a line. The child closes it, or continues to use it."""
    descriptors: tuple[int, ...]
    parent: int
    """Process id of the child's parent: the client if it adopted the child, otherwise the fork server."""


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
    """Answers the client's last message."""
    control.send(json.dumps(values).encode("ascii"))


def num_threads() -> int:
    """Threads of this process, those of native libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def serve(control: socket.socket, *, adopted: bool) -> Order | None:
    """Forks a child per order. Returns its order in each child, and None in the fork server once the client has gone.

    `adopted`: whether the children become the client's own. Each leads its own session and process group.
    """
    # Nothing loaded so far ever becomes garbage. Without freeze, a child's collector would copy every page of it.
    gc.collect()
    gc.freeze()
    server, client = os.getpid(), os.getppid()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, LONGEST_MESSAGE, MOST_DESCRIPTORS)
        except ConnectionResetError:
            # The client ended before it read the last reply.
            return None
        if not message:
            return None
        values = json.loads(message)
        if not descriptors:
            _, status = os.waitpid(values["reap"], 0)
            if values["reply"]:
                reply(control, {"status": os.waitstatus_to_exitcode(status)})
            continue
        failpoint("fork_server.asked")
        if (forked := _fork(adopted)) == 0:
            control.close()
            order = Order(values, descriptors[0], tuple(descriptors[1:]), parent=client if adopted else server)
            _report_birth(order)
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        if adopted:
            os.waitpid(forked, 0)
        failpoint("fork_server.served")


def _fork(adopted: bool) -> int:
    """0 in the child; in the fork server the process id of its child, which may be the go-between."""
    forked = os.fork()
    if forked == 0 and adopted:
        go_between = os.getpid()
        if os.fork():
            failpoint("fork_server.forked")
            os._exit(0)
        while os.getppid() == go_between:
            time.sleep(_ADOPTED_SECONDS)
    return forked


def _report_birth(order: Order) -> None:
    """Sends the client this child's process id. Ends the child if its parent has gone."""
    os.setsid()
    if os.getppid() != order.parent:
        os._exit(1)
    try:
        os.write(order.birth, b"%d\n" % os.getpid())
    except BrokenPipeError:
        os._exit(1)
