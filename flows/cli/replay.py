"""`millrace replay`: its command line, and what it prints. `show` and `diff` are in `flows.cli.show`."""

import argparse
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from configs.requests import ReplayRequest

DIFFERENT = 1
"""Exit code if --verify found a difference."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    what = "reuse stored runs: verify them, train again, score again, or compare losses"
    parser = commands.add_parser("replay", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("sources", nargs="+", metavar="RUN_URL", help="folders or URLs of stored runs: ROOT/RUN_ID")
    jobs = parser.add_mutually_exclusive_group()
    jobs.add_argument("--verify", action="store_const", const="verify", dest="job", help="train the original batches "
                      "again and compare the weights; exit code 1 if they differ")  # fmt: skip
    jobs.add_argument(
        "--train", action="store_const", const="train", dest="job", help="train again on stored trajectories"
    )
    jobs.add_argument("--compare", metavar="LOSS,LOSS", help="the same batches through several losses, untrained")
    parser.add_argument("--rescore", metavar="NAME", help="score the stored trajectories with this reward; with "
                        "--train, train on these scores")  # fmt: skip
    parser.add_argument("--set", action="extend", nargs="+", default=[], dest="settings", metavar="KEY=VALUE",
                        help="change keys of the stored run's config")  # fmt: skip
    parser.add_argument("--from-step", type=_version, metavar="N", help="begin at this step of the stored run")
    parser.add_argument("--to-step", type=_version, metavar="N", help="end with this step of the stored run")
    parser.add_argument("--where", metavar="SQL", help="only groups for which this holds: 'reward_mean > 0'")
    parser.add_argument("--max-staleness", type=_version, metavar="N", help="only groups of at most this staleness")
    parser.add_argument(
        "--dropped", action="store_true", help="also groups that were dropped as stale, zero_advantage or truncated"
    )
    parser.add_argument(
        "--order", choices=("stored", "shuffled"), default="stored", help="order of the groups (default: stored)"
    )
    parser.add_argument("--start-step", type=_version, metavar="N", help="begin with the checkpoint of this version")
    parser.add_argument("--tolerance", type=_not_negative, metavar="X", help="largest difference that passes")
    parser.add_argument("--root", default="runs", help="where the replay's own run is written (default: runs)")
    parser.add_argument("--run-id", help="its name and folder (default: from the first run's and the time)")


def run(arguments: argparse.Namespace) -> int:
    """Runs a replay. Returns 0, DIFFERENT, or INTERRUPTED or TERMINATED if it was stopped.

    Raises the errors of `flows.replay.prepare`.
    """
    from flows.cli.invocation import INTERRUPTED, TERMINATED, Terminated, stop_on_signals
    from flows.deployment.server import prefect_server
    from flows.replay.prepare import check

    request = _request(arguments)
    console = Console()
    with prefect_server() as wait_for_server:
        check(request)
        from flows.replay.flow import replay
        from flows.replay.formatting import as_tables

        wait_for_server()
        console.print(f"replay {request.run_id}", markup=False, highlight=False)
        stop_on_signals(console)
        try:
            results: dict[str, Any] = replay(request)
        except (KeyboardInterrupt, Terminated) as stopped:
            trained = f", and what was trained is in {request.root}/{request.run_id}" if request.job == "train" else ""
            line = f"stopped; the stored runs are as they were{trained}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            return INTERRUPTED if isinstance(stopped, KeyboardInterrupt) else TERMINATED
    for renderable in as_tables(results):
        console.print(renderable)
    verdict = results.get("verdict")
    return DIFFERENT if verdict is not None and verdict["difference"] is not None else 0


def _request(arguments: argparse.Namespace) -> "ReplayRequest":
    # Imported late: no other command needs it, and all of them come through this module.
    from configs.requests import ReplayRequest

    values = {
        name: value
        for name, value in vars(arguments).items()
        if name in ReplayRequest.model_fields and value is not None
    }
    if arguments.compare is not None:
        values |= {"job": "compare", "losses": arguments.compare.split(",")}
    if arguments.run_id is None:
        what = values.get("job") or "rescore"
        source = PurePosixPath(arguments.sources[0].rstrip("/")).name
        values["run_id"] = f"{source}-{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    return ReplayRequest(**values)


def _version(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a version: expected a whole number of at least 0")
    return int(text)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number of at least 0")
    return value
