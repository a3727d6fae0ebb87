"""`millrace replay`: its command line and its tables."""

import argparse
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from rich.console import Console

from flows.cli.command_line import SET, Command, not_negative, option, version
from flows.display.tables import echo, for_terminal

if TYPE_CHECKING:
    from configs.requests import ReplayRequest

DIFFERENT = 1
"""Exit code if --verify found a difference."""


def _replay(arguments: argparse.Namespace) -> int:
    from flows.deployment.server import prefect_server

    request = _request(arguments)
    with prefect_server() as wait_for_server:
        # Imported while the server starts.
        from flows.cli.run import STOPS, stop_on_signals
        from flows.operations.replay import check, replay
        from flows.operations.replay_results import sections

        check(request)
        wait_for_server()
        echo(f"replay {request.run_id}")
        stop_on_signals(Console())
        try:
            results: dict[str, Any] = replay(request)
        except tuple(STOPS) as stopped:
            trained = (
                f", and the steps trained are in {request.root}/{request.run_id}" if request.job == "train" else ""
            )
            echo(f"stopped; the stored runs are as they were{trained}")
            return STOPS[type(stopped)]
    for section in sections(results):
        echo(*for_terminal(section))
    verdict = results.get("verdict")
    return DIFFERENT if verdict is not None and verdict["difference"] is not None else 0


def _request(arguments: argparse.Namespace) -> "ReplayRequest":
    from configs.requests import ReplayRequest

    options = {**vars(arguments), "settings": arguments.set}
    if arguments.compare is not None:
        options |= {"job": "compare", "losses": arguments.compare.split(",")}
    if arguments.run_id is None:
        source = PurePosixPath(arguments.sources[0].rstrip("/")).name
        options["run_id"] = f"{source}-{options['job'] or 'rescore'}-{time.strftime('%Y%m%d-%H%M%S')}"
    fields = ReplayRequest.model_fields
    return ReplayRequest(**{name: value for name, value in options.items() if name in fields and value is not None})


_JOBS = [
    option("--verify", action="store_const", const="verify", dest="job",
           help="train the original batches again and compare the weights; exit code 1 if they differ"),
    option("--train", action="store_const", const="train", dest="job", help="train again on stored trajectories"),
    option("--compare", metavar="LOSS,LOSS", help="the same batches through several losses, untrained"),
]  # fmt: skip
_RESCORE = "score the stored trajectories with this reward; with --train, train on these scores"
COMMANDS = [
    Command(
        "replay",
        _replay,
        "reuse stored runs: verify them, train again, score again, or compare losses",
        [
            option("sources", nargs="+", metavar="RUN_URL", help="folders or URLs of stored runs: ROOT/RUN_ID"),
            _JOBS,
            option("--rescore", metavar="NAME", help=_RESCORE),
            SET,
            option("--from-step", type=version, metavar="N", help="begin at this step of the stored run"),
            option("--to-step", type=version, metavar="N", help="end with this step of the stored run"),
            option("--where", metavar="SQL", help="only groups for which this holds: 'reward_mean > 0'"),
            option("--max-staleness", type=version, metavar="N", help="only groups of at most this staleness"),
            option("--dropped", action="store_true",
                   help="also groups that were dropped as stale, zero_advantage or truncated"),
            option("--order", choices=("stored", "shuffled"), default="stored",
                   help="order of the groups (default: stored)"),
            option("--start-step", type=version, metavar="N", help="begin with the checkpoint of this version"),
            option("--tolerance", type=not_negative, metavar="X", help="largest difference that passes"),
            option("--root", default="runs", help="where the replay's own run is written (default: runs)"),
            option("--run-id", help="its name and folder (default: from the first run's and the time)"),
        ],
    )
]  # fmt: skip
