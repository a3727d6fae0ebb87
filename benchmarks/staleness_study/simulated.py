"""Adaptive control against fixed bounds on shapes that two cores can't run: campaigns simulated by the product's rules.

    calm ─► generators at a quarter of their speed ─► calm ─► responses three times as long ─► calm ─► a reward that
    takes as long as some steps ─► calm            each for so many steps; nobody tells the controller

What a step is worth is its effective sample size, 1 ÷ (1 + χ²), and χ² grows with the square of the staleness. So a
phase is judged by seconds per step ÷ effective sample size, the steps in which the controller still finds out included.
The effective sample size is a cost here, and its target low enough to leave the rule its choice. The simulation admits
and trains the same groups as the product (tests/millrace/planning/test_product.py).

    python -m benchmarks.staleness_study.simulated [--steps 240]
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import machine, make_parser, make_table, write_json
from benchmarks.staleness_study.campaigns import Row
from benchmarks.staleness_study.comparison import ADAPTIVE
from benchmarks.staleness_study.curves import write_bounds
from configs.schema import RunConfig
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import LogNormalLengths
from millrace.planning.simulation.outcome import Trace
from millrace.planning.simulation.simulate import simulate

_BOUNDS = (0, 1, 2, 4, 8, 16)
_HIGHEST = 16
"""Highest bound of adaptive control."""
PHASES = ("calm", "slow generators", "calm", "long responses", "calm", "slow reward", "calm")
"""Of equally many steps."""
_SLOWER, _LONGER = 4.0, 3.0
_ESS_TARGET = 0.75


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A campaign, with GPUs of its own for each stage."""

    name: str
    groups_per_step: int
    generators: int
    mean_tokens: float
    sigma: float
    """Of the logarithm of the response lengths."""
    train: float
    """Seconds of a step."""
    reward: float
    """Seconds that a rollout takes when the reward is slow, in steps' worth."""
    drift: float
    """χ² of the policies that sample and train, per squared version of staleness."""
    group_size: int = 8
    token: float = 0.01
    """Seconds per token of a response."""

    @property
    def max_tokens(self) -> int:
        """Longest response."""
        return round(8 * self.mean_tokens)


