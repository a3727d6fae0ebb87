"""The verdict on a run: fixed rules from its facts to clauses. docs/dashboard.md has them as a table.

Facts ─► state, health, bottleneck, staleness, ESS: a clause each ─► Verdict
      └► the first rule of `advice` that holds: one sentence       ┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dashboard.queries.verdict.facts import Facts
from millrace.runs.figures import find_bottleneck
from millrace.runtime.messages import LOADING, STARTING

Level = Literal["good", "warning", "bad", "unknown"]

SILENT_SECONDS = 30.0
"""A replica that has not written its status record for so long is named; for `supervision.hang_seconds`, it hangs."""
DROPPED, MANY_DROPPED = 0.05, 0.25
"""Shares of what the trainer took that was too old, dropped or masked: above the first a warning, above the second
bad."""
_BOUND = {
    "train": "trainer-bound",
    "generate": "generator-bound",
    "score": "scorer-bound",
    "sync_weights": "sync-bound",
}
_UNHEALTHY = {"failed": "unhealthy: it failed", "killed": "unhealthy: it was killed"}
NO_SPREAD = 0.8
"""A warning above this share of groups whose rewards are all equal."""


@dataclass(frozen=True, kw_only=True)
class Clause:
    """One statement on the run."""

    cause: str
    """Which rule it follows from, such as `too stale`; letters and spaces."""
    level: Level
    words: str
    """What a person reads, with the numbers."""
    view: str
    """The page with the chart that shows it."""
    block: str
    """That chart, or table."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said of a run."""

    clauses: Sequence[Clause]
    """In the order in which they are read: state, health, bottleneck, staleness, ESS."""
    advice: str
    """What to do now."""


def state(facts: Facts) -> Clause:
    """Where the run is, and whether it moves."""
    step = f"version {facts.version} of {facts.target or '?'}"

    def clause(cause: str, level: Level, words: str) -> Clause:
        return Clause(cause=cause, level=level, words=words, view="flow", block="flow-tracks")

    if facts.state is None:
        return clause("state unknown", "unknown", "the run's state can't be read")
    if facts.state == "finished":
        return clause("finished", "good", f"finished at {step}")
    if facts.state == "stopped":
        return clause("stopped", "warning", f"stopped at {step}")
    if facts.state in ("failed", "killed"):
        return clause(facts.state, "bad", f"{facts.state} at {step}: {facts.cause}")
    silent = max(facts.silent, key=lambda name: facts.silent[name], default=None)
    if facts.stalled is not None:
        return clause("hanging", "bad", f"hanging at {step}: {facts.stalled}")
    starting = [name for name, doing in facts.doing.items() if doing in (STARTING, LOADING)]
    if silent is not None and silent not in starting and facts.silent[silent] > SILENT_SECONDS:
        words = f"{silent} has written nothing for {duration(facts.silent[silent])}, last: {facts.doing[silent]}"
        if facts.silent[silent] > facts.hang_seconds:
            return clause("hanging", "bad", f"hanging at {step}: {words}")
        return clause("silent", "warning", f"running: {step}; {words}")
    if starting:
        return clause("starting", "good", f"{step}; {starting[0]} is {facts.doing[starting[0]]}")
    if facts.step_seconds is None or facts.target is None:
        return clause("running", "good", f"running: {step}")
    left = duration(max(0, facts.target - facts.version) * facts.step_seconds)
    return clause("running", "good", f"running: {step}, {facts.step_seconds:.3g} s a step, {left} left")


