"""`millrace mirror`: copies a run's metrics to TensorBoard, Weights & Biases, MLflow or trackio, its traces by OTLP.

run ─► Mirror ─► TensorBoard's event files, under FOLDER/RUN_ID
    ├► Mirror ─► a run of Weights & Biases                           each with separate state
    ├► Mirror ─► a run of MLflow
    ├► Mirror ─► a run of trackio
    └► Traces ─► an OTLP receiver
"""

import argparse
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dashboard.integrations.sinks.copying import Mirror
    from dashboard.integrations.sinks.otlp import Traces
    from storage.stores.base import Store

_FOLLOW_SECONDS = 1.0
_OPTIONS = {
    "tensorboard": ("TensorBoard", "FOLDER", "write event files to FOLDER/RUN_ID"),
    "wandb": ("WeightsAndBiases", "PROJECT", "write a run of this project; offline, unless WANDB_MODE says otherwise"),
    "mlflow": ("MLflow", "EXPERIMENT", "write a run of this experiment, to the store MLFLOW_TRACKING_URI"),
    "trackio": ("Trackio", "PROJECT", "write a run of this project"),
    "otlp": ("Traces", "URL", "send an OpenTelemetry trace of each trajectory to this receiver, by HTTP"),
}
"""Option, and module of this folder → its class, the option's value and help."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    mirror = commands.add_parser(
        "mirror",
        help="copy a run's metrics into TensorBoard, Weights & Biases, MLflow or trackio, or its traces by OTLP",
    )
    mirror.add_argument("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
    for option, (_, value, help_text) in _OPTIONS.items():
        mirror.add_argument(f"--{option}", metavar=value, help=help_text)
    mirror.add_argument("--follow", action="store_true", help="keep copying until the run ends or is killed, or Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit code. Raises InputError and StorageError."""
    from millrace.errors import InputError
    from millrace.runs.record import read_run
    from storage.stores.factory import open_store

    if all(getattr(arguments, option) is None for option in _OPTIONS):
        options = [f"--{option} {value}" for option, (_, value, _) in _OPTIONS.items()]
        expected = f"{', '.join(options[:-1])} or {options[-1]}, or several"
        raise InputError("mirror has no destination", expected=expected)
    store = open_store(arguments.run_url)
    record = read_run(store)
    if arguments.follow:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with ExitStack() as opened:
        mirrors = [opened.enter_context(closing(each)) for each in _mirrors(arguments, store, record["run_id"])]
        # Ctrl-C ends --follow between two copies, so that it never interrupts an import.
        with suppress(KeyboardInterrupt):
            while not _copy_all(store, mirrors) and arguments.follow:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                time.sleep(_FOLLOW_SECONDS)
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    for mirror in mirrors:
        print(f"{record['run_id']}: {mirror.summary}")
    return 0


def _copy_all(store: "Store", mirrors: "Sequence[Mirror | Traces]") -> bool:
    """Copies new data into each mirror. Returns whether the run had ended before, so that the copies are complete."""
    from millrace.runs.record import latest_attempt, read_end, run_state
    from storage.progress import read_progress

    # Read before copying, so that everything written until the end is copied.
    attempt = latest_attempt(store)
    state, _ = run_state(read_end(store, attempt.number), attempt.t_started, read_progress(store))
    for mirror in mirrors:
        mirror.copy()
    return state != "running"


def _mirrors(arguments: argparse.Namespace, store: "Store", run_id: str) -> "Iterator[Mirror | Traces]":
    """Creates the mirrors that the options request. Imports are local because the packages are optional."""
    from dashboard.integrations.sinks.copying import Mirror

    for option, (name, _, _) in _OPTIONS.items():
        if (target := getattr(arguments, option)) is not None:
            of_option = getattr(import_module(f"dashboard.integrations.sinks.{option}"), name)
            yield of_option(store, target) if option == "otlp" else Mirror(store, of_option(target, run_id))
