"""Entry points of stage processes: set up from the command line, run, end with an exit code of `millrace.errors`."""

import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from configs.schema import RunConfig
from millrace.errors import DRAINED, exit_code
from millrace.runs.record import read_attempt
from millrace.runtime.arguments import StageArguments, attempt_config
from millrace.runtime.messages import SHOW_STACKS, redirect_prints, send, watch_lifeline
from millrace.runtime.stage import Stage
from storage import failpoints
from storage.stores.base import Store
from storage.stores.factory import open_store


def run_stage(name: str, main: Callable[[Stage], None]) -> None:
    """Entry point of a stage process: sets it up from its command line, runs `main`, and exits.

    Exits with 0 when `main` ends undrained, otherwise with a code of `millrace.errors`. An exception without
    an exit code is a fault and leaves its traceback.
    """
    with _final_error_reported():
        arguments, config, store = _begin(name)
        stage = Stage(name=name, arguments=arguments, config=config, store=store)
        drain_on_signals(stage)
        watch_lifeline(stage.drain)
        stage.update_status(now=True, t_main=time.time(), t_ready=None, load_seconds=0.0)
        try:
            main(stage)
        finally:
            stage.close()
    sys.exit(DRAINED if stage.draining else 0)


def run_follower(name: str, rank: int, follow: Callable[[StageArguments, RunConfig, Store], None]) -> None:
    """Entry point of a stage's other ranks. Only rank 0 writes status records and is asked to drain.

    SIGTERM ends a follower at once: torchrun sends it when another rank has failed.
    """
    with _final_error_reported():
        arguments, config, store = _begin(name, rank)
        follow(arguments, config, store)


@contextmanager
def _final_error_reported() -> Iterator[None]:
    """Sends an error that has an exit code, and exits with that code."""
    try:
        yield
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        send(error)
        sys.exit(code)


def _begin(name: str, rank: int = 0) -> tuple[StageArguments, RunConfig, Store]:
    """Reads this process's command line and its run's config."""
    redirect_prints()
    faulthandler.register(SHOW_STACKS)
    arguments = StageArguments.parse(sys.argv[1:])
    failpoints.arm(f"{name}-{arguments.replica}{f'.{rank}' if rank else ''}")
    config = attempt_config(read_attempt(open_store(arguments.run_url), arguments.attempt))
    return arguments, config, open_store(arguments.run_url)


def drain_on_signals(stage: Stage) -> None:
    """Makes SIGTERM ask the stage to drain; call it in the main thread."""
    signal.signal(signal.SIGTERM, lambda *_: stage.drain())
    # Only the controller answers Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
