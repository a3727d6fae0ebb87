"""Ports of loopback, and the Prefect server."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from millrace.doctor.line import Line
from millrace.doctor.machine import Machine

_PREFECT, _DASHBOARD = 4200, 8050


def network_lines(machine: Machine) -> Iterator[Line]:
    """A campaign needs a free port of loopback, and the Prefect server that is configured, if one is."""
    free = machine.can_listen(0)
    yield Line(
        group="network",
        what="loopback",
        found="ports are free" if free else "no server can listen on 127.0.0.1",
        state="ok" if free else "wrong",
        needed=True,
        remedy="" if free else "Bring the interface lo up: ip link set lo up.",
    )
    yield _prefect(machine)
    for port, what, other in (
        (_PREFECT, "port of make server", "make server PORT=4300"),
        (_DASHBOARD, "port of millrace dashboard", "millrace dashboard --port 8051"),
    ):
        if machine.can_listen(port):
            yield Line(group="network", what=what, found=f"{port} is free", state="ok")
        elif port == _PREFECT and machine.answers(f"http://127.0.0.1:{port}/api"):
            yield Line(group="network", what=what, found=f"a Prefect server answers at {port}", state="ok")
        else:
            yield Line(
                group="network", what=what, found=f"{port} is taken", state="wrong", remedy=f"Choose another: {other}."
            )


def _prefect(machine: Machine) -> Line:
    url = machine.environment("PREFECT_API_URL")
    if not url:
        return Line(
            group="network",
            what="Prefect server",
            found="none configured: each campaign starts a private one",
            state="ok",
            needed=True,
        )
    # A URL may hold a password.
    shown = f"{urlsplit(url).scheme}://{urlsplit(url).netloc.rpartition('@')[2]}"
    answers = machine.answers(url)
    return Line(
        group="network",
        what="Prefect server",
        found=f"PREFECT_API_URL: {shown} {'answers' if answers else 'does not answer'}",
        state="ok" if answers else "wrong",
        needed=True,
        remedy="" if answers else "Start it (make server), or unset PREFECT_API_URL.",
    )
