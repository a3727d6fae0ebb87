"""Runs one campaign at a terminal: checks it, shows it while it runs, prints its summary."""

import importlib
from collections.abc import Callable
from typing import Any

from rich.console import Console

from configs.schema import RunConfig
from configs.stored import changed_keys
from flows.campaign.hub import with_local_copies
from flows.campaign.prepare import Resume, check, run_store
from flows.cli.invocation import INTERRUPTED, TERMINATED, Terminated, stop_on_signals
from flows.display.key_figures import already_finished
from flows.display.live_view import View, panel
from millrace.errors import StageDied
from millrace.runs.record import changed_inputs, latest_attempt
from storage import failpoints, layout
from storage.progress import read_progress
from storage.stores.base import Store

CANCELLED = 4
"""Exit code after a cancellation in the Prefect UI. Every stage has drained by then."""


class CancelledInTheUI(Exception):
    """A person cancelled the flow run, and its stages have drained."""


def run_campaign(
    config: RunConfig,
    run_id: str,
    resume: Resume,
    accept_changed_inputs: bool,
    wait_for_server: Callable[[], None],
    command: str,
) -> int:
    """Runs it to its end. Returns 0, or CANCELLED, INTERRUPTED or TERMINATED if it was stopped and its stages drained.

    `wait_for_server` is the value of `flows.deployment.server.prefect_server`. `command`, with --resume added, is what
    a person types to continue the run. Raises the errors of `flows.campaign.prepare.check` before anything is created,
    and StageDied, with a note that holds this command if the run can be continued.
    """
    failpoints.arm("controller")
    console = Console()
    store = run_store(config, run_id)
    config = with_local_copies(config, store, lambda line: _print(console, line))
    with console.status("checking the config, the model, the reward and the prompts"):
        inputs = check(
            config, run_id, resume=resume, accept_changed_inputs=accept_changed_inputs, meanwhile=_import_flow
        )
    _print(console, f"run {run_id} at {store.url}")
    if store.exists(layout.RUN):
        before = latest_attempt(store)
        for change in changed_keys(before.config, config.model_dump(mode="json")):
            _print(console, f"resumed with another setting: {change}")
        for change in changed_inputs(before, inputs):
            _print(console, f"resumed with another input: {change}")
    stop_on_signals(console)
    try:
        status = _campaign(config, run_id, resume, inputs, store, console, wait_for_server)
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
        if (finished := already_finished(status)) is not None:
            _print(console, finished)
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


def _stored(store: Store) -> str:
    """What the generators stored of responses that the next attempt continues."""
    records = read_progress(store)
    tokens = sum(record.get("tokens_stored", 0) for name, record in records.items() if name.startswith("generate-"))
    return f", with {tokens} tokens of unfinished responses stored" if tokens else ""


def _campaign(
    config: RunConfig,
    run_id: str,
    resume: Resume,
    inputs: dict[str, str],
    store: Store,
    console: Console,
    wait_for_server: Callable[[], None],
) -> dict[str, Any]:
    # Imported while the server starts.
    from prefect.exceptions import CancelledRun

    from flows.campaign.flow import run_attempt

    with console.status("waiting for the Prefect server"):
        wait_for_server()
    with View(store, console):
        try:
            status = run_attempt(config, run_id, resume, inputs)
        except CancelledRun as error:
            raise CancelledInTheUI from error
        assert isinstance(status, dict)
        return status


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
