"""Costs of stragglers: campaigns of sleeping stages whose responses have log-normal lengths.

    case: spread σ of the lengths, bound η, B groups a step, slots for C groups, staleness.too_old
      ├─► simulation ─────────────────────────────────────────────────────► expected ─┐
      └─► campaign: engine and trainer sleep, everything else is real ─► measured ─┴─► a row

    share     the campaign's steps per second ÷ those of its trainer alone, which is as fast as its engine alone
    loss      trainable tokens, unmasked ÷ tokens that the engine could have sampled meanwhile
    length    mean length of the rollouts trained ÷ of all that the trainer took

Finished campaigns under --root are not run again. --simulated prints what the simulation expects, and runs none.

    python -m benchmarks.long_tail [--quick] [--simulated] [--modes keep …] [--steps 40] [--step-seconds 6]
                                   [--root FOLDER] [--json PATH]
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc

from benchmarks.harness import finish, make_parser, print_table, read_rows, run_campaign
from benchmarks.sleeping.pace import SleepingPace
from benchmarks.sleeping.stage import SLOT_SECONDS
from configs.schema import RunConfig
from millrace.planning.durations import Costs, Lengths
from millrace.planning.simulation import simulate
from millrace.rollouts.consumed import TRAINED
from storage import layout
from storage.schema import CONSUMED, METRIC

LOSS_SHARES = {0.6: 0.95, 1.0: 0.90}
"""Least tokens with loss ÷ tokens that the engine could have sampled, of the best mode in every case, by σ."""
LENGTHS_AGREE = 0.01
"""Trained rollouts are as long as all rollouts to within this, in that mode."""
GROUP_SIZE = 4
MEAN_TOKENS = 100
MAX_TOKENS = 4096
"""Forty times the mean: at σ = 1, one response in fifty thousand is longer, and is cut."""
Mode = Literal["drop", "wait", "mask", "keep"]
MODES: tuple[Mode, ...] = ("drop", "wait", "mask", "keep")
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LongTailCase:
    """One campaign."""

    sigma: float
    """Standard deviation of the logarithm of the lengths."""
    max_staleness: int
    groups_per_step: int
    groups_per_batch: int
    mode: Mode
    """`staleness.too_old`."""

    @property
    def name(self) -> str:
        """The run's name."""
        groups = f"B{self.groups_per_step}-C{self.groups_per_batch}"
        return f"sigma{self.sigma:g}-eta{self.max_staleness}-{groups}-{self.mode}"

    def pace(self, step_seconds: float) -> SleepingPace:
        """Generator and trainer each make a step in `step_seconds`, if nothing holds them up."""
        response_seconds = step_seconds * self.groups_per_batch / self.groups_per_step
        return SleepingPace(
            sigma=self.sigma,
            mean_tokens=MEAN_TOKENS,
            seconds_per_token=response_seconds / MEAN_TOKENS,
            slots=self.groups_per_batch * GROUP_SIZE,
            train_seconds=step_seconds,
        )

    def config(self, steps: int) -> dict[str, Any]:
        """Returns the campaign's config. Everything is small, so that only the sleeps take long."""
        return {
            "name": "long-tail",
            "model": {"warm_start_steps": 0},
            "prompts": {"num_eval": 1, "digits": 1},
            "promotion": {"margin": None},
            "generation": {
                "group_size": GROUP_SIZE,
                "groups_per_batch": self.groups_per_batch,
                "max_new_tokens": MAX_TOKENS,
            },
            "training": {"max_steps": steps, "groups_per_step": self.groups_per_step},
            "staleness": {"max_staleness": self.max_staleness, "too_old": self.mode},
        }


