"""The key figures of a run, made from its status: for the terminal, the Prefect UI and the report."""

import time
from collections.abc import Sequence
from typing import Any

TRAINING = "training"
"""The phase in which all four stages run."""


class Rates:
    """Response tokens per second of each stage between two calls of `look`."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, int]] | None = None

    def look(self, status: dict[str, Any]) -> dict[str, float]:
        """By stage; empty at the first call."""
        now, tokens = time.monotonic(), status["tokens"]
        before, self._before = self._before, (now, tokens)
        if before is None:
            return {}
        return {stage: max(0, count - before[1][stage]) / (now - before[0]) for stage, count in tokens.items()}


def phase(status: dict[str, Any]) -> str:
    """What the campaign is doing, in a few words."""
    if status["state"] != "running":
        return str(status["state"])
    doing = status["doing"]
    if "train-0" not in doing:
        bootstrap = doing.get("bootstrap-0", "stopped")
        return "starting the stages" if bootstrap == "stopped" else f"making the start model: {bootstrap}"
    if status["steps"] >= status["stop_at_step"] or status["early_stop"] is not None:
        return "evaluating the trained model"
    return TRAINING


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
        ("trained to taken", trained_to_taken(status)),
        ("queue", f"{queue_length(ledger)} rollouts on their way to the trainer"),
        ("ledger", f"{ledger['generated']['rollouts']} generated = {ledger['trained']['rollouts']} trained"),
        ("", f"+ {ledger['buffered']['rollouts']} buffered + {ledger['in_flight']['rollouts']} in flight"),
        ("", f"+ dropped: {dropped}"),
        *_repeated(ledger),
        *_masked(ledger),
        *_without_spread(status),
        *_curriculum(status),
        ("weight sync", f"{sync['count']} by {sync['transport']}, median {number(sync['p50_seconds'], 4)} s"),
    ]
    for name, result in status["eval"].items():
        found += _measured(name, result)
    if (best := status["best"]) is not None:
        found.append(("best version", evaluation_line(best)))
    if status["early_stop"] is not None:
        found.append(("early stop", status["early_stop"]))
    return found


def evaluation_line(evaluation: dict[str, Any]) -> str:
    """One of a status's `evaluations` in a line."""
    (_, held_out), *sets = evaluation["accuracy"].items()
    measured = f"{held_out:.3f}{interval(evaluation['interval'])} of {evaluation['prompts']} prompts"
    further = "".join(f"; {name} {accuracy:.3f}" for name, accuracy in sets)
    return f"{evaluation['policy_version']}: held-out accuracy {measured}{further}"


def _repeated(ledger: dict[str, Any]) -> list[tuple[str, str]]:
    tokens = ledger.get("generated_twice", {}).get("tokens", 0)
    return [("", f"{tokens} tokens were generated twice")] if tokens else []


def trained_to_taken(status: dict[str, Any]) -> str:
    """The length and reward of what was trained, as ratios to those of all that was taken; of the last steps."""
    ratios = status["trained_to_taken"]
    return f"length {number(ratios['length'], 3)}, reward {number(ratios['reward'], 3)}"


def _masked(ledger: dict[str, Any]) -> list[tuple[str, str]]:
    """The tokens that were too old to train on, if there were any."""
    masked, trained = ledger["masked"], ledger["trained"]
    if not masked["tokens"]:
        return []
    share = masked["tokens"] / trained["tokens"]
    return [("masked", f"{masked['tokens']:,} tokens in {masked['rollouts']:,} rollouts, {share:.1%} of those trained")]


def _without_spread(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The share of groups whose rewards are all equal, once the trainer has taken some."""
    share = status.get("zero_advantage_share")
    return (
        [] if share is None else [("without spread", f"{share:.0%} of the last groups have rewards that are all equal")]
    )


def _curriculum(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The shares of prompts that are asked less often, with a curriculum."""
    shares = status.get("curriculum")
    if shares is None:
        return []
    return [("curriculum", f"{shares['easy']:.0%} of the prompts are easy, {shares['hard']:.0%} are hard")]


def _measured(name: str, result: dict[str, Any]) -> list[tuple[str, str]]:
    """An evaluation's figures; those of older runs have no intervals."""
    ends = interval(result.get("accuracy_interval"))
    found = [(f"accuracy at {name}", f"{result['accuracy']:.3f}{ends} of {result['prompts']} held-out prompts")]
    if "pass_at" in result:
        measures = {f"pass@{k}": estimate for k, estimate in result["pass_at"].items()}
        measures[f"majority of {result['samples']}"] = result["majority"]
        said = [f"{what} {one['value']:.3f}{interval([one['low'], one['high']])}" for what, one in measures.items()]
        found.append((f"sampled at {name}", ", ".join(said)))
    for set_name, one in result.get("sets", {}).items():
        ends = interval(one.get("accuracy_interval"))
        found.append((f"{set_name} at {name}", f"{one['accuracy']:.3f}{ends} of {one['prompts']} prompts"))
    return found


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