def health(facts: Facts) -> Clause:
    """The worst alarm, or that there is none."""
    if facts.problems:
        more = f", and {len(facts.problems) - 1} more" if len(facts.problems) > 1 else ""
        words = f"damaged: {facts.problems[0]}{more}"
        return Clause(cause="damaged", level="bad", words=words, view="ledger", block="ledger-balance")
    if facts.collapse is not None:
        words = f"collapsed: {facts.collapse}"
        return Clause(cause="collapsed", level="bad", words=words, view="learning", block="learning-reward")
    if facts.state in ("failed", "killed"):
        return Clause(cause=facts.state, level="bad", words=_UNHEALTHY[facts.state], view="flow", block="flow-tracks")
    if facts.alarm is not None:
        return Clause(cause="alarm", level="warning", words=facts.alarm, view="flow", block="flow-tracks")
    if facts.length_bias is not None:
        words = f"length bias: trained ÷ taken length {facts.length_bias:.3f}"
        return Clause(cause="length bias", level="warning", words=words, view="staleness", block="staleness-ratios")
    if facts.no_spread is not None and facts.no_spread > NO_SPREAD:
        words = f"{facts.no_spread:.0%} of the groups teach nothing: their rewards are all equal"
        return Clause(
            cause="no spread", level="warning", words=words, view="learning", block="learning-zero-advantage-share"
        )
    restarts = ", ".join(f"{stage} {count} ×" for stage, count in facts.restarts.items())
    words = f"healthy; started again: {restarts}" if restarts else "healthy: no alarm"
    return Clause(cause="healthy", level="good", words=words, view="learning", block="learning-reward")


def bottleneck(facts: Facts) -> Clause:
    """What holds the pipeline up. Only the trainer should: then no step waits for rollouts."""
    if "train" not in facts.idle or "generate" not in facts.idle:
        return _unknown(facts, "bottleneck", "flow", "flow-idle")
    push = facts.push_seconds or 0.0
    stage, words = find_bottleneck(facts.idle, sync=facts.sync, step_seconds=facts.step_seconds, push=push)
    cause = _BOUND.get(stage or "", "waits")
    good = stage == "train" or facts.sync
    return Clause(cause=cause, level="good" if good else "warning", words=words, view="flow", block="flow-idle")


def staleness(facts: Facts) -> Clause:
    """What was trained against its bound, and what the bound cost."""
    if facts.staleness_mean is None or facts.staleness_max is None:
        return _unknown(facts, "staleness", "staleness", "staleness-over-time")
    words = f"staleness mean {facts.staleness_mean:.2g}, largest {facts.staleness_max:.0f}, bound {facts.bound}"
    lost, what = max((facts.dropped_share or 0.0, "dropped"), (facts.masked_share or 0.0, "masked"))
    level: Level = "bad" if lost > MANY_DROPPED else "warning" if lost > DROPPED else "good"
    if level == "good":
        return Clause(cause="in bound", level=level, words=words, view="staleness", block="staleness-over-time")
    things = "of the rollouts" if what == "dropped" else "of the tokens"
    words += f": {lost:.0%} {things} were too old and {what}"
    return Clause(cause="too stale", level=level, words=words, view="staleness", block="staleness-outcomes")


def sample_size(facts: Facts) -> Clause:
    """How much of a step's sample the importance ratios leave."""
    if facts.ess is None:
        return _unknown(facts, "effective sample size", "learning", "learning-effective-sample-size")
    level: Level = "bad" if facts.ess < facts.ess_floor else "warning" if facts.ess < facts.ess_target else "good"
    words = f"effective sample size {facts.ess:.0%}"
    if level != "good":
        limit, name = (facts.ess_floor, "floor") if level == "bad" else (facts.ess_target, "target")
        words += f", below its {name} of {limit:.0%}"
    return Clause(
        cause="in bound" if level == "good" else "far off policy", level=level, words=words, view="learning",
        block="learning-effective-sample-size",
    )  # fmt: skip


CLAUSES = (state, health, bottleneck, staleness, sample_size)
"""A rule for each clause, in the order of the verdict."""


def duration(seconds: float) -> str:
    """`seconds` in the largest unit of which it has at least 2, or in seconds."""
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _unknown(facts: Facts, what: str, view: str, block: str) -> Clause:
    words = f"{what}: not recorded {'in this run' if facts.version else 'yet'}"
    return Clause(cause="not recorded", level="unknown", words=words, view=view, block=block)