def all_cases(groups: int, modes: Sequence[Mode] = MODES) -> list[LongTailCase]:
    """Returns the table's cases with these modes, with `groups` per optimizer step."""
    return [
        LongTailCase(sigma=sigma, max_staleness=eta, groups_per_step=groups, groups_per_batch=in_flight, mode=mode)
        for sigma, eta, in_flight, mode in product(LOSS_SHARES, (3, 4), (groups, groups * 3 // 2), modes)
    ]


def main() -> None:
    """Runs the campaigns, prints the table and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--groups", type=int, default=64, help="groups per optimizer step, B")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each campaign")
    parser.add_argument("--warmup", type=int, default=10, help="first steps that do not count")
    parser.add_argument("--step-seconds", type=float, default=6.0, help="sleep of the trainer per step")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="values of staleness.too_old")
    parser.add_argument("--quick", action="store_true", help="only σ = 0.6, η = 4, C = B")
    parser.add_argument("--simulated", action="store_true", help="run no campaign: only what the simulation expects")
    parser.add_argument("--root", type=Path, help="folder of the campaigns, kept; by default a temporary one")
    arguments = parser.parse_args()
    if arguments.steps < arguments.warmup + 2:
        parser.error(f"--steps is {arguments.steps}; expected at least two more than --warmup, {arguments.warmup}")
    cases = all_cases(arguments.groups, arguments.modes)
    if arguments.quick:
        quick = LongTailCase(
            sigma=0.6, max_staleness=4, groups_per_step=arguments.groups, groups_per_batch=arguments.groups, mode="drop"
        )
        cases = [replace(quick, mode=mode) for mode in arguments.modes]
    lengths = {"step_seconds": arguments.step_seconds, "steps": arguments.steps, "warmup": arguments.warmup}
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as temporary:
        root = (arguments.root or Path(temporary)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(case), "expected": expect(case, **lengths)} for case in cases]
        if not arguments.simulated:
            rows = [{**row, "measured": measure(case, root, **lengths)} for row, case in zip(rows, cases, strict=True)]
    _print(rows)
    result = {"group_size": GROUP_SIZE, "mean_tokens": MEAN_TOKENS, **lengths, "rows": rows}
    finish(arguments.json, {**result, "targets": targets_met(rows)})


@dataclass(frozen=True, kw_only=True, eq=False)
class _Lengths(Lengths):
    """The sleeping engine's response lengths; its prompts cost nothing."""

    pace: SleepingPace

    def of_group(self, group_id: int) -> tuple[int, Sequence[int]]:
        return 0, [min(MAX_TOKENS, self.pace.num_tokens(group_id, i)) for i in range(GROUP_SIZE)]


def expect(case: LongTailCase, *, step_seconds: float = 1.0, steps: int, warmup: int) -> Figures:
    """Simulates `steps` steps with the durations and lengths of the sleeping stages, and leaves out the warm-up."""
    pace = case.pace(step_seconds)
    costs = Costs(
        decode=lambda requests, tokens: pace.seconds_per_token,
        prefill=lambda tokens: 0.0,
        score=0.0,
        train=lambda tokens, rollouts: step_seconds,
        handover=0.0,
        push=0.0,
        pause=0.0,
        checkpoint=0.0,
    )
    config = RunConfig.model_validate(case.config(steps))
    lengths = _Lengths(pace=pace, groups=(), group_size=GROUP_SIZE, max_tokens=MAX_TOKENS)
    outcome = simulate(config, costs, lengths, steps=steps, warmup=warmup)
    with_loss = outcome.tokens_per_second * (1 - outcome.masked_token_share)
    shared = ("dropped_share", "masked_token_share", "staleness_mean", "staleness_max", "length_ratio")
    return {
        "share": step_seconds / outcome.step_seconds,
        **{name: getattr(outcome, name) for name in shared},
        "loss_share": with_loss * pace.seconds_per_token / pace.slots,
    }


def measure(case: LongTailCase, root: Path, *, step_seconds: float, steps: int, warmup: int) -> Figures:
    """Runs the case's campaign in a folder of `root`, and computes its figures without the warm-up."""
    pace = case.pace(step_seconds)
    run, config = root / case.name, root / f"{case.name}.json"
    config.write_text(json.dumps(case.config(steps)))
    run_campaign(run, config=config, module="benchmarks.sleeping.campaign", environment=pace.to_environment())
    rows = read_rows(run, layout.CONSUMED, CONSUMED)
    rows = rows.filter(pc.field("policy_version") >= warmup)
    t_first, t_last = pc.min_max(rows["t"]).as_py().values()
    seconds = t_last - t_first
    # The rows of version `warmup` say when counting begins; they belong to the step before.
    rows = rows.filter(pc.field("policy_version") > warmup)
    trained = rows.filter(pc.field("outcome") == TRAINED)
    timed_steps = pc.max(trained["policy_version"]).as_py() - warmup
    tokens, masked = (pc.sum(trained[name]).as_py() for name in ("tokens", "masked_tokens"))
    return {
        "steps": timed_steps,
        "seconds": seconds,
        "share": timed_steps * step_seconds / seconds,
        "dropped_share": 1 - trained.num_rows / rows.num_rows,
        "masked_token_share": masked / tokens,
        "staleness_mean": pc.mean(trained["staleness"]).as_py(),
        "staleness_max": pc.max(trained["staleness"]).as_py(),
        "length_ratio": pc.mean(trained["tokens"]).as_py() / pc.mean(rows["tokens"]).as_py(),
        "loss_share": (tokens - masked) * pace.seconds_per_token / (seconds * pace.slots),
        "engine_idle": 1 - _slots_in_use(run, warmup) / pace.slots,
    }


def _slots_in_use(run: Path, warmup: int) -> float:
    """Returns the mean number of the engine's slots in use, from the first version that counts to the last."""
    rows = read_rows(run, layout.metrics("generate", 0), METRIC)
    rows = rows.filter((pc.field("name") == SLOT_SECONDS) & (pc.field("policy_version") >= warmup))
    t, slot_seconds = rows["t"].to_pylist(), rows["value"].to_pylist()
    return float((slot_seconds[-1] - slot_seconds[0]) / (t[-1] - t[0]))


def targets_met(rows: Sequence[Figures]) -> dict[str, bool]:
    """For each σ: does one mode use enough of the engine's capacity in every case, without preferring any length?"""
    met = {}
    for sigma, least in LOSS_SHARES.items():
        figures = [(row["mode"], _figures(row)) for row in rows if row["sigma"] == sigma]
        missed = {
            mode
            for mode, of_case in figures
            if of_case["loss_share"] < least or abs(of_case["length_ratio"] - 1) > LENGTHS_AGREE
        }
        modes = sorted({mode for mode, _ in figures} - missed)
        if figures:
            name = f"σ = {sigma}: {least:.0%} of the capacity has loss, lengths within {LENGTHS_AGREE:.0%}"
            met[f"{name} ({', '.join(modes) or 'no mode'})"] = bool(modes)
    return met


def _figures(row: Figures) -> Figures:
    """Figures of the campaign, or of the simulation where none was run."""
    figures: Figures = row["measured"] if "measured" in row else row["expected"]
    return figures


def _print(rows: Sequence[Figures]) -> None:
    headings = (
        *("", "share", "expected", "dropped", "masked", "tokens with loss ÷ engine capacity", "stale", "length"),
        "idle",
    )
    lines = []
    for row in rows:
        expected, batches = row["expected"], row["groups_per_batch"] / row["groups_per_step"]
        figures = _figures(row)
        lines.append(
            [
                f"σ {row['sigma']:g}, η {row['max_staleness']}, C = {batches:g} B, {row['mode']}",
                *(f"{figures['share']:.3f}", f"{expected['share']:.3f}"),
                *(f"{figures[name]:.3f}" for name in ("dropped_share", "masked_token_share", "loss_share")),
                f"{figures['staleness_mean']:.1f}, {figures['staleness_max']}",
                f"{figures['length_ratio']:.3f}",
                f"{figures['engine_idle']:.3f}" if "engine_idle" in figures else "–",
            ]
        )
    title = "Measured" if "measured" in rows[0] else "Simulated"
    print_table(f"{title} after the warm-up; idle: share of the engine's slots", headings, lines)


if __name__ == "__main__":
    main()
