"""The inputs of a run besides its config: a name for each, and a short text that changes with its content.

prompts, evaluation sets        ─► number and hash of the rows ┐
rewards                         ─► version                     ├─► recorded with each attempt,
losses, advantages, environment ─► hash of their source        │   compared on resume and on other hosts
models, teachers, templates     ─► hash of their files         ┘
"""

import json
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from configs.errors import near_names
from configs.schema import RunConfig
from configs.sources import key_in
from millrace.errors import InputError
from millrace.preflight.teacher import START
from millrace.prompts.dataset import PromptSet, load_all_prompts
from millrace.prompts.stored import is_stored_run, stored_parts
from millrace.rewards.function import source_hash
from millrace.rewards.scorer import make_scorer
from millrace.runs.provenance import content_hash, short_hash
from millrace.runs.record import Attempt, changed_inputs
from millrace.types import Prompt

_ALL_STAGES = ("generate", "score", "teach", "train", "evaluate")


def run_inputs(
    config: RunConfig,
    stages: Collection[str] = _ALL_STAGES,
    *,
    prompts: Mapping[str, PromptSet] | None = None,
    rewards: Mapping[str, str] | None = None,
    has_model: bool = True,
) -> dict[str, str]:
    """The inputs that these stages read, as this host has them, by key and value of the config.

    `prompts`, by source, and `rewards`, the versions that `Scorer.check` returns, are loaded unless given. `has_model`:
    whether the model folder is here and counts as an input. Raises InputError for an input that can't be read.
    """
    inputs: dict[str, str] = {}
    functions: dict[str, str | None] = {}
    files: dict[str, str | None] = {}
    sources, evaluates = config.by_source(), "evaluate" in stages
    if evaluates or "generate" in stages:
        prompts = prompts or load_all_prompts(sources)
        for name, source in sources.items():
            inputs |= _prompt_hashes(name, source, prompts[name], with_sets=evaluates)
    if evaluates or "score" in stages:
        rewards = rewards or make_scorer(sources).check()
        inputs |= {f"reward {name}": version for name, version in rewards.items()}
        files |= {key_in(name, "scoring.model"): source.scoring.model for name, source in sources.items()}
    if evaluates or "generate" in stages or "train" in stages:
        files |= {"model.path": config.model.path if has_model else None}
        files["model.chat_template"] = config.model.chat_template
        for name, source in sources.items():
            functions[key_in(name, "environment.name")] = source.environment.name
            files[key_in(name, "prompts.tools")] = source.prompts.tools
    if "train" in stages:
        for name, source in sources.items():
            functions[key_in(name, "training.loss")] = source.training.loss.name
            functions[key_in(name, "training.advantage")] = source.training.advantage
    if "teach" in stages:
        teachers = {name: teacher.path for name, teacher in config.teachers.items() if teacher.path != START}
        files |= {f"teachers.{name}.path": path for name, path in teachers.items()}
    for key, path in functions.items():
        # Built-in functions have names without a colon.
        if path is not None and ":" in path:
            inputs[f"{key} {path}"] = f"source {source_hash(path)}"
    for key, path in files.items():
        if path is not None:
            try:
                inputs[f"{key} {path}"] = content_hash(Path(path).expanduser())
            except OSError as error:
                read = f"{path}, which can't be read: {error.strerror}"
                raise InputError(read, key=key, expected=near_names(path) or "a file or a folder") from error
    return inputs


def _prompt_hashes(name: str, config: RunConfig, prompts: PromptSet, *, with_sets: bool) -> dict[str, str]:
    """Hashes of the prompts of the source `name`, whose config this is."""
    source = f"{key_in(name, 'prompts.source')} {config.prompts.source}"
    eval_source = f"{key_in(name, 'prompts.eval_source')} {config.prompts.eval_source}"
    if config.prompts.eval_source is None:
        hashes = {source: _hash_prompts([*prompts.train, *prompts.eval])}
    else:
        hashes = {source: _hash_prompts(prompts.train), eval_source: _hash_prompts(prompts.eval)}
    if config.prompts.demonstrations and is_stored_run(config.prompts.source):
        hashes[f"{key_in(name, 'prompts.source')} rollouts"] = stored_parts(config.prompts.source)
    for set_name, settings in config.evaluation.sets.items() if with_sets else ():
        # With the number: a change of it is a changed setting, not a changed input.
        key = f"{key_in(name, f'evaluation.sets.{set_name}')} {settings.source}, first {settings.num_prompts}"
        hashes[key] = _hash_prompts(prompts.sets[set_name])
    return hashes


def check_same_inputs(attempt: Attempt, config: RunConfig, stages: Collection[str]) -> None:
    """Raises InputError unless this host has the inputs of these stages as the controller had them."""
    inputs = run_inputs(config, stages, has_model=has_model_input(attempt.inputs, config))
    if differing := changed_inputs(attempt, inputs):
        raise InputError(
            f"host {socket.gethostname()} has other inputs than the controller: {'; '.join(differing)}",
            expected="the same on every host",
        )


def has_model_input(inputs: Mapping[str, str], config: RunConfig) -> bool:
    """Whether the model folder is one of these inputs; it is not if the controller does not have the folder."""
    return f"model.path {config.model.path}" in inputs


def _hash_prompts(prompts: Sequence[Prompt]) -> str:
    """In order, because groups count them; without their lines in the file, which may be formatted anew."""
    rows = (
        [
            *(prompt.text, prompt.answer, prompt.messages, prompt.tools),
            *([] if prompt.demonstration is None else [asdict(prompt.demonstration)]),
        ]
        for prompt in prompts
    )
    return f"{len(prompts):,} prompts {short_hash(json.dumps(row).encode() for row in rows)}"
