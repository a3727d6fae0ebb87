"""The phase, figures and tables of a run, made from its status: for the terminal, the Prefect UI and the report."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from flows.display.tables import Row, duration
from millrace.runs.status import largest_and_bound
from millrace.runtime.arguments import EVALUATE_AT_END
from millrace.runtime.messages import STOPPED

Figure = tuple[str, str]
"""Name and value; a figure without a name continues the one before it."""

TRAINING = "training"
"""The phase in which all four stages run."""
STARTING_TRAINER = "starting the trainer"
_BESIDE_TRAINING = {
    "bootstrap-0": "making the start model",
    f"evaluate-{EVALUATE_AT_END}": "evaluating the trained model",
    "promote-0": "deciding on promotion",
}
_LATEST_INCIDENTS = 3


class Phase(NamedTuple):
    """A phase of a campaign, or the state in which its attempt has ended."""

    name: str
    detail: str = ""
    """Progress as the process at work reports it, or the cause of the end; may be empty."""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


def phase(status: dict[str, Any]) -> Phase:
    """The campaign's current phase."""
    if status["state"] != "running":
        return Phase(status["state"], status["cause"] or "")
    # Records of processes that this attempt has not started yet are an earlier attempt's.
    doing = {name: activity for name, activity in status["doing"].items() if name in status["ready"]}
    at_work = {name: activity for name, activity in doing.items() if activity != STOPPED}
    for process, name in _BESIDE_TRAINING.items():
        if process in at_work:
            return Phase(name, at_work[process])
    if "train-0" not in doing:
        return Phase("preparing the run")
    if "train-0" not in at_work:
        return Phase("ending the attempt")
    return Phase(TRAINING) if status["ready"]["train-0"] else Phase(STARTING_TRAINER, at_work["train-0"])


def time_line(status: dict[str, Any]) -> str:
    """How long this attempt has taken, and will still take as far as is known."""
    parts = [duration(status["wall_seconds"])]
    if (step_seconds := status["step_seconds"]) is not None:
        parts.append(f"{step_seconds:.3g} s per step" if step_seconds < 100 else f"{step_seconds:.0f} s per step")
    if phase(status).name == TRAINING and status["eta_seconds"] is not None:
        parts.append(f"about {duration(status['eta_seconds'])} left")
    return ", ".join(parts)


def progress_line(status: dict[str, Any]) -> str:
    """The run in a few words, such as `v142/150, reward 0.63, accuracy 0.570`; before and after training, its phase."""
    now = phase(status)
    if now.name != TRAINING:
        return str(now)
    parts = [f"v{status['steps']}/{status['max_steps']}"]
    if status["reward_mean"] is not None:
        parts.append(f"reward {number(status['reward_mean'])}")
    if status["evaluations"]:
        held_out, *_ = status["evaluations"][-1]["accuracy"].values()
        parts.append(f"accuracy {accuracy_text(held_out)}")
    return ", ".join(parts)


def figures(status: dict[str, Any]) -> list[Figure]:
    """The key figures of a run."""
    ledger, staleness, sync = status["ledger"], status["staleness"], status["weight_sync"]
    amounts = {name: ledger[name]["rollouts"] for name in ("generated", "trained", "buffered", "in_flight")}
    histogram, trained = staleness["histogram"], status["trained_to_taken"]
    largest = largest_and_bound(
        number(staleness["max"]), staleness["bound"], admission_only=staleness["admission_only"]
    )
    total = sum(histogram.values())
    shares = "  ".join(f"{value}: {count} ({count / total:.0%})" for value, count in histogram.items())
    dropped = ", ".join(f"{reason} {amount['rollouts']}" for reason, amount in ledger["dropped"].items())
    return [
        (
            "version",
            f"{status['steps']} of {status['max_steps']}; generators used {status['policy_versions_used']}, from 0 on",
        ),
        ("reward", number(status["reward_mean"])),
        *_accuracies(status),
        ("staleness", f"mean {number(staleness['mean'])}, max {largest}"),
        ("rollouts by staleness", shares or "–"),
        *_decisions(status["decisions"]),
        ("trained to taken", f"length {number(trained['length'], 3)}, reward {number(trained['reward'], 3)}"),
        ("queue", f"{amounts['buffered'] + amounts['in_flight']} rollouts on their way to the trainer"),
        ("ledger", f"{amounts['generated']} generated = {amounts['trained']} trained"),
        ("", f"+ {amounts['buffered']} buffered + {amounts['in_flight']} in flight"),
        ("", f"+ dropped: {dropped or 'none'}"),
        *_exceptional(status),
        ("tokens per second", _speeds(status)),
        ("weight sync", f"{sync['count']} by {sync['transport']}, median {number(sync['p50_seconds'], 4)} s"),
        *_incidents(status["incidents"]),
    ]


