"""How a command is declared, how its values are read, and the command line as it was typed.

A command is a function of its parsed arguments that returns the exit code. Modules of this package import pydantic,
pyarrow, Prefect and what imports them when a command runs, so that `--help` is quick.
"""

import argparse
import math
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from configs.requests import GivenLengthsConfig

Run = Callable[[argparse.Namespace], int]
Option = tuple[tuple[str, ...], dict[str, Any]]
"""Names and settings for `add_argument`."""
Value = TypeVar("Value")


class Command(NamedTuple):
    """A subcommand of `millrace`. Of a list of options, at most one may be given."""

    name: str
    run: Run
    summary: str
    options: Sequence[Option | list[Option]] = ()


def option(*names: str, **settings: Any) -> Option:
    """An argument, with the parameters of `ArgumentParser.add_argument`."""
    return names, settings


def add_command(parsers: "argparse._SubParsersAction[argparse.ArgumentParser]", command: Command) -> None:
    """Adds the parser of a command, which sets `run_command`."""
    description = f"{command.summary[0].upper()}{command.summary[1:]}."
    parser = parsers.add_parser(command.name, help=command.summary, description=description)
    parser.set_defaults(run_command=command.run)
    for entry in command.options:
        group = parser.add_mutually_exclusive_group() if isinstance(entry, list) else parser
        for names, settings in entry if isinstance(entry, list) else [entry]:
            group.add_argument(*names, **settings)


RUN_URL = option("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
JSON = option("--json", action="store_true", help="everything, as JSON")
SET = option("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="change keys of the config")


def _parser_of(convert: Callable[[str], Value], fits: Callable[[Value], bool], expected: str) -> Callable[[str], Value]:
    def parse(text: str) -> Value:
        try:
            value = convert(text)
        except ValueError:
            pass
        else:
            if fits(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r}; expected {expected}")

    return parse


def _quantity(units: Mapping[str, float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
        if match is None or match[2] not in units:
            raise ValueError(text)
        return float(match[1]) * units[match[2]]

    return convert


def _lengths(text: str) -> "GivenLengthsConfig":
    from configs.requests import GivenLengthsConfig

    mean, sigma, prompt = text.split(",")
    return GivenLengthsConfig(mean=float(mean), sigma=float(sigma), prompt=int(prompt))


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

count = _parser_of(int, lambda n: n >= 1, "a whole number of at least 1")
version = _parser_of(int, lambda n: n >= 0, "a whole number of at least 0")
positive = _parser_of(float, lambda x: 0 < x < math.inf, "a finite number above 0")
not_negative = _parser_of(float, lambda x: 0 <= x < math.inf, "a finite number of at least 0")
age = _parser_of(_quantity(_SECONDS), math.isfinite, f"a number and one of {', '.join(_SECONDS)}, such as 7d")
size = _parser_of(_quantity(_BYTES), math.isfinite, f"a number and one of {', '.join(_BYTES)}, such as 10GB")
lengths = _parser_of(
    _lengths, bool, "mean and σ of the responses and the length of the prompts, in tokens, such as 800,0.8,200"
)


def as_typed(words: Sequence[str]) -> str:
    """The command line of `millrace` with these words behind it, started as this process was."""
    program = sys.argv[0]
    if Path(program).name != "millrace":
        return shlex.join([sys.executable, "-m", "flows.cli.main", *words])
    # A shell passes the whole path of a program that it finds by PATH.
    return shlex.join(["millrace" if shutil.which("millrace") == program else program, *words])


def command_to_resume(arguments: argparse.Namespace, run_id: str) -> str:
    """The command line that continues a run: the typed words, and --run-id and --resume unless they are among them."""
    named = [] if arguments.run_id is not None else ["--run-id", run_id]
    return as_typed([*arguments.words, *named, *(["--resume"] if arguments.resume == "never" else [])])
