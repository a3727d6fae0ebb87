"""The results of a run's evaluations: `evaluations/<policy version>.json`, one file per evaluated version.

    one source   accuracy, … of its held-out prompts            sets: {hard: {accuracy, …}, …}
    several      accuracy, … weighted mean over the sources,    sets: {math: {accuracy, …}, math/hard: …, words: …}
                 weights: {math: 2, words: 1}

A result is plain JSON. It always has `policy_version`, `accuracy`, `prompts` and `t`. An accuracy is None if the reward
failed for every answer. docs/data.md lists all keys. A file that can't be read counts as absent: the version is
evaluated again, and `millrace fsck` names the file.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from millrace.evaluation.measures import Estimate, weighted_mean
from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import parse_json
from storage.progress import FolderReader
from storage.stores.base import Store

Result = dict[str, Any]
HELD_OUT = "held_out"
"""Name of the measures that promotion, early stop and the best version go by."""


def set_name(source: str, name: str, *, is_only: bool) -> str:
    """The name among the results of a source's set `name`; `is_only`: whether the run has no other source."""
    if is_only:
        return name
    return source if name == HELD_OUT else f"{source}/{name}"


def as_result(measured: Mapping[str, Mapping[str, Result]], weights: Mapping[str, float]) -> Result:
    """The measures of all sets, by source and the set's name in it, as they are stored.

    `weights` of the sources that count towards the accuracy of several; at least one.
    """
    is_only = len(measured) == 1
    sets = {
        set_name(source, name, is_only=is_only): measures
        for source, by_name in measured.items()
        for name, measures in by_name.items()
    }
    summary = sets.pop(HELD_OUT) if is_only else _summarize(sets, weights)
    return {**summary, "sets": sets} if sets else summary


def write_result(store: Store, result: Result) -> None:
    """Stores the result of one version, durably. An earlier result of the same version is replaced."""
    path = layout.evaluation(result["policy_version"])
    # Only creation is durable. After a crash in between the version has no result, so it is evaluated again.
    store.delete(path)
    store.put_if_absent(path, json.dumps(result).encode())


def read_result(store: Store, policy_version: int) -> Result | None:
    """The result of one version; None if it was not evaluated or its file can't be read."""
    path = layout.evaluation(policy_version)
    with suppress(NotInStore, StreamCorrupt):
        return parse_result(bytes(store.get(path)), path)
    return None


class ResultsReader(FolderReader[Result]):
    """Reads every result of a run repeatedly, by ascending policy version."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, layout.EVALUATIONS, parse_result)


def parse_result(data: bytes, path: str) -> Result:
    """The result in the file at `path`. Raises StreamCorrupt."""
    try:
        result: Result = parse_json(data)
        result |= {"policy_version": int(result["policy_version"]), "t": float(result["t"])}
        for measures in measures_by_set(result).values():
            accuracy = measures["accuracy"]
            measures["accuracy"] = None if accuracy is None else float(accuracy)
            measures["prompts"] = int(measures["prompts"])
        if "weights" in result:
            _summarize(result["sets"], result["weights"])
        return result
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise StreamCorrupt(path, f"expected the result of an evaluation: {error!r}") from error


def measures_by_set(result: Result) -> dict[str, Result]:
    """The measures of each set by its name, those that decide first."""
    return {HELD_OUT: result, **result.get("sets", {})}


def comparable(results: Sequence[Result]) -> list[Result]:
    """Scored results with as many held-out prompts as the newest one; accuracies on others can't be compared.

    Of several sources: as many of each source that counts in the newest, with the accuracy under its weights. A resumed
    run may have other sources and weights.
    """
    scored = [result for result in results if result["accuracy"] is not None]
    return [same for result in scored if (same := _weighted_as(scored[-1], result)) is not None]


def best_result(results: Sequence[Result]) -> Result | None:
    """The result of the best version, the base model included; None without any. `results` are in order of versions.

    It has the highest accuracy of those comparable with the newest, and is the earliest of equals.
    """
    return max(comparable(results), key=lambda result: result["accuracy"], default=None)


def _weighted_as(newest: Result, result: Result) -> Result | None:
    """`result` with its accuracy under the weights of `newest`; None if it has none on the same prompts."""
    weights, sets = newest.get("weights", {}), result.get("sets", {})
    if any(name not in sets or sets[name]["prompts"] != newest["sets"][name]["prompts"] for name in weights):
        return None
    again = {**result, **_summarize(sets, weights)} if weights else result
    is_same = again["accuracy"] is not None and again["prompts"] == newest["prompts"]
    return again if is_same else None


def _summarize(sets: Mapping[str, Result], weights: Mapping[str, float]) -> Result:
    """The measures over the held-out prompts of these sources; no accuracy if one of them has none."""
    counted = [sets[source] for source in weights]
    totals = {name: sum(measures[name] for measures in counted) for name in ("prompts", "errors")}
    if any(measures["accuracy"] is None for measures in counted):
        return {"accuracy": None, "accuracy_interval": None, **totals, "weights": dict(weights)}
    estimates = []
    for weight, measures in zip(weights.values(), counted, strict=True):
        low, high = measures["accuracy_interval"]
        estimates.append((weight, Estimate(value=measures["accuracy"], low=low, high=high)))
    mean = weighted_mean(estimates)
    return {"accuracy": mean.value, "accuracy_interval": [mean.low, mean.high], **totals, "weights": dict(weights)}
