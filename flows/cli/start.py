"""`millrace run`, `millrace sft` and `millrace profile`: the commands that start a campaign."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.command_line import SET, Command, command_to_resume, count, option
from millrace.errors import InputError
from storage.stores.factory import open_store

if TYPE_CHECKING:
    from configs.schema import RunConfig

WARM_UP_STEPS = 3
"""Optimizer steps before those that are recorded."""


def _run(arguments: argparse.Namespace) -> int:
    _announce(arguments)
    from configs.load import load_config

    config = load_config(arguments.config, _settings(arguments))
    if arguments.resume != "never" and arguments.run_id is None:
        raise InputError("missing", key="--run-id", expected="with --resume the run to continue")
    run_id = _new_run_id(config.name) if arguments.run_id is None else arguments.run_id
    # Imported once the config is read, so that a mistake in it is reported at once.
    from flows.cli.run import check_campaign, run_campaign

    if arguments.check:
        return check_campaign(config, run_id, arguments.resume, arguments.accept_changed_inputs)
    command = command_to_resume(arguments, run_id)
    return run_campaign(config, run_id, arguments.resume, arguments.accept_changed_inputs, command)


def _sft(arguments: argparse.Namespace) -> int:
    from configs.load import SUPERVISED

    settings = list(SUPERVISED)
    if arguments.source is not None:
        settings += [f"prompts.source={json.dumps(arguments.source)}", f"prompts.where={json.dumps(arguments.where)}"]
    elif arguments.where is not None:
        raise InputError("given", key="--where", expected="--from with it, the stored run whose rollouts it chooses")
    arguments.set = [*settings, *arguments.set]
    return _run(arguments)


def _profile(arguments: argparse.Namespace) -> int:
    _announce(arguments)
    from millrace.profiling.trace import ProfileRequest

    request = ProfileRequest(after_version=WARM_UP_STEPS, num_steps=arguments.steps)
    config = _profiled_config(arguments.config, _settings(arguments, f"training.max_steps={request.end_version}"))
    run_id = _new_run_id(f"{config.name}-profile")
    from flows.campaign.prepare import run_store
    from flows.cli.run import run_campaign

    if code := run_campaign(config, run_id, "never", accept_changed_inputs=False, command=None, profile=request):
        return code
    # Imported late: torch is slow to import.
    from flows.operations.profile import report

    report(run_store(config, run_id), request)
    return 0


def _announce(arguments: argparse.Namespace) -> None:
    """Shows a person at a terminal that the command has begun: the imports that follow take seconds."""
    if sys.stdout.isatty():
        print(f"reading {arguments.config}", flush=True)


def _profiled_config(source: str, settings: Sequence[str]) -> "RunConfig":
    """The config in a file, or that of a stored run, which starts from its promoted checkpoint."""
    from configs.load import load_config, with_overrides
    from millrace.prompts.stored import is_stored_run
    from millrace.runs.record import latest_attempt

    if not is_stored_run(source):
        return load_config(source, settings)
    model = f"model.path={json.dumps(source)}"
    return with_overrides(dict(latest_attempt(open_store(source)).config), [model, *settings], where=source)


def _settings(arguments: argparse.Namespace, *more: str) -> list[str]:
    """The settings of the command line, and `more`."""
    root = [] if arguments.root is None else [f"storage.root={json.dumps(arguments.root)}"]
    return [*arguments.set, *root, *more]


def _new_run_id(name: str) -> str:
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


_CONFIG = option("config", type=Path, help="a YAML file, such as configs/presets/tiny-cpu.yaml")
_ROOT = option("--root", help="folder or URL under which the run lives; short for --set storage.root=…")
_OF_A_RUN = [
    _CONFIG,
    SET,
    option("--run-id", help="the run's name and folder; made from the config's name and the time if absent"),
    _ROOT,
    option(
        "--resume",
        nargs="?",
        choices=("required", "latest"),
        const="required",
        default="never",
        help="continue the run --run-id from its last checkpoint; `latest`: start it if it does not exist",
    ),
    option(
        "--check", action="store_true", help="only make the checks, and show three sampled answers to three prompts"
    ),
    option(
        "--accept-changed-inputs",
        action="store_true",
        help="continue although prompts, rewards or another input have changed; this is recorded",
    ),
]
COMMANDS = [
    Command("run", _run, "run a campaign", _OF_A_RUN),
    Command(
        "sft",
        _sft,
        "run a campaign that learns demonstrations: those in prompts.source, or rollouts of a stored run",
        [
            *_OF_A_RUN,
            option("--from", dest="source", metavar="RUN_URL", help="learn rollouts of this run, a folder or URL"),
            option("--where", metavar="SQL", help="only rollouts for which this holds (default: 'reward >= 1')"),
        ],
    ),
    Command(
        "profile",
        _profile,
        "run a short campaign and say where the time of its steps goes: matrix products, attention, Python, waiting",
        [
            option(
                "config",
                metavar="CONFIG|RUN_URL",
                help="a YAML file, or a stored run: its config, from its promoted checkpoint on",
            ),
            option("--steps", type=count, required=True, metavar="N", help="optimizer steps to record, after 3 others"),
            SET,
            _ROOT,
        ],
    ),
]
