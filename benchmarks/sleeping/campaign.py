"""Campaigns whose stages sleep: `python -m benchmarks.sleeping.campaign`, with the arguments of `millrace`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

# For its settings of Prefect, which are those of `millrace run`; before anything imports Prefect.
import flows.cli.main
from millrace.forking.client import ForkedProcess

_SLEEPERS = {f"millrace.stages.{stage}": f"benchmarks.sleeping.{stage}" for stage in ("generate", "score", "train")}


@contextmanager
def sleepers() -> Iterator[None]:
    """Inside the block, this process's tasks start the sleeping stages instead of the real ones."""
    from tasks.fork_server import STAGES

    fork = STAGES.fork

    def fork_sleeper(module: str, *rest: Any) -> ForkedProcess:
        return fork(_SLEEPERS.get(module, module), *rest)

    with patch.object(STAGES, "fork", fork_sleeper):
        yield


if __name__ == "__main__":
    with sleepers():
        sys.exit(flows.cli.main.main())
