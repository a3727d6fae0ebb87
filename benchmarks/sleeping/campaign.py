"""Campaigns whose stages sleep: `python -m benchmarks.sleeping.campaign`, with the arguments of `millrace`.

The environment holds the pace.
"""

import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

# For its settings of Prefect, which are those of `millrace run`; before anything imports Prefect.
import flows.cli.main
from millrace.forking.stages import STAGES, Process, start_command

_SLEEPING = "benchmarks.sleeping.stage"
_STAGES = {
    "millrace.stages.generate": "generate",
    "millrace.stages.train.main": "train",
    "millrace.stages.evaluate": "evaluate",
}
"""The stages that sleep, by the module that is replaced."""


def main() -> int:
    """Runs the command line with this process's tasks starting the sleeping stages instead of the real ones."""
    start_stage = STAGES.start

    def start_sleeper(module: str, arguments: Sequence[str], *rest: Any, **options: Any) -> Process:
        if module in _STAGES:
            module, arguments = _SLEEPING, [_STAGES[module], *arguments]
        return start_stage(module, arguments, *rest, **options)

    def start_replaced(command: list[str], *rest: Any, **options: Any) -> Process:
        replaced = [part for word in command for part in ([_SLEEPING, _STAGES[word]] if word in _STAGES else [word])]
        return start_command(replaced, *rest, **options)

    with patch.object(STAGES, "start", start_sleeper), patch("tasks.start.start_command", start_replaced):
        return flows.cli.main.main()


if __name__ == "__main__":
    sys.exit(main())
