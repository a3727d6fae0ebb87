"""Asks a module a question in a separate process, forked by the stages' fork server, which has the imports done.

question ──JSON on stdin──► `python -m MODULE`, forked ──JSON on stdout──► answer
 └─ where nothing can be forked: `millrace.preflight.child.answer_of`
"""

import json
import tempfile
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from millrace.errors import StageDied
from millrace.preflight.child import answer_of, unpacked
from tasks.exit_causes import cause, last_lines
from tasks.fork_server import STAGES, CannotFork
from tasks.start import kill

_MAX_SECONDS = 240.0
"""Time for an answer, which includes the imports of a fork server that has just been started."""


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


def ask(module: str, question: Any, subject: str) -> Any:
    """Returns the module's answer, plain JSON, to a question about `subject`, which is for people.

    Raises the module's InputError, and StageDied if its process ends without an answer.
    """
    with tempfile.TemporaryFile() as log:
        try:
            process = STAGES.fork(module, [], log, 1, warn=lambda line: None)
        except CannotFork:
            return answer_of(module, question, subject)
        timeout = threading.Timer(_MAX_SECONDS, process.kill)
        timeout.start()
        try:
            # A process that ends early says why in its log.
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(question).encode())
            reply = json.loads(process.stdout.read())
        except ValueError as error:
            death = cause(process.wait(), out_of_memory=False)
            log.seek(0)
            raise StageDied(f"the check of {subject} {death} and wrote:\n{last_lines(log.read())}") from error
        finally:
            timeout.cancel()
            kill(process)
    return unpacked(reply)
