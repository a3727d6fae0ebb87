"""A check in a child process, because its packages take seconds to import and may print anything.

answer_of ──question──► python -m MODULE: serve(check) ──answer, or an InputError as JSON──► unpacked
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from millrace.errors import InputError, StageDied, from_json, to_json

_LAST_LINES = 15


def answer_of(module: str, question: Any, what: str) -> Any:
    """Returns the JSON that `python -m MODULE` answers to `question`; `what` names the check for people.

    Raises the module's InputError, and StageDied with the last lines of its stderr if it ends without an answer.
    """
    done = subprocess.run(
        [sys.executable, "-m", module], input=json.dumps(question), capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = "\n".join(done.stderr.splitlines()[-_LAST_LINES:])
        raise StageDied(f"the check of {what} ended with exit code {done.returncode} and wrote:\n{lines}")
    return unpacked(json.loads(done.stdout))


def unpacked(reply: Any) -> Any:
    """Returns the answer in a reply of `serve`, or raises the InputError in it."""
    if isinstance(reply, dict) and "error" in reply:
        raise from_json(reply["error"])
    return reply


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
