"""`millrace plan`: its command line, and what it prints and writes."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from configs.requests import GivenLengthsConfig, PlanRequest
    from configs.schema import RunConfig

_WHAT = "say what a campaign will take, before it runs: split of the GPUs, seconds per step, staleness, memory, cost"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("plan", help=_WHAT, description=f"{_WHAT[0].upper()}{_WHAT[1:]}.")
    parser.add_argument("config", type=Path, nargs="?", help="a YAML file, such as configs/presets/gsm8k-qwen-gpu.yaml "
                        "(default with --from: the first run's config)")  # fmt: skip
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="change keys of the config"
    )
    parser.add_argument("--hardware", metavar="KIND", help="kind of GPU, such as h100")
    parser.add_argument("--gpus", type=_count, metavar="N", help="how many trainer and generators divide")
    parser.add_argument("--model", metavar="NAME", help="a known model such as llama-8b, or a model's folder; "
                        "default: the config's")  # fmt: skip
    parser.add_argument("--from", action="extend", nargs="+", default=[], dest="sources", metavar="RUN_URL",
                        help="stored runs of one machine, from which durations and lengths are taken")  # fmt: skip
    parser.add_argument("--cores", type=_positive, metavar="N", help="with --from: CPU cores that all stages share")
    parser.add_argument("--what-if", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
                        help="compare the config with these changes of it, in place of a search")  # fmt: skip
    parser.add_argument("--goal", choices=("fastest", "cheapest"), default="fastest",
                        help="most tokens per second (default), or fewest GPU-hours per token")  # fmt: skip
    parser.add_argument("--batch", type=_count, nargs="+", default=[], dest="batches", metavar="GROUPS",
                        help="try these training.groups_per_step too")  # fmt: skip
    parser.add_argument("--price", type=_positive, metavar="DOLLARS", help="of one GPU for an hour")
    parser.add_argument("--steps", type=_count, metavar="N", help="steps to simulate (default: at most 100)")
    parser.add_argument("--lengths", type=_lengths, metavar="MEAN,SIGMA,PROMPT",
                        help="log-normal response lengths and the prompts' length, in tokens: 800,0.8,200")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there as JSON; - prints it")
    parser.add_argument("--write", type=Path, metavar="PATH", help="write the planned config there, for `millrace run`")


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Prints the plan. Returns 0. Raises ConfigError, InputError and StorageError, one sentence each."""
    from flows.planning.files import write_config
    from flows.planning.formatting import as_tables
    from flows.planning.prepare import answer

    plan = answer(_config(arguments), _request(arguments))
    if arguments.write is not None:
        write_config(plan, arguments.write)
    if arguments.json is not None:
        text = json.dumps(plan.to_json(), indent=1, ensure_ascii=False)
        if str(arguments.json) == "-":
            print(text)
            return 0
        arguments.json.write_text(f"{text}\n", encoding="utf-8")
    console = console or Console()
    for renderable in as_tables(plan):
        console.print(renderable)
    if arguments.write is not None:
        # Not wrapped: it is there to be copied.
        console.print(f"written: millrace run {arguments.write}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _config(arguments: argparse.Namespace) -> "RunConfig":
    from configs.load import load_config, with_overrides
    from flows.planning.prepare import config_of_run
    from millrace.errors import InputError

    if arguments.config is not None:
        return load_config(arguments.config, arguments.set)
    if not arguments.sources:
        raise InputError(
            "what should be planned? Expected a config file, or --from with a stored run, whose config is taken"
        )
    return with_overrides(config_of_run(arguments.sources[0]), arguments.set, where=arguments.sources[0])


def _request(arguments: argparse.Namespace) -> "PlanRequest":
    # Imported late: no other command needs it, and all of them come through this module.
    from configs.requests import PlanRequest

    values = {name: value for name, value in vars(arguments).items() if name in PlanRequest.model_fields}
    return PlanRequest(**values)


def _lengths(text: str) -> "GivenLengthsConfig":
    from pydantic import ValidationError

    from configs.requests import GivenLengthsConfig

    try:
        mean, sigma, prompt = text.split(",")
        return GivenLengthsConfig(mean=float(mean), sigma=float(sigma), prompt=int(prompt))
    except (ValueError, ValidationError):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected mean and σ of the responses and the prompts' length, such as 800,0.8,200"
        ) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number above 0")
    return value
