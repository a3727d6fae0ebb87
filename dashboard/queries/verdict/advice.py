"""One piece of advice on a run: of the rules below, the first one whose cause is among the clauses."""

from collections.abc import Callable, Sequence

from dashboard.queries.verdict.facts import Facts
from dashboard.queries.verdict.rules import CLAUSES, Clause, Verdict

FEW_IDLE = 0.25
"""Generators that wait for more of their time than this could do with fewer devices."""

NOTHING = "Nothing needs to be changed."


def judge(facts: Facts) -> Verdict:
    """The verdict on a run with these facts."""
    clauses = [rule(facts) for rule in CLAUSES]
    return Verdict(clauses=clauses, advice=advise(clauses, facts))


def advise(clauses: Sequence[Clause], facts: Facts) -> str:
    """One sentence."""
    causes = {clause.cause for clause in clauses}
    for cause, sentence in ADVICE.items():
        if cause in causes:
            return sentence(facts)
    return NOTHING


def _hanging(facts: Facts) -> str:
    silent = max(facts.silent, key=lambda name: facts.silent[name], default="train-0")
    return (
        f"Read logs/{silent}.log in the run's folder: a stage that hangs writes its stacks there and is started again."
    )


def _too_stale(facts: Facts) -> str:
    if facts.dropped_share is not None and facts.dropped_share >= (facts.masked_share or 0.0):
        return "Set staleness.too_old to mask, so that only the tokens that are too old are lost."
    return f"Raise staleness.max_staleness (now {facts.bound}), or shorten responses: long ones outlast the bound."


def _off_policy(facts: Facts) -> str:
    if not facts.bound:
        return "The bound is 0, so engine and trainer disagree: look at probe_difference and the importance ratios."
    return f"Lower staleness.max_staleness (now {facts.bound}), or set staleness.control to adaptive."


def _trainer_bound(facts: Facts) -> str:
    idle = facts.idle.get("generate", 0.0)
    if idle <= FEW_IDLE or facts.sync:
        return NOTHING
    return f"Generators wait {idle:.0%} of their time: fewer would do, or give the trainer one's device."


ADVICE: dict[str, Callable[[Facts], str]] = {
    "damaged": lambda facts: f"Run `millrace fsck {facts.run_url}`: it says what is damaged and what can be done.",
    "hanging": _hanging,
    "failed": lambda facts: "Mend the cause, then continue it: `millrace run` with its config, --run-id and --resume.",
    "killed": lambda facts: "Continue it: `millrace run` with its config, --run-id and --resume.",
    "collapsed": lambda facts: (
        "Set training.on_collapse to roll_back, which also lowers the learning rate, and resume."
    ),
    "stopped": lambda facts: "Continue it: `millrace run` with its config, --run-id and --resume.",
    "finished": lambda facts: f"Take its best version: `millrace export {facts.run_url} --to FOLDER --best`.",
    "too stale": _too_stale,
    "far off policy": _off_policy,
    "length bias": lambda facts: "Set staleness.too_old to mask, or raise the bound: short responses are favoured.",
    "no spread": lambda facts: "Choose prompts that are sometimes solved, or set prompts.curriculum.window.",
    "generator-bound": lambda facts: (
        "Raise generation.replicas or give generators more devices: the trainer waits for them."
    ),
    "scorer-bound": lambda facts: "Raise scoring.replicas: the trainer waits for scores.",
    "sync-bound": lambda facts: (
        "Set weights.transport to direct, or shm on one host: weights travel for most of a step."
    ),
    "waits": lambda facts: "Raise staleness.max_staleness by one: then generators wait less for the trainer.",
    "trainer-bound": _trainer_bound,
}
"""By cause, the most urgent first."""
