"""Campaigns whose stages sleep: `python -m benchmarks.sleeping.campaign`, with the arguments of `millrace`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

# For its settings of Prefect, which are those of `millrace run`; before anything imports Prefect.
import flows.cli.main
from millrace.forking.client import ForkedProcess


@contextmanager
def sleepers(generate: str = "benchmarks.sleeping.generate") -> Iterator[None]:
    """Inside the block, this process's tasks start the sleeping stages instead of the real ones.

    `generate` is the module of the generate stage.
    """
    from tasks import start
    from tasks.fork_server import STAGES

    fork, start_command = STAGES.fork, start.start_command
    modules = {
        "millrace.stages.generate": generate,
        "millrace.stages.score": "benchmarks.sleeping.score",
        "millrace.stages.train.main": "benchmarks.sleeping.train",
        "millrace.stages.evaluate": "benchmarks.sleeping.evaluate",
    }

    def fork_sleeper(module: str, *rest: Any, **named: Any) -> ForkedProcess:
        return fork(modules.get(module, module), *rest, **named)

    def start_sleeper(command: list[str], *rest: Any) -> start.Process:
        return start_command([modules.get(word, word) for word in command], *rest)

    with patch.object(STAGES, "fork", fork_sleeper), patch.object(start, "start_command", start_sleeper):
        yield


if __name__ == "__main__":
    with sleepers():
        sys.exit(flows.cli.main.main())
