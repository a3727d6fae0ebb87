"""`millrace mirror`: copies what a run's trainer measured to where a team already looks.

run ─► Mirror ─► TensorBoard's event files, under FOLDER/RUN_ID
    └► Mirror ─► a run of Weights & Biases                           each with a memory of what it has
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dashboard.sinks.copying import Mirror
    from dashboard.sinks.sink import Sink
    from storage.store import Store

_FOLLOW_SECONDS = 1.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    mirror = commands.add_parser("mirror", help="copy a run's metrics into TensorBoard or Weights & Biases")
    mirror.add_argument("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
    mirror.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="write event files to FOLDER/RUN_ID")
    mirror.add_argument(
        "--wandb", metavar="PROJECT", help="write a run of this project; offline, unless WANDB_MODE says otherwise"
    )
    mirror.add_argument("--follow", action="store_true", help="go on until the run has ended, or Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises InputError and StorageError: a mistake, or damage."""
    from dashboard.sinks.copying import Mirror
    from millrace.errors import InputError
    from millrace.run import read_run
    from storage.factory import open_store

    if arguments.tensorboard is None and arguments.wandb is None:
        raise InputError("mirror needs a place to copy to: add --tensorboard FOLDER, --wandb PROJECT, or both")
    store = open_store(arguments.run_url)
    record = read_run(store)
    with ExitStack() as opened:
        mirrors = [opened.enter_context(closing(Mirror(store, sink))) for sink in _sinks(arguments, record["run_id"])]
        # Ctrl-C is the way to end --follow.
        with suppress(KeyboardInterrupt):
            while not _copy_all(store, mirrors) and arguments.follow:
                time.sleep(_FOLLOW_SECONDS)
    for mirror in mirrors:
        print(f"{record['run_id']}: {mirror.points} new points ─► {mirror.sink.name}")
    return 0


def _copy_all(store: "Store", mirrors: "Sequence[Mirror]") -> bool:
    """Copies what is new into each; whether the run had ended, and so all of it is copied."""
    from millrace.run import how_attempt_ended, latest_attempt

    # Asked first: what was written until then is seen by the copying.
    over = how_attempt_ended(store, latest_attempt(store).number) is not None
    for mirror in mirrors:
        mirror.copy()
    return over


def _sinks(arguments: argparse.Namespace, run_id: str) -> "Iterator[Sink]":
    """Each is imported when it is asked for: both packages are optional."""
    if arguments.tensorboard is not None:
        from dashboard.sinks.tensorboard import TensorBoard

        yield TensorBoard(arguments.tensorboard / run_id)
    if arguments.wandb is not None:
        from dashboard.sinks.wandb import WeightsAndBiases

        yield WeightsAndBiases(arguments.wandb, run_id)
