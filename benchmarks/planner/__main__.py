"""The planner, measured: each command is a module of this room.

python -m benchmarks.planner COMMAND [--json PATH] [options of the command]
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.planner import llamarl, machine, published, speed

AddParser = Callable[["argparse._SubParsersAction[argparse.ArgumentParser]"], None]
_COMMANDS: Sequence[AddParser] = (
    machine.add_parser,
    published.add_parser,
    llamarl.add_parser,
    speed.add_parser,
)
"""`add_parser` of each module: adds its command, and sets `run` to the function that takes its arguments."""


def main() -> None:
    """Runs a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_parser in _COMMANDS:
        add_parser(commands)
    arguments: Any = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
