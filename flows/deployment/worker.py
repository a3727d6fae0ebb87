"""A Prefect process worker that lets its campaigns drain when it is stopped.

    SIGTERM, Ctrl-C ─► worker: takes no new run ─SIGTERM─► flow runs: their stages drain, commit, end
                          │ ◄─────────── each has ended ───────┘
                          └─ reports their end to the server, and stops

Prefect's own `worker start` kills its flow runs at once and leaves them Running on the server, where they still count
against the pool's limit.
"""

import asyncio
import contextlib
import os
import signal
import socket
from abc import ABC

import psutil
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.workers.process import ProcessWorker

MAX_RUNS = 64
"""The pool's limit decides. Without a limit, a worker does not count its runs."""
_GRACE_SECONDS = 720.0
"""Time for flow runs to end after a signal: `supervision.drain_seconds`, 600 s by default, and the rest for a server
that is slow to answer."""
_INTERRUPT_SECONDS = 25.0
"""Time before flow runs get SIGTERM: Ctrl-C in a terminal reaches them too, and a second signal would kill them."""
_POLL_SECONDS = 0.2


async def work(pool: str, limit: int = MAX_RUNS) -> None:
    """Runs the pool's flow runs, at most `limit` at once, until SIGTERM or Ctrl-C."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    worker = _Worker(work_pool_name=pool, name=socket.gethostname(), limit=limit)
    working = asyncio.create_task(worker.start())
    stopping = asyncio.create_task(signals.get())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stopping.done() and worker.is_setup:
        await _drain(worker, stopping.result())
    stopping.cancel()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


# ABC keeps it out of Prefect's registry of workers, which would warn of a second one of the type `process`.
class _Worker(ProcessWorker, ABC):
    async def _submit_scheduled_flow_runs(self, flow_run_response: list[WorkerFlowRunResponse]) -> list[FlowRun]:
        """Leaves a flow run that was resumed while its former process still drains for a later poll.

        Prefect's own worker would take it a second time, and end with an error.
        """
        draining = self.limiter.statistics().borrowers
        return await super()._submit_scheduled_flow_runs(
            [response for response in flow_run_response if response.flow_run.id not in draining]
        )


async def _drain(worker: ProcessWorker, number: signal.Signals) -> None:
    """Returns once all flow runs have ended, or their time is up."""
    worker.limiter.total_tokens = 1
    now = asyncio.get_running_loop().time
    terminate_at = now() + (_INTERRUPT_SECONDS if number == signal.SIGINT else 0.0)
    signalled: set[int] = set()
    while worker.limiter.borrowed_tokens > 0:
        if now() > terminate_at + _GRACE_SECONDS:
            print(f"flow runs did not end within {_GRACE_SECONDS:.0f} s; they are killed", flush=True)
            return
        # Repeated, because a run that was just starting gets its process late.
        children = {child.pid for child in psutil.Process().children()} if now() >= terminate_at else set()
        for pid in children - signalled:
            signalled.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(_POLL_SECONDS)
