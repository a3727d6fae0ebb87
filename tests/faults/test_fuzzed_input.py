"""Configs and prompt files with random mistakes are refused in one sentence, or may run: no traceback, no half a run.

The checks are those that `millrace run` makes before it starts anything. The seed is in the test's name and output.
"""

import copy
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.campaigns.campaigns import PRESET

from configs.errors import ConfigError
from configs.load import load_config
from configs.schema import RunConfig, dotted_fields
from flows.campaign.prepare import check
from millrace.errors import InputError
from storage.errors import StorageError
from tasks.jobs import jobs

SEEDS = (26,)
PRESETS = sorted(PRESET.parent.glob("*.yaml"))
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


def may_be_checked_here(config: RunConfig) -> bool:
    """Not what asks a server, or another process, about a model, an engine or a work pool."""
    return (
        config.model.path is None
        and config.generation.engine == "transformers"
        and all(job.work_pool is None for job in jobs(config))
    )


def refusal(config_file: Path, sets: list[str], root: Path) -> str | None:
    """What `millrace run` would say; None if it would start. Other errors would be its traceback."""
    try:
        config = load_config(config_file, [*sets, f"storage.root={root}"])
        if may_be_checked_here(config):
            check(config, "fuzzed", resume="never")
    except (ConfigError, InputError, StorageError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("count", [40, pytest.param(2_000, marks=pytest.mark.faults)])
def test_a_config_with_random_mistakes_is_refused_in_sentences_or_could_run(
    count: int, seed: int, tmp_path: Path
) -> None:
    chooser = random.Random(seed)
    # With their defaults, so that each key has a value to start from.
    presets = [load_config(path, []).model_dump(mode="json") for path in PRESETS]
    refused = 0
    for number in range(count):
        text, sets = config_text(chooser, chooser.choice(presets)), overrides(chooser)
        if number % 8 == 0:
            text, sets = near_text(chooser, presets), []
        file = tmp_path / "config.yaml"
        file.write_bytes(text)
        # The last line that a test which fails has printed names what it failed at.
        print(f"seed {seed}, file {number}")
        message = refusal(file, sets, tmp_path / "runs")
        assert message is None or message.strip(), f"seed {seed}, config {number}: an empty sentence"
        refused += message is not None
        assert not any((tmp_path / "runs").glob("*")), f"seed {seed}, config {number}: something of a run is there"
    print(f"{count} configs of seed {seed}: {refused} refused in sentences, {count - refused} could run")
    assert refused > 0


@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.faults)])
def test_a_prompt_file_with_random_mistakes_is_refused_or_could_be_asked(count: int, seed: int, tmp_path: Path) -> None:
    chooser = random.Random(seed)
    refused = 0
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = prompt_file(chooser, folder)
        # The last line that a test which fails has printed names what it failed at.
        print(f"seed {seed}, file {number}")
        message = refusal(PRESET, [f"prompts.source={file}", "prompts.num_eval=2"], tmp_path / "runs")
        refused += message is not None
        assert message is None or ("Traceback" not in message and message.strip())
        assert not any((tmp_path / "runs").glob("*")), f"seed {seed}, prompts {number}: something of a run is there"
    print(f"{count} prompt files of seed {seed}: {refused} refused in a sentence, {count - refused} could be asked")
    assert 0 < refused < count
