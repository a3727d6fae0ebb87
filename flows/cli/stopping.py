"""Ctrl-C and SIGTERM at a terminal, for commands whose stages drain before they end."""

import signal
from types import FrameType
from typing import NoReturn

from rich.console import Console

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM. Every stage has drained by then."""


class Terminated(BaseException):
    """SIGTERM as an exception: Prefect passes the signal on once the flow has drained its stages."""


def stop_on_signals(console: Console) -> None:
    """From now on, Ctrl-C raises KeyboardInterrupt in the main thread, and SIGTERM Terminated; a person is told so."""

    def stop(signal_number: int, frame: FrameType | None) -> NoReturn:
        line = "stopping: each stage finishes and commits what it is doing; stop once more to kill them"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        raise KeyboardInterrupt if signal_number == signal.SIGINT else Terminated

    # SIGINT too: a shell script starts its background jobs with it ignored, and this one has stages to drain.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
