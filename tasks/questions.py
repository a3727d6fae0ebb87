"""Asks a module a question in a process of its own, forked by the stages' fork server, which has the imports done.

Question ──JSON on stdin──► `python -m MODULE`, forked ──JSON on stdout──► Question.answer
 └─ where nothing can be forked: `millrace.preflight.child.answer_of`
"""

import json
import tempfile
import threading
from contextlib import suppress
from typing import Any

from millrace.errors import StageDied
from millrace.preflight.child import answer_of, unpacked
from tasks.exit_causes import cause
from tasks.fork_server import STAGES, CannotFork
from tasks.start import Process, kill

_LAST_LINES = 15
_LONGEST_SECONDS = 240.0
"""For an answer, the imports of a fork server that has just been started included."""


def ask(module: str, question: Any, what: str) -> Any:
    """The answer of a module; see `Question`."""
    return Question(module, question, what).answer()


class Question:
    """A question that has been asked. The asker goes on and calls `answer` later.

    `what` names the subject for people.
    """

    def __init__(self, module: str, question: Any, what: str) -> None:
        self._module, self._question, self._what = module, question, what
        self._answer: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._ask, name=f"check of {what}", daemon=True)
        self._thread.start()

    def answer(self) -> Any:
        """The answer, plain JSON. Raises the module's InputError, and StageDied if its process ends without one."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._answer

    def _ask(self) -> None:
        try:
            try:
                self._answer = self._forked()
            except CannotFork:
                self._answer = answer_of(self._module, self._question, self._what)
        except Exception as error:  # noqa: BLE001 — raised in the asker's thread
            self._error = error

    def _forked(self) -> Any:
        with tempfile.TemporaryFile() as log:
            process = STAGES.fork(self._module, [], log, 1, warn=lambda line: None)
            too_long = threading.Timer(_LONGEST_SECONDS, process.kill)
            too_long.start()
            try:
                reply = self._read(process)
            except ValueError as error:
                log.seek(0)
                lines = "\n".join(log.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
                how = cause(process.wait(), out_of_memory=False)
                raise StageDied(f"the check of {self._what} {how} and wrote:\n{lines}") from error
            finally:
                too_long.cancel()
                kill(process)
        return unpacked(reply)

    def _read(self, process: Process) -> Any:
        """Raises ValueError if it ended without an answer."""
        assert process.stdin is not None
        assert process.stdout is not None
        # A process that ends early says why in its log.
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(self._question).encode())
        return json.loads(process.stdout.read())
