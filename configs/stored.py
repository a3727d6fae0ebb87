"""Configs as JSON, as runs store them: their hash, their differences, the staleness bound.

No pydantic here: readers of stored runs need no schema.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

DEFAULT_SOURCE = "default"
"""The name of the only source of a run that names none."""
_UNSET = object()


AnnotationKind = Literal["scores", "teachers"]
"""What annotators write about trajectories: rewards, or a teacher's log-probabilities. Pools' names begin with it."""


@dataclass(frozen=True)
class AnnotatorPools:
    """Which annotators annotate which sources: scorers, of a source alone or shared, and teachers.

    The name of a pool is the folder of its streams: `scores/<reward>` of the run's own `scoring.reward`,
    `scores/<reward>@<source>`, or `teachers/<name>`.
    """

    replicas: Mapping[str, int]
    """Pool → number of its annotators; the scorers that sources share are the first."""
    own: Mapping[tuple[AnnotationKind, str], str | None] = field(default_factory=dict)
    """Kind and source → its pool, if that is another than most sources have; None: it has no teacher."""
    teacher: str | None = None
    """The pool of the teacher that most sources have."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The pools of a run with this config. Raises KeyError, TypeError or AttributeError if that is damaged."""
        shared = f"scores/{config['scoring']['reward']}"
        replicas = {shared: config["scoring"]["replicas"]}
        own: dict[tuple[AnnotationKind, str], str | None] = {}
        for name, source in config.get("sources", {}).items():
            if (count := source.get("scoring", {}).get("replicas")) is not None:
                own["scores", name] = f"{shared}@{name}"
                replicas[f"{shared}@{name}"] = count
            distillation = source.get("training", {}).get("distillation", {})
            if "teacher" in distillation:
                own["teachers", name] = _teachers(distillation["teacher"])
        # In an order that does not depend on that of the config.
        replicas |= {f"teachers/{name}": each["replicas"] for name, each in sorted(config.get("teachers", {}).items())}
        return cls(replicas, own, _teachers(config.get("training", {}).get("distillation", {}).get("teacher")))

    def of_kind(self, kind: AnnotationKind) -> dict[str, int]:
        """Pool → number of its annotators, of one kind."""
        return {pool: count for pool, count in self.replicas.items() if kind_of(pool) == kind}

    def total(self, kind: AnnotationKind) -> int:
        """Number of annotators of all pools of a kind."""
        return sum(self.of_kind(kind).values())

    def of_source(self, kind: AnnotationKind, source: str) -> str | None:
        """The pool that annotates this source; None if it has no teacher."""
        return self.own.get((kind, source), self.teacher if kind == "teachers" else next(iter(self.replicas)))

    def annotator(self, kind: AnnotationKind, replica: int) -> tuple[str, int]:
        """The pool of a replica of the kind's stage, and its number in that; the first pool has the first replicas."""
        for pool, count in self.of_kind(kind).items():
            if replica < count:
                return pool, replica
            replica -= count
        raise ValueError(f"there are only {self.total(kind)} annotators")


def kind_of(pool: str) -> AnnotationKind:
    """The kind of annotations in a pool, by its name."""
    return "scores" if pool.startswith("scores/") else "teachers"


def _teachers(name: str | None) -> str | None:
    return None if name is None else f"teachers/{name}"


def stored_top_k_of(config: Mapping[str, Any], source: str) -> int:
    """Number of a teacher's likeliest tokens that a run with this config stored with each token of a source."""
    sections = config, config.get("sources", {}).get(source, {})
    values = [section.get("training", {}).get("distillation", {}).get("top_k", _UNSET) for section in sections]
    return next((value for value in reversed(values) if value is not _UNSET), None) or 0


def changed_keys(old_config: Mapping[str, Any], new_config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One sentence per key that differs between two stored configs.

    A key that only one of them has is left out, except of sources, which are stored with those keys that they set.
    """
    changes: list[str] = []
    both = set.union if prefix.startswith("sources.") else set.intersection
    for name in sorted(both(set(old_config), set(new_config))):
        old, new = old_config.get(name, _UNSET), new_config.get(name, _UNSET)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += changed_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            was, now = ("not set" if value is _UNSET else json.dumps(value) for value in (old, new))
            changes.append(f"{prefix}{name} was {was} and is {now}")
    return changes


def put_key(config: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key. Where something else than a section is in its way, that stays for the validation to report."""
    *path, name = key.split(".")
    for part in path:
        below = config.setdefault(part, {})
        if isinstance(below, str):
            # A choice, such as a loss, by its name alone; now it gets a parameter.
            below = config[part] = {"name": below}
        if not isinstance(below, dict):
            return
        config = below
    config[name] = value


def staleness_bound(mode: str, max_staleness: int) -> int:
    """The staleness bound in force in a pipeline mode, policy versions: 0 in sync mode, whatever is configured.

    So `--set pipeline.mode=sync` alone turns any asynchronous config into its synchronous baseline.
    """
    return 0 if mode == "sync" else max_staleness


def bounds_admission_only(config: Mapping[str, Any]) -> bool:
    """Whether the staleness bound limits admission only, so that a trained token may be older than the bound."""
    is_sync = config.get("pipeline", {}).get("mode") == "sync"
    return not is_sync and bool(config.get("staleness", {}).get("too_old") == "keep")


def is_supervised(config: Mapping[str, Any]) -> bool:
    """Whether a run with this config learns demonstrations, which no policy sampled."""
    return bool(config.get("prompts", {}).get("demonstrations"))


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config's canonical JSON (sorted keys, no blanks), 64 hex digits."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
