"""One piece of advice on a run: from the first rule whose cause is among the clauses."""

import shlex
from collections.abc import Callable
from dataclasses import replace

from dashboard.queries.verdict.facts import Facts
from dashboard.queries.verdict.rules import CLAUSES, Verdict

FEW_IDLE = 0.25
"""Idle share above which generators could use fewer devices."""

NOTHING = "Nothing needs to be changed."


def judge(facts: Facts) -> Verdict:
    """Computes the verdict from a run's facts. A finished run can't be changed, so its clauses are not warnings."""
    clauses = [rule(facts) for rule in CLAUSES]
    causes = {clause.cause for clause in clauses}
    advice = (sentence(facts) for cause, sentence in ADVICE.items() if cause in causes)
    if facts.state == "finished":
        clauses = [replace(clause, level="neutral") if clause.level == "warning" else clause for clause in clauses]
    return Verdict(clauses=clauses, advice=next(filter(None, advice), NOTHING))


def _hanging(facts: Facts) -> str:
    silent = max(facts.silent, key=lambda name: facts.silent[name], default="train-0")
    return (
        f"Read logs/{silent}.log in the run's folder: a stage that hangs writes its stacks there and is started again."
    )


def _collapsed(facts: Facts) -> str:
    if facts.setting("training.on_collapse") == "roll_back":
        return "Lower training.learning_rate and resume, unless rolling back helps."
    return "Set training.on_collapse to roll_back, which also lowers the learning rate, and resume."


def _finished(facts: Facts) -> str:
    if facts.best_version == 0:
        return "No trained version is better than the base model: look at the reward and the learning rate."
    return f"Take its best version: `millrace export {shlex.quote(facts.run_url)} --to FOLDER --best`."


def _command(facts: Facts) -> str:
    return " where it was started, with resume: latest." if facts.command is None else f": `{facts.command}`."


def _too_stale(facts: Facts) -> str | None:
    if facts.sync:
        return None
    if facts.setting("training.loss.name") != "reinforce":
        return "Set staleness.too_old to keep: old tokens are trained too, each with its importance weight."
    return (
        f"Raise staleness.max_staleness (now {facts.max_staleness}), or shorten responses: long ones outlast the bound."
    )


def _off_policy(facts: Facts) -> str:
    if not facts.max_staleness:
        updates = (facts.setting("training.minibatches") or 1) * (facts.setting("training.epochs") or 1)
        if updates > 1:
            return f"Lower training.epochs or training.minibatches: {updates} updates on a batch move the policy away."
        return "The bound is 0, so engine and trainer disagree: look at probe_difference and the importance ratios."
    if facts.is_adaptive:
        return "Lower training.learning_rate: adaptive control already lowers the bound."
    # Adaptive control needs importance ratios.
    control = "" if facts.setting("training.loss.name") == "reinforce" else ", or set staleness.control to adaptive"
    mask = ", or set staleness.too_old to mask" if facts.admission_only else ""
    return f"Lower staleness.max_staleness (now {facts.max_staleness}){mask}{control}."


def _length_bias(facts: Facts) -> str | None:
    if facts.sync or facts.admission_only:
        return None
    if facts.setting("training.loss.name") != "reinforce":
        return "Set staleness.too_old to keep, which favours no length."
    return f"Raise staleness.max_staleness (now {facts.max_staleness}): short responses are favoured."


def _no_spread(facts: Facts) -> str:
    has_curriculum = facts.setting("prompts.curriculum_window") is not None
    return f"Choose prompts that are sometimes solved{'' if has_curriculum else ', or set prompts.curriculum_window'}."


def _sync_bound(facts: Facts) -> str:
    other = {"shm": "direct", "direct": "shm on one host"}.get(str(facts.setting("weights.transport")))
    transport = other or "auto"
    return f"Set weights.transport to {transport}, or raise training.groups_per_step: transfers take most of a step."


def _waits(facts: Facts) -> str | None:
    if facts.sync or facts.is_adaptive:
        return None
    return "Raise staleness.max_staleness by one, so that generators wait less for the trainer."


def _trainer_bound(facts: Facts) -> str | None:
    idle = facts.idle.get("generate", 0.0)
    if idle <= FEW_IDLE or facts.sync or (facts.setting("generation.replicas") or 1) == 1:
        return None
    return f"Generators wait {idle:.0%} of their time: use fewer, or give the device of one to the trainer."


ADVICE: dict[str, Callable[[Facts], str | None]] = {
    "damaged": lambda facts: (
        f"Run `millrace fsck {shlex.quote(facts.run_url)}`: it lists the damage and possible repairs."
    ),
    "hanging": _hanging,
    "failed": lambda facts: f"Fix the cause, then continue{_command(facts)}",
    "killed": lambda facts: f"Continue it{_command(facts)}",
    "collapsed": _collapsed,
    "stopped": lambda facts: f"Continue it{_command(facts)}",
    "finished": _finished,
    "too stale": _too_stale,
    "far off policy": _off_policy,
    "length bias": _length_bias,
    "no spread": _no_spread,
    "generator-bound": lambda facts: (
        "Raise generation.replicas or give generators more devices: the trainer waits for them."
    ),
    "scorer-bound": lambda facts: "Raise scoring.workers or scoring.replicas: the trainer waits for scores.",
    "sync-bound": _sync_bound,
    "waits": _waits,
    "trainer-bound": _trainer_bound,
}
"""Cause → advice, most urgent first; None where the advice does not apply to the run."""
