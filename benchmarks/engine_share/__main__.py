"""How much of its engine's own speed a generator has in a campaign.

    the same requests, lengths from 1 to 512 tokens ─┬─► engine alone, all given at once                ─► tokens/s
                                                     ├─► the same, updated as often as a campaign       ─► tokens/s
                                                     └─► campaign: real streams, scorer and trainer cost nothing

The policy is small and random and never ends a response; log-normal lengths are forced upon its requests. Each engine
has the same number of places. It is measured between two numbers of tokens, which leave out the start, when all
responses are short, and the end, when the engine runs empty.

    python -m benchmarks.engine_share [--engine vllm] [--places 64] [--steps 8] [--groups 64] [--json PATH]
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_share.generate import METER
from benchmarks.engine_share.metered import Reading
from benchmarks.engine_share.model import save_model
from benchmarks.harness import finish, make_parser, print_table
from benchmarks.sleeping.pace import VARIABLE, LongTail, Pace
from storage import layout
from storage.schema import METRIC
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

TARGET = 0.90
_GROUP_SIZE = 4
_LONGEST, _LONGEST_PROMPT = 512, 16
_FIRST, _LAST = 0.2, 0.85
"""Shares of all tokens between which it is measured."""


def main() -> None:
    """Measures all three, prints the comparison and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--places", type=int, default=64, help="requests in flight (default: 64)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of the campaign (default: 8)")
    parser.add_argument("--groups", type=int, default=64, help=f"groups of {_GROUP_SIZE} per step (default: 64)")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the logarithm of the lengths (default: 1)")
    parser.add_argument("--mean", type=float, default=105.0, help="mean length before the limits, tokens")
    arguments = parser.parse_args()
    tail = LongTail(sigma=arguments.sigma, mean_tokens=arguments.mean, seconds_per_token=0.0, places=arguments.places)
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        result = measure(Path(folder), arguments.engine, tail, arguments.steps, arguments.groups)
    _print(result)
    finish(arguments.json, result)


def measure(root: Path, engine: str, tail: LongTail, steps: int, groups_per_step: int) -> dict[str, Any]:
    """The figures, plain JSON."""
    save_model(root / "model", _LONGEST_PROMPT + _LONGEST)
    config = root / "config.json"
    config.write_text(json.dumps(_config(root, engine, tail.places, steps, groups_per_step)))
    groups = steps * groups_per_step
    lengths = [min(tail.tokens(n, i), _LONGEST) for n in range(groups) for i in range(_GROUP_SIZE)]
    window = (_FIRST * sum(lengths), _LAST * sum(lengths))
    pace = Pace(generate=0.0, score=0.0, train=0.0, rollouts_per_step=groups_per_step * _GROUP_SIZE, long_tail=tail)

    campaign = between(_campaign(root, config, pace), *window)
    alone = between(_alone(root, config, pace, groups), *window)
    rows = {"alone": alone, "campaign": campaign}
    if campaign["updates"]:
        every = campaign["seconds"] / campaign["updates"]
        rows["updated"] = between(_alone(root, config, pace, groups, every), *window)
    share = {name: row["tokens_per_second"] / alone["tokens_per_second"] for name, row in rows.items()}
    return {
        "engine": engine,
        "places": tail.places,
        "requests": len(lengths),
        "requests_per_step": pace.rollouts_per_step,
        "tokens_per_response": sum(lengths) / len(lengths),
        "measured": rows,
        "share": share,
        "target": TARGET,
        "targets": {f"a campaign has at least {TARGET:.2f} of the engine's own speed": share["campaign"] >= TARGET},
    }


