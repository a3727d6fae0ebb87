"""One campaign at a terminal: checked first, then shown while it runs, then summed up."""

import signal
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from configs.schema import RunConfig
from flows.prepare import Resume, check
from flows.view import View, panel
from storage import failpoints
from storage.store import Store

INTERRUPTED, TERMINATED, CANCELLED = 130, 143, 4
"""Exit codes after a Ctrl-C, a SIGTERM, and a cancellation in the Prefect UI that drained every stage."""


class Terminated(BaseException):
    """SIGTERM, as an exception: Prefect passes the signal on to us once the flow has drained its stages."""


class CancelledInTheUI(Exception):
    """A person cancelled the flow run, and its stages have drained."""


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def run_campaign(config: RunConfig, run_id: str, *, resume: Resume) -> int:
    """Runs it to its end. Returns 0, or one of the exit codes above where it was stopped and every stage has drained.

    Raises the errors of `flows.prepare.check` before anything has been made.
    """
    failpoints.arm("controller")
    store = check(config, run_id, resume=resume)
    console = Console()
    _say(console, f"run {run_id} at {store.url}")

    signal.signal(signal.SIGTERM, _terminate)
    # A shell script starts its background jobs with SIGINT ignored; this one has stages to drain.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = _run(config, run_id, resume, store, console)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Terminated:
        code = TERMINATED
    except CancelledInTheUI:
        code = CANCELLED
    else:
        console.print(panel(status, {}))
        _say(console, f"summary at {store.url}/summary.json")
        if status["state"] != "finished":
            _say(console, f"this attempt's budget is spent; go on with --run-id {run_id} --resume")
        return 0
    _say(console, f"stopped; go on with --run-id {run_id} --resume")
    return code


def _run(config: RunConfig, run_id: str, resume: Resume, store: Store, console: Console) -> dict[str, Any]:
    # Prefect takes seconds to import: a mistake should not have to wait for it.
    from flows.server import prefect_server

    with prefect_server():
        from prefect.exceptions import CancelledRun

        from flows.campaign import campaign

        with View(store, console):
            try:
                status = campaign(config, run_id, resume)
            except CancelledRun as error:
                raise CancelledInTheUI from error
            assert isinstance(status, dict)
            return status


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
