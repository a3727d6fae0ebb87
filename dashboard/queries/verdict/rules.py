"""The rules that turn a run's facts into the clauses of its verdict; see the table in docs/dashboard.md.

Facts ─► state, health, bottleneck, staleness, ESS: a clause each ─► Verdict
      └► the first rule of `advice` that applies: one sentence     ┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dashboard.queries.verdict.facts import Facts
from millrace.runs.status import find_bottleneck
from millrace.runtime.messages import LOADING, STARTING

Level = Literal["good", "neutral", "warning", "bad"]
"""Neutral: not known, or of no importance once the run has finished."""

SILENT_SECONDS = 30.0
"""Age of a status record that causes a warning; after `supervision.hang_seconds`, the replica hangs."""
DROPPED, MANY_DROPPED = 0.05, 0.25
"""Shares of taken data that is dropped or masked as too old: above the first a warning, above the second bad."""
BOUND = {
    "train": "trainer-bound",
    "generate": "generator-bound",
    "score": "scorer-bound",
    "sync_weights": "sync-bound",
}
"""Stage → cause of the bottleneck's clause if it is this stage."""
_UNHEALTHY = {"failed": "unhealthy: it failed", "killed": "unhealthy: it was killed"}
NO_SPREAD = 0.8
"""Share of groups with equal rewards above which there is a warning."""

SEVERITY: Mapping[Level, int] = {"neutral": 0, "good": 1, "warning": 2, "bad": 3}


@dataclass(frozen=True, kw_only=True)
class Clause:
    """One statement about the run."""

    cause: str
    """The rule's result, such as `too stale`; letters and spaces."""
    level: Level
    words: str
    """Text with figures for the reader."""
    block: str
    """Id of the chart or table with the evidence."""

    @property
    def view(self) -> str:
        """The page of that block, which its id begins with."""
        return self.block.partition("-")[0]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Clauses and advice on a run."""

    clauses: Sequence[Clause]
    """In order: state, health, bottleneck, staleness, ESS."""
    advice: str
    """One sentence on the next action."""


def state(facts: Facts) -> Clause:
    """Returns the run's state and progress."""
    step = f"version {facts.version} of {facts.target or '?'}"

    def clause(cause: str, level: Level, words: str) -> Clause:
        return Clause(cause=cause, level=level, words=words, block="flow-tracks")

    if facts.state is None:
        return clause("state unknown", "neutral", "the run's state can't be read")
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
    """Returns the worst alarm, or that the run is healthy."""
    if facts.problems:
        more = f", and {len(facts.problems) - 1} more" if len(facts.problems) > 1 else ""
        words = f"damaged: {facts.problems[0]}{more}"
        return Clause(cause="damaged", level="bad", words=words, block="ledger-balance")
    if facts.collapse is not None:
        words = f"collapsed: {facts.collapse}"
        return Clause(cause="collapsed", level="bad", words=words, block="learning-reward")
    if facts.state in ("failed", "killed"):
        return Clause(cause=facts.state, level="bad", words=_UNHEALTHY[facts.state], block="flow-tracks")
    if facts.alarm is not None:
        return Clause(cause="alarm", level="warning", words=facts.alarm, block="flow-tracks")
    if facts.length_bias is not None:
        words = f"length bias: trained ÷ taken length {facts.length_bias:.3f}"
        return Clause(cause="length bias", level="warning", words=words, block="staleness-ratios")
    if facts.no_spread is not None and facts.no_spread > NO_SPREAD:
        words = f"{facts.no_spread:.0%} of the groups teach nothing: their rewards are all equal"
        return Clause(cause="no spread", level="warning", words=words, block="learning-zero-advantage-share")
    restarts = ", ".join(f"{stage} {count} ×" for stage, count in facts.restarts.items())
    words = f"healthy; restarts: {restarts}" if restarts else "healthy: no alarm"
    return Clause(cause="healthy", level="good", words=words, block="learning-reward")


def bottleneck(facts: Facts) -> Clause:
    """Returns the bottleneck. It should be the trainer, so that no step waits for rollouts."""
    if "train" not in facts.idle or "generate" not in facts.idle:
        return _unknown(facts, "bottleneck", "flow-idle")
    push = facts.push_seconds or 0.0
    stage, words = find_bottleneck(facts.idle, sync=facts.sync, step_seconds=facts.step_seconds, push=push)
    cause = BOUND.get(stage or "", "waits")
    good = stage == "train" or facts.sync
    return Clause(cause=cause, level="good" if good else "warning", words=words, block="flow-idle")


def staleness(facts: Facts) -> Clause:
    """Compares staleness with its bound, and returns the cost of the bound."""
    if facts.staleness_mean is None or facts.staleness_max is None:
        return _unknown(facts, "staleness", "staleness-over-time")
    bound = f"admitted within {facts.max_staleness}" if facts.admission_only else f"bound {facts.max_staleness}"
    words = f"staleness mean {facts.staleness_mean:.2g}, largest {facts.staleness_max:.0f}, {bound}"
    lost, action = max((facts.dropped_share or 0.0, "dropped"), (facts.masked_share or 0.0, "masked"))
    level: Level = "bad" if lost > MANY_DROPPED else "warning" if lost > DROPPED else "good"
    if level == "good":
        cause = "admitted in bound" if facts.admission_only else "in bound"
        return Clause(cause=cause, level=level, words=words, block="staleness-over-time")
    things = "of the rollouts" if action == "dropped" else "of the tokens"
    words += f": {lost:.0%} {things} were too old and {action}"
    return Clause(cause="too stale", level=level, words=words, block="staleness-outcomes")


def sample_size(facts: Facts) -> Clause:
    """Compares the effective sample size with its target and floor; of supervised fine-tuning, returns the loss."""
    if facts.is_supervised:
        words = "loss: not recorded yet" if facts.loss is None else f"loss {facts.loss:.3g}"
        return Clause(cause="supervised", level="good", words=words, block="learning-loss")
    if facts.ess is None:
        return _unknown(facts, "effective sample size", "learning-effective-sample-size")
    level: Level = "bad" if facts.ess < facts.ess_floor else "warning" if facts.ess < facts.ess_target else "good"
    words = f"effective sample size {facts.ess:.0%}"
    if level != "good":
        limit, name = (facts.ess_floor, "floor") if level == "bad" else (facts.ess_target, "target")
        words += f", below its {name} of {limit:.0%}"
    return Clause(
        cause="in bound" if level == "good" else "far off policy", level=level, words=words,
        block="learning-effective-sample-size",
    )  # fmt: skip


def worst(clauses: Sequence[Clause]) -> Clause:
    """Returns the first of the worst clauses."""
    return max(clauses, key=lambda clause: SEVERITY[clause.level])


CLAUSES = (state, health, bottleneck, staleness, sample_size)
"""Rules in the order of the verdict's clauses."""


def duration(seconds: float) -> str:
    """Formats `seconds` in the largest unit that gives at least 2, otherwise in seconds."""
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _unknown(facts: Facts, what: str, block: str) -> Clause:
    words = f"{what}: not recorded {'in this run' if facts.version else 'yet'}"
    return Clause(cause="not recorded", level="neutral", words=words, block=block)
