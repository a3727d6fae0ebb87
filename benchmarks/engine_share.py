"""How much of its engine's own speed a generator has in a campaign.

    the same requests, lengths from 1 to 512 tokens ─┬─► engine alone, all submitted at once              ─► tokens/s
                                                     ├─► the same, updated as often as a campaign         ─► tokens/s
                                                     └─► campaign: real streams, a trainer without work   ─► tokens/s

The policy is small and random and never ends a response; log-normal lengths are forced upon its requests. Each engine
has the same number of slots. It is measured between two numbers of tokens, which leave out the start, when all
responses are short, and the end, when the engine runs empty.

    python -m benchmarks.engine_share [--engine vllm] [--slots 64] [--steps 8] [--groups 64] [--json PATH]
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import finish, make_parser, print_table, read_rows, run_campaign, run_logged
from benchmarks.sleeping.engine_alone import save_model
from benchmarks.sleeping.metered_engine import MeterReading
from benchmarks.sleeping.pace import SleepingPace
from benchmarks.sleeping.stage import METER
from storage import layout
from storage.schema import METRIC

TARGET = 0.90
_GROUP_SIZE = 4
_LONGEST, _LONGEST_PROMPT = 512, 16
_FIRST, _LAST = 0.2, 0.85
"""Shares of all tokens between which it is measured."""


def main() -> None:
    """Measures all three, prints the comparison and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--slots", type=int, default=64, help="requests in flight (default: 64)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of the campaign (default: 8)")
    parser.add_argument("--groups", type=int, default=64, help=f"groups of {_GROUP_SIZE} per step (default: 64)")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the logarithm of the lengths (default: 1)")
    parser.add_argument("--mean", type=float, default=105.0, help="mean length before the limits, tokens")
    arguments = parser.parse_args()
    pace = SleepingPace(sigma=arguments.sigma, mean_tokens=arguments.mean, slots=arguments.slots, real_engine=True)
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        result = measure(Path(folder), arguments.engine, pace, arguments.steps, arguments.groups)
    _print(result)
    finish(arguments.json, result)


def measure(root: Path, engine: str, pace: SleepingPace, steps: int, groups_per_step: int) -> dict[str, Any]:
    """Returns the figures of a campaign and of the engine alone."""
    save_model(root / "model", _LONGEST_PROMPT + _LONGEST)
    config = root / "config.json"
    config.write_text(json.dumps(_config(root, engine, pace.slots, steps, groups_per_step)))
    groups = steps * groups_per_step
    lengths = [min(pace.num_tokens(n, i), _LONGEST) for n in range(groups) for i in range(_GROUP_SIZE)]
    window = (_FIRST * sum(lengths), _LAST * sum(lengths))

    campaign = between(_campaign(root / "runs" / "campaign", config, pace), *window)
    alone = between(_alone(root, config, pace, groups), *window)
    rows = {"alone": alone, "campaign": campaign}
    if campaign["updates"]:
        every = campaign["seconds"] / campaign["updates"]
        rows["updated"] = between(_alone(root, config, pace, groups, "--update-every", str(every)), *window)
    share = {name: row["tokens_per_second"] / alone["tokens_per_second"] for name, row in rows.items()}
    return {
        "engine": engine,
        "slots": pace.slots,
        "requests": len(lengths),
        "requests_per_step": groups_per_step * _GROUP_SIZE,
        "tokens_per_response": sum(lengths) / len(lengths),
        "measured": rows,
        "share": share,
        "target": TARGET,
        "targets": {f"a campaign has at least {TARGET:.2f} of the engine's own speed": share["campaign"] >= TARGET},
    }


def between(readings: Iterable[MeterReading], first: float, last: float) -> dict[str, float]:
    """Returns rates and shares of time while the tokens counted went from `first` to `last`."""
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


def _config(root: Path, engine: str, slots: int, steps: int, groups_per_step: int) -> dict[str, Any]:
    generation: dict[str, Any] = {
        "engine": engine,
        "group_size": _GROUP_SIZE,
        "groups_per_batch": slots // _GROUP_SIZE,
        "max_new_tokens": _LONGEST,
    }
    if engine == "vllm":
        generation["engine_args"] = {
            "max_num_seqs": slots,
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
    }


def _campaign(run: Path, config: Path, pace: SleepingPace) -> list[MeterReading]:
    """Runs the campaign and returns the readings that its generator wrote among its metrics."""
    run_campaign(run, config=config, module="benchmarks.sleeping.campaign", environment=pace.to_environment())
    readings: list[dict[str, float]] = []
    for row in read_rows(run, layout.metrics("generate", 0), METRIC).to_pylist():
        if row["name"] == f"{METER}t":
            readings.append({})
        if row["name"].startswith(METER):
            readings[-1][row["name"].removeprefix(METER)] = row["value"]
    return [MeterReading(**reading) for reading in readings]


def _alone(root: Path, config: Path, pace: SleepingPace, groups: int, *options: str) -> list[MeterReading]:
    output = root / "readings.json"
    command = [sys.executable, "-m", "benchmarks.sleeping.engine_alone", str(config), str(output)]
    environment = {**os.environ, **pace.to_environment(), "OMP_NUM_THREADS": "1"}
    run_logged([*command, "--groups", str(groups), *options], root / "alone.log", environment)
    return [MeterReading(**reading) for reading in json.loads(output.read_text())]


def _print(result: Mapping[str, Any]) -> None:
    headings = ("", "tokens/s", "share", "CPU ms", "slots", "updating", "probing", "outside")
    title = f"{result['engine']}, {result['slots']} slots, {result['tokens_per_response']:.0f} tokens a response"
    rows = []
    for name, row in result["measured"].items():
        rows.append(
            [
                name,
                f"{row['tokens_per_second']:,.0f}",
                f"{result['share'][name]:.3f}",
                f"{row['cpu_ms_per_token']:.3f}",
                # Alone, it was given all requests at once: most of the time they wait for a slot.
                f"{min(row['in_flight'], result['slots']) / result['slots']:.3f}",
                *(f"{row[f'{part}_share']:.3f}" for part in ("update", "probe", "outside")),
            ]
        )
    print_table(title, headings, rows)


if __name__ == "__main__":
    main()
