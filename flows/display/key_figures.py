"""The figures and tables of a run, made from its status: for the terminal, the Prefect UI and the report."""

import time
from collections.abc import Sequence
from typing import Any

Row = dict[str, str]
"""A row of a table, by column."""


def figures(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The key figures of a run, as (name, value)."""
    ledger, staleness, sync = status["ledger"], status["staleness"], status["weight_sync"]
    dropped = ", ".join(f"{reason} {amount['rollouts']}" for reason, amount in ledger["dropped"].items()) or "none"
    histogram = "  ".join(f"{value}: {count}" for value, count in staleness["histogram"].items()) or "–"
    found = [
        ("version", f"{status['steps']} of {status['max_steps']}; {status['policy_versions_used']} used by generators"),
        ("reward", number(status["reward_mean"])),
        ("staleness", f"mean {number(staleness['mean'])}, max {number(staleness['max'])} of {staleness['bound']}"),
        ("rollouts by staleness", histogram),
        *_decided(status),
        ("trained to taken", trained_to_taken(status)),
        ("queue", f"{queue_length(ledger)} rollouts on their way to the trainer"),
        ("ledger", f"{ledger['generated']['rollouts']} generated = {ledger['trained']['rollouts']} trained"),
        ("", f"+ {ledger['buffered']['rollouts']} buffered + {ledger['in_flight']['rollouts']} in flight"),
        ("", f"+ dropped: {dropped}"),
        *_exceptional(status),
        ("weight sync", f"{sync['count']} by {sync['transport']}, median {number(sync['p50_seconds'], 4)} s"),
    ]
    found += _incidents(status)
    for result in status["eval"].values():
        found += _measured(result)
    if (best := status["best"]) is not None:
        found.append(("best version", evaluation_line(best)))
    if status["early_stop"] is not None:
        found.append(("early stop", status["early_stop"]))
    return found


def already_finished(status: dict[str, Any]) -> str | None:
    """That an attempt found its run finished, and how to train on; None if it made a step, or stopped before one."""
    steps, max_steps = status["steps"], status["max_steps"]
    if status["state"] != "finished" or steps > status["first_step"]:
        return None
    more = f"raise training.max_steps (now {max_steps:,}) to train on"
    if steps < max_steps:
        more = f"raise evaluation.stop_after to train on ({status['early_stop']})"
    return f"already finished at version {steps:,}: nothing was trained; {more}"


def evaluation_line(evaluation: dict[str, Any]) -> str:
    """One of a status's `evaluations` in a line."""
    (_, held_out), *sets = evaluation["accuracy"].items()
    measured = _accuracy(held_out, evaluation["interval"], f"{evaluation['prompts']} prompts")
    further = "".join(f"; {name} {accuracy_text(accuracy)}" for name, accuracy in sets)
    version = evaluation["policy_version"]
    return f"{version}{'' if version else ', the base model'}: held-out accuracy {measured}{further}"


def evaluation_rows(status: dict[str, Any]) -> list[Row]:
    """A row per evaluated version, in order: the accuracy on each set, and which version is the best.

    The accuracy on the held-out prompts has its 95 % interval.
    """
    best = None if status["best"] is None else status["best"]["policy_version"]
    rows = []
    for evaluation in status["evaluations"]:
        (name, held_out), *sets = evaluation["accuracy"].items()
        rows.append(
            {
                "version": f"{evaluation['policy_version']:,}",
                name: f"{accuracy_text(held_out, 4)}{interval(evaluation['interval'])}",
                **{further: accuracy_text(accuracy, 4) for further, accuracy in sets},
                "note": "best" if evaluation["policy_version"] == best else "",
            }
        )
    return rows


def decision_rows(status: dict[str, Any]) -> list[Row]:
    """A row per decision about staleness or a rollback, of the latest, oldest first."""
    return [
        {
            "version": f"{decision['policy_version']:,}",
            "decision": decision["change"],
            "bound": str(decision["max_staleness"]),
            "places": str(decision["places"]),
            "reason": decision["reason"],
        }
        for decision in status["decisions"]["latest"]
    ]


def as_markdown(table: list[Row]) -> str:
    """The rows (at least one) as a Markdown table; a column that a row does not have stays empty in it."""
    names = list(dict.fromkeys(name for row in table for name in row))
    lines = [names, ["---"] * len(names), *([row.get(name, "") for name in names] for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_COUNTED = {
    "stage.restarted": "restarts",
    "trainer.rolled-back": "rollbacks of the trainer",
    "stage.killed": "stages killed while they drained",
}
"""Every other kind of incident is an alarm."""
_LATEST = 3


def incident_line(incident: dict[str, Any]) -> str:
    """One of a status's incidents in a line."""
    return f"{time.strftime('%H:%M:%S', time.localtime(incident['t']))} {incident['sentence']}"


def _incidents(status: dict[str, Any]) -> list[tuple[str, str]]:
    """How many there were, and the latest; nothing if there were none."""
    incidents = status["incidents"]
    if not incidents["counts"]:
        return []
    counts = {name: incidents["counts"][kind] for kind, name in _COUNTED.items() if kind in incidents["counts"]}
    if alarms := sum(count for kind, count in incidents["counts"].items() if kind not in _COUNTED):
        counts["alarms"] = alarms
    said = ", ".join(f"{name} {count}" for name, count in counts.items())
    return [("incidents", said), *(("", incident_line(one)) for one in incidents["latest"][-_LATEST:])]


def _decided(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The bound by the newest decision, and its reason; nothing if nothing was decided."""
    decisions = status["decisions"]
    if not decisions["latest"]:
        return []
    newest, count = decisions["latest"][-1], decisions["count"]
    said = f"{count} {'decision' if count == 1 else 'decisions'}, the newest at version {newest['policy_version']:,}"
    return [("control", said), ("", f"{newest['change']}: {newest['reason']}")]


def failed_scores(status: dict[str, Any]) -> str | None:
    """How many responses got no score; None if all got one."""
    scores = status["scores"]
    return f"{scores['errors']:,} of {scores['rollouts']:,} responses got no score" if scores["errors"] else None


def _exceptional(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Figures that are shown only where there is something to say."""
    ledger = status["ledger"]
    masked, repeated = ledger["masked"], ledger["generated_twice"]["tokens"]
    rows = []
    if (errors := failed_scores(status)) is not None:
        rows.append(("errors", errors))
    if repeated:
        rows.append(("", f"{repeated} tokens were generated twice"))
    if masked["tokens"]:
        share = masked["tokens"] / ledger["trained"]["tokens"]
        rows.append(
            ("masked", f"{masked['tokens']:,} tokens in {masked['rollouts']:,} rollouts, {share:.1%} of those trained")
        )
    if (share := status["zero_advantage_share"]) is not None:
        rows.append(("without spread", f"{share:.0%} of the last groups have rewards that are all equal"))
    if (shares := status["curriculum"]) is not None:
        rows.append(("curriculum", f"{shares['easy']:.0%} of the prompts are easy, {shares['hard']:.0%} are hard"))
    return rows


def trained_to_taken(status: dict[str, Any]) -> str:
    """The length and reward of what was trained, as ratios to those of all that was taken; of the last steps."""
    ratios = status["trained_to_taken"]
    return f"length {number(ratios['length'], 3)}, reward {number(ratios['reward'], 3)}"


def _measured(result: dict[str, Any]) -> list[tuple[str, str]]:
    """An evaluation's figures, with the version it measured."""
    measured = f"version {result['policy_version']}"
    found = [(f"accuracy, {measured}", _accuracy_of(result, "held-out prompts"))]
    if "pass_at" in result:
        measures = {f"pass@{k}": estimate for k, estimate in result["pass_at"].items()}
        measures[f"majority of {result['samples']}"] = result["majority"]
        parts = [f"{what} {m['value']:.3f}{interval([m['low'], m['high']])}" for what, m in measures.items()]
        found.append((f"sampled, {measured}", ", ".join(parts)))
    for set_name, result_of_set in result.get("sets", {}).items():
        found.append((f"{set_name}, {measured}", _accuracy_of(result_of_set, "prompts")))
    return found


def accuracy_text(accuracy: float | None, digits: int = 3) -> str:
    """Formats an accuracy; None, because no answer got a score, as `not scored`."""
    return "not scored" if accuracy is None else f"{accuracy:.{digits}f}"


def _accuracy_of(measures: dict[str, Any], prompts: str) -> str:
    said = _accuracy(measures["accuracy"], measures.get("accuracy_interval"), f"{measures['prompts']} {prompts}")
    errors = measures.get("errors", 0)
    return f"{said}, {errors} without a score" if 0 < errors < measures["prompts"] else said


def _accuracy(accuracy: float | None, ends: Sequence[float | None] | None, prompts: str) -> str:
    if accuracy is None:
        return f"not scored: the reward failed for all {prompts}"
    return f"{accuracy_text(accuracy)}{interval(ends)} of {prompts}"


def interval(ends: Sequence[float | None] | None) -> str:
    """The 95 % interval to print behind a value; empty if none is known."""
    low, high = ends or (None, None)
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def queue_length(ledger: dict[str, Any]) -> int:
    """Trajectories generated and neither trained nor dropped yet."""
    queued: int = ledger["buffered"]["rollouts"] + ledger["in_flight"]["rollouts"]
    return queued


def number(value: float | None, digits: int = 2) -> str:
    """A value with so many decimals; a dash if there is none."""
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.{digits}f}"