def figure_rows(status: dict[str, Any]) -> list[Row]:
    """The key figures as rows of a table."""
    return [{"figure": name, "value": value} for name, value in figures(status)]


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
    measures = {"accuracy": held_out, "accuracy_interval": evaluation["interval"], "prompts": evaluation["prompts"]}
    version = evaluation["policy_version"]
    base = "" if version else ", the base model"
    further = "".join(f"; {name} {accuracy_text(accuracy)}" for name, accuracy in sets)
    return f"{version}{base}: held-out accuracy {_accuracy(measures, 'prompts')}{further}"


def evaluation_rows(status: dict[str, Any]) -> list[Row]:
    """A row per evaluated version, in order: its accuracy on each set, and whether it is the best."""
    best = None if status["best"] is None else status["best"]["policy_version"]
    rows = []
    for evaluation in status["evaluations"]:
        version = evaluation["policy_version"]
        cells = {name: accuracy_text(accuracy, 4) for name, accuracy in evaluation["accuracy"].items()}
        cells[next(iter(cells))] += interval(evaluation["interval"])
        rows.append({"version": f"{version:,}", **cells, "note": "best" if version == best else ""})
    return rows


def source_rows(status: dict[str, Any]) -> list[Row]:
    """A row per source of a run with several: its weight now, its groups, and its newest reward and accuracy."""
    sources = status["sources"]
    total = sum(source["weight"] or 0.0 for source in sources.values())
    rows = []
    for name, source in sources.items():
        weight, trained = source["weight"], f"{source['groups_trained']:,}"
        rows.append(
            {
                "source": name,
                "weight now": "–" if weight is None else f"{weight:.3g} ({weight / total:.1%})",
                "groups trained": trained + ("" if (share := source["trained_share"]) is None else f" ({share:.1%})"),
                "dropped": f"{source['groups_dropped']:,}",
                "reward": number(source["reward_mean"]),
                "accuracy": number(source["accuracy"], 3),
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
            "reason": decision["reason"],
        }
        for decision in status["decisions"]["latest"]
    ]


def incident_line(incident: dict[str, Any]) -> str:
    """One of a status's incidents in a line."""
    return f"{time.strftime('%H:%M:%S', time.localtime(incident['t']))} {incident['sentence']}"


def accuracy_text(accuracy: float | None, digits: int = 3) -> str:
    """Formats an accuracy; None, because no answer got a score, as `not scored`."""
    return "not scored" if accuracy is None else f"{accuracy:.{digits}f}"


def interval(ends: Sequence[float | None] | None) -> str:
    """The 95 % interval to print behind a value; empty if none is known."""
    low, high = ends or (None, None)
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def number(value: float | None, digits: int = 2) -> str:
    """A value with this many decimals; a dash if there is none."""
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.{digits}f}"


def _decisions(decisions: dict[str, Any]) -> list[Figure]:
    if not decisions["latest"]:
        return []
    newest, count = decisions["latest"][-1], decisions["count"]
    summary = f"{count} decision{'s' if count > 1 else ''}, the newest at version {newest['policy_version']:,}"
    return [("control", summary), ("", f"{newest['change']}: {newest['reason']}")]