def between(readings: Iterable[Reading], first: float, last: float) -> dict[str, float]:
    """Rates and shares of time while the tokens counted went from `first` to `last`."""
    inside = [reading for reading in readings if first <= reading.tokens <= last]
    begin, end = inside[0], inside[-1]
    seconds = end.t - begin.t
    return {
        "seconds": seconds,
        "tokens_per_second": (end.tokens - begin.tokens) / seconds,
        "in_flight": (end.response_seconds - begin.response_seconds) / seconds,
        "updates": end.updates - begin.updates,
        "update_share": (end.update_seconds - begin.update_seconds) / seconds,
        "probe_share": (end.probe_seconds - begin.probe_seconds) / seconds,
        "outside_share": (end.outside_seconds - begin.outside_seconds) / seconds,
        "cpu_ms_per_token": 1000 * (end.cpu_seconds - begin.cpu_seconds) / (end.tokens - begin.tokens),
    }


def _config(root: Path, engine: str, places: int, steps: int, groups_per_step: int) -> dict[str, Any]:
    generation: dict[str, Any] = {
        "engine": engine,
        "group_size": _GROUP_SIZE,
        "groups_per_batch": places // _GROUP_SIZE,
        "max_new_tokens": _LONGEST,
    }
    if engine == "vllm":
        generation["engine_args"] = {
            "max_num_seqs": places,
            "max_model_len": _LONGEST_PROMPT + _LONGEST,
            "enforce_eager": True,
        }
    return {
        "name": "engine-share",
        "model": {"path": str(root / "model")},
        "prompts": {"num_eval": 1},
        "generation": generation,
        "training": {"max_steps": steps, "groups_per_step": groups_per_step},
        "promotion": {"margin": None},
        "storage": {"root": str(root / "runs")},
    }


def _campaign(root: Path, config: Path, pace: Pace) -> list[Reading]:
    run = root / "runs" / "campaign"
    command = ["benchmarks.engine_share.campaign", "run", str(config), "--run-id", run.name]
    _call(command, pace, root / "campaign.log", PREFECT_HOME=str(root / "prefect"))
    return _stored(run)


def _stored(run: Path) -> list[Reading]:
    """The readings that a generator wrote among its metrics."""
    reader = StreamReader(open_store(str(run)), layout.metrics("generate", 0), METRIC)
    fields: list[dict[str, float]] = []
    for part in reader.readable():
        for row in part.table.to_pylist():
            if row["name"] == f"{METER}t":
                fields.append({})
            if row["name"].startswith(METER):
                fields[-1][row["name"].removeprefix(METER)] = row["value"]
    return [Reading(**fields) for fields in fields]


def _alone(root: Path, config: Path, pace: Pace, groups: int, update_every: float | None = None) -> list[Reading]:
    output = root / "readings.json"
    updates = [] if update_every is None else ["--update-every", str(update_every)]
    command = ["benchmarks.engine_share.alone", str(config), str(output), "--groups", str(groups), *updates]
    _call(command, pace, root / "alone.log", OMP_NUM_THREADS="1")
    return [Reading(**fields) for fields in json.loads(output.read_text())]


def _call(command: Sequence[str], pace: Pace, log: Path, **environment: str) -> None:
    """Runs a Python module. Raises RuntimeError with the end of its output if it fails."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with log.open("w") as output:
        ended = subprocess.run(
            [sys.executable, "-m", *command],
            env={**inherited, **environment, VARIABLE: pace.to_json()},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode:
        raise RuntimeError(f"{command[0]} ended with exit code {ended.returncode}:\n{log.read_text()[-4000:]}")


def _print(result: Mapping[str, Any]) -> None:
    headings = ("", "tokens/s", "share", "CPU ms", "places", "updating", "probing", "outside")
    title = f"{result['engine']}, {result['places']} places, {result['tokens_per_response']:.0f} tokens a response"
    rows = []
    for name, row in result["measured"].items():
        rows.append(
            [
                name,
                f"{row['tokens_per_second']:,.0f}",
                f"{result['share'][name]:.3f}",
                f"{row['cpu_ms_per_token']:.3f}",
                # Alone, it was given all requests at once: most of the time they wait for a place.
                f"{min(row['in_flight'], result['places']) / result['places']:.3f}",
                *(f"{row[f'{what}_share']:.3f}" for what in ("update", "probe", "outside")),
            ]
        )
    print_table(title, headings, rows)


if __name__ == "__main__":
    main()
