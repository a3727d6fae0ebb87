"""The `millrace` command in this process."""

import io
import os
from contextlib import redirect_stdout
from unittest import mock

from flows.cli.main import build_parser


def run_command(*words: str, width: int = 100) -> tuple[int, str]:
    """Exit code and standard output, at a terminal of `width` columns. Raises the errors that `main` prints."""
    output = io.StringIO()
    with redirect_stdout(output), mock.patch.dict(os.environ, COLUMNS=str(width)):
        arguments = build_parser().parse_args(words)
        code: int = arguments.run_command(arguments)
    return code, output.getvalue()
