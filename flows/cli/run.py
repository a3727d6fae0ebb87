"""Runs one campaign at a terminal: checks it, shows it while it runs, prints its summary."""

import contextlib
import importlib
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import NoReturn

from rich.console import Console

from configs.schema import RunConfig
from configs.stored import changed_keys
from flows.campaign.local_copies import with_local_copies
from flows.campaign.prepare import Resume, check, check_run, run_store, stored_values
from flows.campaign.threads import with_threads
from flows.deployment.server import prefect_server
from flows.display.key_figures import already_finished
from flows.display.live_view import LiveView, panel
from flows.display.tables import echo, new_table, shortened
from millrace.errors import StageDied
from millrace.preflight.child import ask
from millrace.profiling.trace import ProfileRequest
from millrace.runs.record import changed_inputs, latest_attempt
from storage import failpoints, layout
from storage.progress import read_progress
from storage.stores.base import Store
from tasks.jobs import stages_here
from tasks.start import warm_up

_ANSWER_WIDTH, _TITLE_LENGTH = 100, 400


class Terminated(BaseException):
    """SIGTERM as an exception: Prefect passes the signal on once the flow has drained its stages."""


STOPS: dict[type[BaseException], int] = {KeyboardInterrupt: 130, Terminated: 143}
"""Exit codes after Ctrl-C and SIGTERM. Every stage has drained by then."""
CANCELLED = 4
"""Exit code after a cancellation in the Prefect UI. Every stage has drained by then."""


def stop_on_signals(console: Console) -> None:
    """Makes Ctrl-C raise KeyboardInterrupt in the main thread, and SIGTERM Terminated, after a line that says so."""

    def stop(signal_number: int, frame: FrameType | None) -> NoReturn:
        echo("stopping: each stage finishes and commits what it is doing; stop once more to kill them", console=console)
        raise KeyboardInterrupt if signal_number == signal.SIGINT else Terminated

    # SIGINT too: a shell script starts its background jobs with it ignored, and this one has stages to drain.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def run_campaign(
    config: RunConfig,
    run_id: str,
    resume: Resume,
    accept_changed_inputs: bool,
    command: str | None,
    profile: ProfileRequest | None = None,
) -> int:
    """Runs a campaign to its end. Returns 0, or CANCELLED or a code of STOPS if it was stopped.

    `command` continues the run, for a person to type; None: it is not continued. `profile`: the steps that its
    stages record. Raises the errors of `flows.campaign.prepare.check` before anything is created, and StageDied, with a
    note that holds the command.
    """
    failpoints.arm("controller")
    console = Console()
    store = run_store(config, run_id)
    check_run(store, run_id, resume)
    config = with_local_copies(config, store, echo)
    with contextlib.ExitStack() as started:
        wait_for_server: list[Callable[[], None]] = []

        def start() -> None:
            # Both start while this process makes the checks that take long, and imports the flow.
            warm_up(stages_here(config))
            wait_for_server.append(started.enter_context(prefect_server()))

        with console.status("checking the config, the model, the reward and the prompts"):
            inputs = check(
                config,
                run_id,
                resume=resume,
                accept_changed_inputs=accept_changed_inputs,
                start=start,
                meanwhile=lambda: importlib.import_module("flows.campaign.flow"),
            )
        config = with_threads(config, store)
        if profile is not None:
            profile.write(store)
        return _run_checked(config, run_id, resume, inputs, wait_for_server[0], command)


def check_campaign(config: RunConfig, run_id: str, resume: Resume, accept_changed_inputs: bool) -> int:
    """Makes the checks of `run_campaign`, and prints some prompts with sampled answers and rewards. Starts no run."""
    console = Console()
    store = run_store(config, run_id)
    check_run(store, run_id, resume)
    config = with_local_copies(config, store, echo)
    with console.status("checking the config, the model, the reward and the prompts"):
        warm = partial(warm_up, stages_here(config))
        check(config, run_id, resume=resume, accept_changed_inputs=accept_changed_inputs, start=warm)
    echo("all checks passed")
    if config.model.path is None:
        echo("nothing is sampled: the start model is made when the run begins")
        return 0
    with console.status("sampling answers, with transformers on the CPU"):
        sampled = ask("millrace.stages.sample", config.model_dump(mode="json"), "the sampled answers")
    for answered in sampled["prompts"]:
        rows = [(shortened(text, _ANSWER_WIDTH), "–" if reward is None else f"{reward:.2f}")
                for text, reward in answered["answers"]]  # fmt: skip
        title = f"{answered['source']}: {answered['prompt']}"
        echo(new_table(title[:_TITLE_LENGTH], left=("answer",), right=("reward",), rows=rows))
    if sampled["failure"]:
        echo(sampled["failure"])
    return 0


def _run_checked(
    config: RunConfig,
    run_id: str,
    resume: Resume,
    inputs: dict[str, str],
    wait: Callable[[], None],
    command: str | None,
) -> int:
    """Runs a campaign that `check` has accepted; `wait` waits for the Prefect server."""
    from prefect.exceptions import CancelledRun

    from flows.campaign.flow import run_attempt

    console, store = Console(), run_store(config, run_id)
    echo(f"run {run_id} at {store.url}")
    if store.exists(layout.RUN):
        attempt = latest_attempt(store)
        settings = changed_keys(attempt.config, stored_values(config))
        echo(*(f"resumed with another setting: {change}" for change in settings))
        echo(*(f"resumed with another input: {change}" for change in changed_inputs(attempt, inputs)))
    stop_on_signals(console)
    try:
        with console.status("waiting for the Prefect server"):
            wait()
        with LiveView(store, console):
            status = run_attempt(config, run_id, resume, inputs, command=command)
    except StageDied as error:
        if store.exists(layout.RUN) and command is not None:
            error.add_note(f"once the cause is fixed, continue with:\n{command}")
        raise
    except (KeyboardInterrupt, Terminated, CancelledRun) as stop:
        if store.exists(layout.RUN):
            _say(f"stopped{_stored(store)}", command)
        else:
            echo("stopped before the run began")
        return STOPS.get(type(stop), CANCELLED)
    assert isinstance(status, dict)
    echo(panel(status), f"summary at {store.url}/summary.json")
    if (finished := already_finished(status)) is not None:
        echo(finished)
    if status["state"] != "finished":
        _say(f"this attempt's budget is spent{_stored(store)}", command)
    return 0


def _say(what: str, command: str | None) -> None:
    echo(*([what] if command is None else [f"{what}; continue with:", command]))


def _stored(store: Store) -> str:
    """How much of unfinished responses is stored, which the next attempt continues."""
    records = read_progress(store)
    tokens = sum(record.get("tokens_stored", 0) for name, record in records.items() if name.startswith("generate-"))
    return f", with {tokens} tokens of unfinished responses stored" if tokens else ""
