"""Asks vLLM many questions in one process, for its import takes long: JSON on stdin, answers to the file named."""

import json
import sys
from pathlib import Path
from typing import Any

from millrace.errors import InputError
from millrace.preflight.vllm import answer


def _said(question: dict[str, Any]) -> str | None:
    try:
        answer(question)
    except InputError as error:
        return str(error)
    return None


if __name__ == "__main__":
    answers = {name: _said(question) for name, question in json.load(sys.stdin).items()}
    Path(sys.argv[1]).write_text(json.dumps(answers))
