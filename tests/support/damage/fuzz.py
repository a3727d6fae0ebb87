"""Configs and prompt files that somebody got wrong, drawn from a seed."""

import copy
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from configs.schema import dotted_fields

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", " ", "null", "1e3", "many", "../../etc/passwd", "a\nb", "a\x00b", "💥" * 50, "x" * 5_000, "{{ 1 }}", "~/x",
    "s3:", "no_such_package.module:Thing", [], [1], [[]], ["a", None], {}, {"a": 1}, {"": {}}, {"a": {"b": {"c": []}}},
)  # fmt: skip
_KEYS = tuple(dotted_fields())
_SPOILED = (b"\x00", b"\xff\xfe", b"\t", b"{", b"]", b": ", b"&a *a", b"!!python/object:os.system", b"\n---\n", b"%")


def config_text(chooser: random.Random, preset: Mapping[str, Any]) -> bytes:
    """A preset with one to four mistakes, as YAML."""
    values = copy.deepcopy(dict(preset))
    for _ in range(chooser.randint(1, 4)):
        _spoil_key(chooser, values)
    text = _as_yaml(values)
    if chooser.random() < 0.25:
        at = chooser.randrange(len(text) + 1)
        text = text[:at] + chooser.choice(_SPOILED) + text[at + chooser.randint(0, 8) :]
    return text


def near_text(chooser: random.Random, presets: Sequence[Mapping[str, Any]]) -> bytes:
    """A preset with one to four values near its own, or another preset's: of its type, often against another key."""
    values = copy.deepcopy(dict(chooser.choice(presets)))
    for _ in range(chooser.randint(1, 4)):
        *sections, name = chooser.choice(_KEYS).split(".")
        holder, other = values, chooser.choice(presets)
        for section in sections:
            holder, other = holder.get(section) or {}, other.get(section) or {}
        if name in holder:
            holder[name] = _near(chooser, holder[name], other.get(name))
    return _as_yaml(values)


def _near(chooser: random.Random, value: Any, other: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float) and chooser.random() < 0.8:
        return chooser.choice((value * 2, value * 100, value + 1, max(value - 1, 0), type(value)(value / 2)))
    return other


def overrides(chooser: random.Random) -> list[str]:
    """Up to two arguments of `--set`."""
    return [
        chooser.choice((f"{chooser.choice(_KEYS)}={chooser.choice(ODD)}", "=", "a", "a.b=1", "scoring.weights.x=many"))
        for _ in range(chooser.randint(0, 2))
    ]


def prompt_file(chooser: random.Random, folder: Path) -> Path:
    """A JSONL file of prompts with mistakes; sometimes under a name that says something else."""
    rows: list[Any] = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(chooser.randint(1, 20))]
    for _ in range(chooser.randint(0, 3)):
        row = rows[chooser.randrange(len(rows))]
        spoil = chooser.random()
        if spoil < 0.15 or not isinstance(row, dict):
            rows[chooser.randrange(len(rows))] = chooser.choice(ODD)
        elif spoil < 0.3:
            row.pop(chooser.choice(["prompt", "answer"]), None)
        elif spoil < 0.5:
            row["prompt"] = [{"role": chooser.choice(["user", "robot", 7]), "content": chooser.choice(ODD)}]
        else:
            row[chooser.choice(["prompt", "answer", "id", "tools", "messages", "more"])] = chooser.choice(ODD)
    data = b"\n".join(json.dumps(row).encode() for row in rows)
    if chooser.random() < 0.3:
        at = chooser.randrange(len(data) + 1)
        data = data[:at] + chooser.choice((*_SPOILED, b"[" * 5_000, b"9" * 5_000)) + data[at + chooser.randint(0, 5) :]
    path = folder / f"prompts{chooser.choice(['.jsonl'] * 8 + ['.parquet', '.csv', '', '.json'])}"
    path.write_bytes(data)
    return path


def _spoil_key(chooser: random.Random, values: dict[str, Any]) -> None:
    section, _, name = chooser.choice(_KEYS).rpartition(".")
    holder: Any = values
    for part in section.split(".") if section else ():
        if not isinstance(holder.get(part), dict):
            holder[part] = {}
        holder = holder[part]
    how = chooser.random()
    if how < 0.1:
        holder.pop(name, None)
    elif how < 0.2:
        holder[name + chooser.choice("sx")] = chooser.choice(ODD)
    else:
        holder[name] = chooser.choice(ODD)


def _as_yaml(values: Mapping[str, Any]) -> bytes:
    return yaml.safe_dump(dict(values), allow_unicode=True).encode()