def _exceptional(status: dict[str, Any]) -> list[Figure]:
    """Figures that most runs do not have."""
    scores, masked = status["scores"], status["ledger"]["masked"]
    rows = []
    if scores["errors"]:
        rows.append(("errors", f"{scores['errors']:,} of {scores['rollouts']:,} responses got no score"))
    if services := status["services"]:
        tokens = f"{services['input_tokens']:,} tokens read, {services['output_tokens']:,} written"
        rows.append(("services", f"{services['requests']:,} requests, {tokens}, cost {services['cost']:.4g}"))
    if repeated := status["ledger"]["generated_twice"]["tokens"]:
        rows.append(("repeated", f"{repeated:,} tokens were generated twice"))
    if masked["tokens"]:
        share = masked["tokens"] / status["ledger"]["trained"]["tokens"]
        amount = f"{masked['tokens']:,} tokens in {masked['rollouts']:,} rollouts"
        rows.append(("masked", f"{amount}, {share:.1%} of those trained"))
    if (share := status["zero_advantage_share"]) is not None:
        rows.append(("without spread", f"{share:.0%} of the last groups have rewards that are all equal"))
    if (shares := status["curriculum"]) is not None:
        rows.append(("curriculum", f"{shares['easy']:.0%} of the prompts are easy, {shares['hard']:.0%} are hard"))
    return rows


def _speeds(status: dict[str, Any]) -> str:
    """Tokens per second of one process of each stage, and the share of its time that it works, over the whole run."""
    speeds = []
    for stage in ("generate", "score", "train"):
        busy_seconds, idle_seconds = status["seconds"][stage], status["seconds"][f"idle_{stage}"]
        if total := busy_seconds + idle_seconds:
            speeds.append(f"{stage} {status['tokens'][stage] / total:,.0f} (busy {busy_seconds / total:.0%})")
    return ", ".join(speeds) or "–"


def _incidents(incidents: dict[str, Any]) -> list[Figure]:
    if not incidents["counts"]:
        return []
    summary = ", ".join(f"{kind} {count}" for kind, count in incidents["counts"].items())
    latest = incidents["latest"][-_LATEST_INCIDENTS:]
    return [("incidents", summary), *(("", incident_line(incident)) for incident in latest)]


def _accuracies(status: dict[str, Any]) -> list[Figure]:
    rows = [row for result in status["eval"].values() for row in _evaluated(result)]
    if status["best"] is not None:
        rows.append(("best version", evaluation_line(status["best"])))
    if status["early_stop"] is not None:
        rows.append(("early stop", status["early_stop"]))
    return rows


def _evaluated(result: dict[str, Any]) -> list[Figure]:
    version = f"version {result['policy_version']}"
    rows = [(f"accuracy, {version}", _accuracy(result, "held-out prompts"))]
    if "pass_at" in result:
        estimates = {f"pass@{k}": estimate for k, estimate in result["pass_at"].items()}
        estimates[f"majority of {result['samples']}"] = result["majority"]
        parts = [f"{name} {e['value']:.3f}{interval([e['low'], e['high']])}" for name, e in estimates.items()]
        rows.append((f"sampled, {version}", ", ".join(parts)))
    sets = result.get("sets", {})
    return [*rows, *((f"{name}, {version}", _accuracy(measures, "prompts")) for name, measures in sets.items())]


def _accuracy(measures: dict[str, Any], prompts: str) -> str:
    counted, errors = f"{measures['prompts']} {prompts}", measures.get("errors", 0)
    if measures["accuracy"] is None:
        return f"not scored: the reward failed for all {counted}, or for all of one source"
    value = f"{accuracy_text(measures['accuracy'])}{interval(measures.get('accuracy_interval'))} of {counted}"
    return f"{value}, {errors} without a score" if errors else value
