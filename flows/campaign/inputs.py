"""What a run reads besides its config: the name of each input, and what it holds now in a few words.

prompts, evaluation sets        ─► number and hash of the rows ┐
rewards                         ─► version                     ├─► recorded with each attempt,
losses, advantages, environment ─► hash of their source        │   compared on resume and on other hosts
models, templates, tools        ─► hash of their files         ┘
"""

import hashlib
import json
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.evaluation.examiner import EvaluationSet, evaluation_sets
from millrace.evaluation.results import HELD_OUT
from millrace.prompts.dataset import PromptSet, load_prompts
from millrace.rewards.import_path import source_hash
from millrace.rewards.scorer import make_scorer
from millrace.runs.record import Attempt, changed_inputs
from millrace.types import Prompt

_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_WHOLE_BYTES = 64 << 20
_BLOCK_BYTES = 4096
_BLOCKS = 4096


def run_inputs(
    config: RunConfig, prompts: PromptSet, sets: Mapping[str, EvaluationSet], rewards: Mapping[str, str]
) -> dict[str, str]:
    """All inputs of a run by key and value of the config. `rewards` are the versions that `Scorer.check` returns."""
    return {
        **_prompt_inputs(config, prompts),
        **_set_inputs(config, sets),
        **_reward_inputs(config, rewards),
        **_policy_inputs(config),
        **_objective_inputs(config),
    }


def stage_inputs(config: RunConfig, stages: Collection[str]) -> dict[str, str]:
    """Those that these stages read, as this host has them. Raises InputError for one that can't be read."""
    inputs: dict[str, str] = {}
    if not {"generate", "evaluate"}.isdisjoint(stages):
        prompts = load_prompts(config.prompts)
        inputs |= _prompt_inputs(config, prompts)
        if "evaluate" in stages:
            inputs |= _set_inputs(config, evaluation_sets(config.evaluation, config.prompts, prompts))
    if not {"score", "evaluate"}.isdisjoint(stages):
        further = [one.source for one in config.evaluation.sets.values()]
        inputs |= _reward_inputs(config, make_scorer(config.scoring, config.prompts, further).check())
    if not {"generate", "evaluate", "train"}.isdisjoint(stages):
        inputs |= _policy_inputs(config)
    if "train" in stages:
        inputs |= _objective_inputs(config)
    return inputs


def check_same_inputs(attempt: Attempt, config: RunConfig, stages: Collection[str]) -> None:
    """Raises InputError unless this host has the inputs of these stages as the controller had them."""
    if differing := changed_inputs(attempt, stage_inputs(config, stages)):
        raise InputError(
            f"host {socket.gethostname()} has other inputs than the controller: {'; '.join(differing)}; "
            "expected the same on every host"
        )


def _prompt_inputs(config: RunConfig, prompts: PromptSet) -> dict[str, str]:
    source, eval_source = (f"prompts.{key} {getattr(config.prompts, key)}" for key in ("source", "eval_source"))
    if config.prompts.eval_source is None:
        return {source: _rows([*prompts.train, *prompts.eval])}
    return {source: _rows(prompts.train), eval_source: _rows(prompts.eval)}


def _set_inputs(config: RunConfig, sets: Mapping[str, EvaluationSet]) -> dict[str, str]:
    further = {name: config.evaluation.sets[name] for name in sets if name != HELD_OUT}
    # More or fewer prompts are another setting, and no other input.
    return {
        f"evaluation.sets.{name} {one.source}, first {one.num_prompts}": _rows(sets[name].prompts)
        for name, one in further.items()
    }


def _reward_inputs(config: RunConfig, versions: Mapping[str, str]) -> dict[str, str]:
    return {f"reward {name}": version for name, version in versions.items()} | _file_inputs(
        {"scoring.model": config.scoring.model}
    )


def _policy_inputs(config: RunConfig) -> dict[str, str]:
    model = config.model
    return _source_inputs({"environment.name": config.environment.name}) | _file_inputs(
        {"model.path": model.path, "model.chat_template": model.chat_template, "prompts.tools": config.prompts.tools}
    )


def _objective_inputs(config: RunConfig) -> dict[str, str]:
    return _source_inputs({"training.loss": config.training.loss.name, "training.advantage": config.training.advantage})


def _source_inputs(functions: Mapping[str, str | None]) -> dict[str, str]:
    """Those that are import paths."""
    own = {key: path for key, path in functions.items() if path is not None and ":" in path}
    return {f"{key} {path}": f"source {source_hash(path)}" for key, path in own.items()}


def _file_inputs(paths: Mapping[str, str | None]) -> dict[str, str]:
    given = {key: path for key, path in paths.items() if path is not None}
    return {f"{key} {path}": _files(Path(path).expanduser()) for key, path in given.items()}


def _rows(prompts: Sequence[Prompt]) -> str:
    """In order, because groups count them; without their places, because a file may be formatted anew."""
    rows = ([prompt.text, prompt.answer, prompt.messages, prompt.tools] for prompt in prompts)
    return f"{len(prompts):,} prompts {_hash(json.dumps(row).encode() for row in rows)}"


def _files(path: Path) -> str:
    """A file, or those of a model folder that affect the policy or its tokens."""
    files = [path]
    if path.is_dir():
        files = sorted(file for pattern in _MODEL_FILES for file in path.glob(pattern))
    return f"files {_hash(part for file in files for part in (file.name.encode(), *_sampled(file)))}"


def _sampled(file: Path) -> Iterable[bytes]:
    """Its size and all of it, or of large weights blocks from all over it: training changes every tensor a little."""
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as content:
        if size <= _WHOLE_BYTES:
            yield content.read()
            return
        for block in range(_BLOCKS):
            content.seek(block * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
            yield content.read(_BLOCK_BYTES)


def _hash(parts: Iterable[bytes]) -> str:
    """SHA-256 of the parts, 12 hex digits."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:12]
