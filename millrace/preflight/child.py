"""A check in a child process, because its packages take seconds to import and may print anything.

ask ──question──► python -m MODULE: serve(check) ──answer, or an InputError as JSON──► ask
"""

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from millrace.errors import InputError, StageDied, from_json, to_json
from millrace.forking.exit_causes import cause, last_lines
from millrace.forking.stages import STAGES, kill, start_command

_MAX_SECONDS = 600.0
"""Time for an answer, which includes the imports of a fork server that has just been started."""


def ask(module: str, question: Any, subject: str, *, fork: bool = True) -> Any:
    """Returns the answer of `python -m MODULE`, plain JSON, to a question about `subject`, which is for people.

    `fork`: whether the stages' fork server, which has the imports done, may fork the process. Raises the module's
    InputError, and StageDied with the last lines of its stderr if it ends without an answer.
    """
    with tempfile.TemporaryFile() as log:
        process = STAGES.start(module, [], log, 1) if fork else start_command([sys.executable, "-m", module], log, 1)
        assert process.stdin is not None and process.stdout is not None
        timeout = threading.Timer(_MAX_SECONDS, process.kill)
        timeout.start()
        try:
            # A process that ends early says why in its log.
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(question).encode())
            reply = json.loads(process.stdout.read())
        except ValueError as error:
            death = cause(process.wait(), out_of_memory=False)
            raise StageDied(f"the check of {subject} {death} and wrote:\n{last_lines(log)}") from error
        finally:
            timeout.cancel()
            kill(process)
    if isinstance(reply, dict) and "error" in reply:
        raise from_json(reply["error"])
    return reply


def ask_in_background(module: str, question: Any, subject: str) -> Future[Any]:
    """Starts `ask` in a thread that does not keep this process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(ask(module, question, subject))
        except Exception as error:  # noqa: BLE001 — raised to the caller of `future.result`
            future.set_exception(error)

    threading.Thread(target=run, name=f"check of {subject}", daemon=True).start()
    return future


def serve(check: Callable[[Any], Any]) -> None:
    """Calls `check` with the question from stdin, and writes its answer or InputError to stdout."""
    # Packages and users' code may print to stdout: send all of that to stderr.
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        reply = check(json.load(sys.stdin))
    except InputError as error:
        reply = {"error": to_json(error)}
    json.dump(reply, stdout)
    stdout.close()
