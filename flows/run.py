"""One campaign at a terminal: checked first, then shown while it runs, then summed up."""

from typing import Any

from rich.console import Console

from configs.schema import RunConfig
from flows.prepare import check
from flows.view import View, panel

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after a Ctrl-C and a SIGTERM that drained every stage."""


def run_campaign(config: RunConfig, run_id: str, *, resume: bool) -> int:
    """Runs it to its end. Returns 0, or 130 / 143 where Ctrl-C / SIGTERM stopped it and every stage has drained.

    Raises the errors of `flows.prepare.check` before anything has been made.
    """
    store = check(config, run_id, resume=resume)
    console = Console()
    console.print(f"run {run_id} at {store.url}", markup=False, highlight=False)

    # Prefect takes seconds to import: a mistake should not have to wait for it.
    from flows.server import prefect_server

    with prefect_server():
        from prefect.exceptions import TerminationSignal

        from flows.campaign import campaign

        try:
            with View(store, console):
                status: dict[str, Any] = campaign(config, run_id, resume)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except TerminationSignal:
            code = TERMINATED
        else:
            console.print(panel(status, {}))
            console.print(f"summary at {store.url}/summary.json", markup=False, highlight=False, soft_wrap=True)
            return 0
    console.print(f"stopped; go on with --run-id {run_id} --resume", markup=False, highlight=False, soft_wrap=True)
    return code