SHAPES = (
    Shape(
        name="even lengths", groups_per_step=16, generators=2, mean_tokens=200, sigma=0.3, train=3.0, reward=3.0,
        drift=0.003,
    ),
    Shape(
        name="long tail", groups_per_step=32, generators=4, mean_tokens=1000, sigma=1.0, train=12.0, reward=2.0,
        drift=0.003,
    ),
    Shape(
        name="long tail, cautious steps", groups_per_step=32, generators=4, mean_tokens=1000, sigma=1.0, train=12.0,
        reward=6.0, drift=0.001,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Burst:
    """Responses that are longer in some groups."""

    usual: LogNormalLengths
    longer: LogNormalLengths
    groups: range

    def of_group(self, group_id: int) -> tuple[int, Sequence[int]]:
        return (self.longer if group_id in self.groups else self.usual).of_group(group_id)


def main() -> None:
    """Simulates each shape under each bound, prints its phases, and writes the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=240, help="steps of each phase (default: 240)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the lengths, from 0 (default: 3)")
    parser.add_argument("--ess-target", type=float, default=_ESS_TARGET, help=f"of the rule (default: {_ESS_TARGET})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the bound in force as SVG")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    rows = [row for shape in SHAPES for row in study(shape, arguments.steps, seeds, arguments.ess_target)]
    for shape in SHAPES:
        _print([row for row in rows if row["shape"] == shape.name])
    if arguments.plot:
        write_bounds([row for row in rows if row["bound"] == ADAPTIVE], PHASES, arguments.steps, arguments.plot)
    write_json(arguments.json, {"rows": rows, "steps": arguments.steps, "machine": machine()})


def study(shape: Shape, steps: int, seeds: range, ess_target: float = _ESS_TARGET) -> list[Row]:
    """A row per bound: seconds per effective step of each phase, medians over the seeds, and the share that is lost.

    `bounds` are those in force in each step, with the first seed.
    """
    rows: list[Row] = []
    for bound in (*map(str, _BOUNDS), ADAPTIVE):
        traces = [_played(shape, bound, steps, seed, ess_target) for seed in seeds]
        per_phase = [statistics.median(of_seeds) for of_seeds in zip(*(_per_phase(one) for one in traces), strict=True)]
        bounds = [in_force for in_force, _ in traces[0].readings[steps:]]
        rows.append({"shape": shape.name, "bound": bound, "seconds_per_effective_step": per_phase, "bounds": bounds})
    best = [
        min(row["seconds_per_effective_step"][phase] for row in rows if row["bound"] != ADAPTIVE)
        for phase in range(len(PHASES))
    ]
    for row in rows:
        row["lost"] = [mine / other - 1 for mine, other in zip(row["seconds_per_effective_step"], best, strict=True)]
        row["seconds"] = steps * sum(row["seconds_per_effective_step"])
    return rows


def _played(shape: Shape, bound: str, steps: int, seed: int, ess_target: float) -> Trace:
    """A campaign with one more phase in front, in which everything starts."""
    trace = Trace()
    edges = [steps * (1 + phase) for phase in range(len(PHASES) + 1)]
    usual, burst = _lengths(shape, seed), edges[PHASES.index("long responses")]
    longer = replace(usual, mean_tokens=_LONGER * shape.mean_tokens, max_tokens=round(_LONGER * shape.max_tokens))
    groups = range(burst * shape.groups_per_step, (burst + steps) * shape.groups_per_step)
    simulate(
        _config(shape, bound, ess_target),
        _costs(shape),
        _Burst(usual=usual, longer=longer, groups=groups),
        steps=edges[-1],
        warmup=1,
        trace=trace,
        later={edges[k]: _costs(shape, slow) for k, slow in enumerate(PHASES)},
        drift=shape.drift,
    )
    return trace


def _per_phase(trace: Trace) -> Iterator[float]:
    """Seconds per effective step of each phase."""
    steps = len(trace.trained) // (len(PHASES) + 1)
    for first, last in itertools.pairwise(range(steps, len(trace.trained) + 1, steps)):
        seconds = trace.trained[last - 1].t - trace.trained[first - 1].t
        yield seconds / sum(reading.effective_sample_size for _, reading in trace.readings[first:last])


def _config(shape: Shape, bound: str, ess_target: float) -> RunConfig:
    adaptive = bound == ADAPTIVE
    highest = _HIGHEST if adaptive else int(bound)
    settings: Mapping[str, Any] = {
        "generation": {
            "replicas": shape.generators,
            "group_size": shape.group_size,
            # Places for two steps' groups in all generators together.
            "groups_per_batch": 2 * shape.groups_per_step // shape.generators,
            "max_new_tokens": round(_LONGER * shape.max_tokens),
        },
        "scoring": {"replicas": 512},
        "training": {
            "groups_per_step": shape.groups_per_step,
            "max_steps": 10**6,
            "max_tokens_per_microbatch": 2**20,
        },
        "staleness": {
            "max_staleness": highest,
            "control": "adaptive" if adaptive else "fixed",
            "ess_target": ess_target,
        },
    }
    return RunConfig.model_validate(settings)


def _costs(shape: Shape, slow: str = "calm") -> Costs:
    token = shape.token * (_SLOWER if slow == "slow generators" else 1.0)
    # A group's rollouts are scored one after the other.
    score = shape.reward * shape.train / shape.group_size if slow == "slow reward" else 0.0
    return Costs(
        decode=lambda requests, tokens: token,
        prefill=lambda tokens: 0.0,
        score=score,
        train=lambda tokens, rollouts: shape.train,
        handover=0.1,
        push=0.5,
        pause=0.2,
        checkpoint=0.0,
    )


def _lengths(shape: Shape, seed: int) -> LogNormalLengths:
    return LogNormalLengths(
        prompt_tokens=100,
        mean_tokens=shape.mean_tokens,
        sigma=shape.sigma,
        max_tokens=shape.max_tokens,
        group_size=shape.group_size,
        seed=seed,
    )


def _print(rows: Sequence[Row]) -> None:
    table = make_table(
        f"{rows[0]['shape']}: seconds per effective step, and what is lost to the best fixed bound of the phase",
        ["bound", *PHASES, "most lost", "all"],
    )
    for row in rows:
        cells = [
            f"{seconds:.2f} {lost:+.0%}"
            for seconds, lost in zip(row["seconds_per_effective_step"], row["lost"], strict=True)
        ]
        table.add_row(row["bound"], *cells, f"{max(row['lost']):+.0%}", f"{row['seconds']:.0f} s")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
