"""Stages of a campaign on this host, for a controller on another: what `placement` starts through a work pool.

    campaign ─► tasks.place ─► deployment `stages/<pool>` ─► a worker of the pool, on its host ─► this flow ─► stages
                    ▲                                                                               │   ▲
                    └───────── the run's store ◄── beacon: at work, ended, failed with a sentence ──┘   │
                                     └──────────── the controller's beacon: draining, or silent ──STOP──┘

The same tasks supervise the same processes as beside the controller, with the same retries. One that ends by itself,
as the trainer does, ends the host's part of the attempt.
"""

import shutil
import socket
import threading

from prefect import flow, runtime
from prefect.task_runners import ThreadPoolTaskRunner

from flows.prepare import handover_folder
from flows.running import Running
from millrace.errors import InputError, LedgerMismatch, RunMissing
from millrace.hosts import CONTROLLER, SILENT_SECONDS, Beacon, Watch
from millrace.places import Place
from millrace.run import Provenance, provenance, read_attempt
from millrace.stages.arguments import StageArguments
from storage.errors import Fenced, NotInStore
from storage.factory import open_store
from storage.store import Store
from tasks.long_running import LONG_RUNNING
from tasks.stop import STOP

_LOOK_SECONDS = 1.0
_FINAL = (InputError, Fenced, LedgerMismatch)
"""Errors after which it would not help to start the stages once more, on this host or another."""


@flow(
    name="stages",
    task_runner=ThreadPoolTaskRunner(max_workers=8),  # type: ignore[arg-type]
    persist_result=False,
)
def stages(run_url: str, attempt: int, place: Place) -> None:
    """Runs the stages of `place` for attempt number `attempt` of the run at `run_url`, until they end or should.

    Raises InputError where this host can't serve that run, and the error of a stage that can't be kept alive.
    """
    STOP.clear()
    store = open_store(run_url)
    _check(store, attempt)
    of, host = str(runtime.flow_run.id), socket.gethostname()
    with Beacon(store, place.sign_of_life, place.number, of=of, doing=f"on {host}", draining=STOP.is_set) as us:
        try:
            _run(store, run_url, attempt, place)
        except Exception as error:
            us.say(ended=True, sentence=str(error), final=type(error).__name__ if isinstance(error, _FINAL) else None)
            raise
        us.say(ended=True, sentence=None, final=None)


def _check(store: Store, number: int) -> None:
    """Whether this host sees the run and has the controller's code."""
    try:
        attempt = read_attempt(store, number)
    except (RunMissing, NotInStore) as error:
        raise InputError(
            f"host {socket.gethostname()} sees no attempt {number} of a run at {store.url}: expected a storage.root "
            "that the controller and every host of placement share"
        ) from error
    ours, theirs = provenance(), attempt.provenance
    if _code(ours) != _code(theirs):
        raise InputError(
            f"host {socket.gethostname()} runs {_code(ours)} of Millrace, the controller {_code(theirs)}: "
            "expected the same code on every host"
        )


def _code(of: Provenance) -> str:
    changed = " with changes" if of.dirty else ""
    return f"commit {of.commit[:12]}{changed}" if of.commit else "no commit known"


def _run(store: Store, run_url: str, attempt: int, place: Place) -> None:
    handover = handover_folder(f"{run_url} {place.name}")
    over = threading.Event()
    threading.Thread(target=_watch_controller, args=(store, str(attempt), over), daemon=True).start()
    try:
        with Running() as running:
            for seat in place.seats:
                arguments = StageArguments(run_url=run_url, attempt=attempt, replica=seat.replica, handover=handover)
                running.start(seat.stage, LONG_RUNNING[seat.stage].submit(arguments, seat.threads))
            running.first_to_end()
    finally:
        over.set()
        shutil.rmtree(handover, ignore_errors=True)


def _watch_controller(store: Store, of: str, over: threading.Event) -> None:
    """Sets STOP once the controller drains, is gone, or has been started again as another attempt."""
    controller = Watch(store, CONTROLLER, 0)
    while not over.wait(_LOOK_SECONDS):
        silent = controller.look() > SILENT_SECONDS
        if silent or controller.life.get("draining") or controller.life.get("of", of) != of:
            STOP.set()
            return
