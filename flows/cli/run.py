"""Runs one campaign at a terminal: checks it, shows it while it runs, prints its summary."""

import importlib
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from configs.schema import RunConfig
from flows.campaign.prepare import Resume, check
from flows.display.live_view import View, panel
from millrace.errors import StageDied
from millrace.runs.record import changed_settings, latest_attempt
from storage import failpoints, layout
from storage.progress import read_progress
from storage.stores.base import Store

INTERRUPTED, TERMINATED, CANCELLED = 130, 143, 4
"""Exit codes after Ctrl-C, SIGTERM and a cancellation in the Prefect UI. Every stage has drained by then."""


class Terminated(BaseException):
    """SIGTERM as an exception: Prefect passes the signal on once the flow has drained its stages."""


class CancelledInTheUI(Exception):
    """A person cancelled the flow run, and its stages have drained."""


def run_campaign(
    config: RunConfig, run_id: str, resume: Resume, wait_for_server: Callable[[], None], command: str
) -> int:
    """Runs it to its end. Returns 0, or one of the exit codes above if it was stopped and every stage has drained.

    `wait_for_server` is the value of `flows.deployment.server.prefect_server`. `command`, with --resume added, is what
    a person types to continue the run. Raises the errors of `flows.campaign.prepare.check` before anything is created,
    and StageDied, with a note that holds this command if the run can be continued.
    """
    failpoints.arm("controller")
    console = Console()
    with console.status("checking the config, the model, the reward and the prompts"):
        store = check(config, run_id, resume=resume, meanwhile=_import_flow)
    _print(console, f"run {run_id} at {store.url}")
    if store.exists(layout.RUN):
        for change in changed_settings(latest_attempt(store), config.model_dump(mode="json")):
            _print(console, f"resumed with another setting: {change}")
    _stop_on_signals(console)
    try:
        status = _campaign(config, run_id, resume, store, console, wait_for_server)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Terminated:
        code = TERMINATED
    except CancelledInTheUI:
        code = CANCELLED
    except StageDied as error:
        if store.exists(layout.RUN):
            error.add_note(f"once the cause is mended, continue with:\n{command} --resume")
        raise
    else:
        console.print(panel(status, {}))
        _print(console, f"summary at {store.url}/summary.json")
        if status["state"] != "finished":
            _print(console, f"this attempt's budget is spent{_stored(store)}; continue with:\n{command} --resume")
        return 0
    if store.exists(layout.RUN):
        _print(console, f"stopped{_stored(store)}; continue with:\n{command} --resume")
    else:
        _print(console, f"stopped before the run began; start it with:\n{command}")
    return code


def _import_flow() -> None:
    importlib.import_module("flows.campaign.flow")


def _stop_on_signals(console: Console) -> None:
    def stop(signal_number: int, frame: FrameType | None) -> NoReturn:
        _print(console, "stopping: each stage finishes and commits what it is doing; stop once more to kill them")
        raise KeyboardInterrupt if signal_number == signal.SIGINT else Terminated

    # SIGINT too: a shell script starts its background jobs with it ignored, and this one has stages to drain.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _stored(store: Store) -> str:
    """What the generators stored of responses that the next attempt continues."""
    records = read_progress(store)
    tokens = sum(record.get("tokens_stored", 0) for name, record in records.items() if name.startswith("generate-"))
    return f", with {tokens} tokens of unfinished responses stored" if tokens else ""


def _campaign(
    config: RunConfig, run_id: str, resume: Resume, store: Store, console: Console, wait_for_server: Callable[[], None]
) -> dict[str, Any]:
    # Imported while the server starts.
    from prefect.exceptions import CancelledRun

    from flows.campaign.flow import checked_campaign

    with console.status("waiting for the Prefect server"):
        wait_for_server()
    with View(store, console):
        try:
            status = checked_campaign(config, run_id, resume)
        except CancelledRun as error:
            raise CancelledInTheUI from error
        assert isinstance(status, dict)
        return status


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
