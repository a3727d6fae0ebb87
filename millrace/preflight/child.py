"""A check in a process of its own, because its packages take seconds to import and print as they like."""

import json
import subprocess
import sys
from typing import Any

from millrace.errors import StageDied

_LAST_LINES = 15


def answer_of(module: str, question: Any, what: str) -> Any:
    """Plain JSON that `python -m MODULE` writes to stdout for `question`, plain JSON too, on its stdin.

    `what` names the check for people. Raises StageDied with the last lines of its stderr if it ends without an answer.
    """
    done = subprocess.run(
        [sys.executable, "-m", module], input=json.dumps(question), capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = "\n".join(done.stderr.splitlines()[-_LAST_LINES:])
        raise StageDied(f"the check of {what} ended with exit code {done.returncode} and wrote:\n{lines}")
    return json.loads(done.stdout)
