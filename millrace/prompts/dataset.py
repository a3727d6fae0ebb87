"""The prompts of a run: loaded from their source, split into training and evaluation, and put in order.

arithmetic, chains ──┐                      ┌─► train ─► PromptOrder: group number n ─► prompt
a file ──────────────┤                      │            (a permutation of train per epoch, from the seed)
reasoning_gym ───────┼─► prompts ─► split ──┤
verifiers ───────────┘                      └─► eval     (no prompt of it is in train)
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from configs.sources import naming_source
from configs.task import EvaluationConfig, PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.files import read_prompts
from millrace.prompts.packages import listed_prompts, prompt_sources
from millrace.prompts.stored import is_stored_run, stored_demonstrations
from millrace.prompts.sums import ARITHMETIC, CHAINS, arithmetic_prompts, chain_prompts, commuted
from millrace.types import Prompt

# Stored runs depend on it: another salt holds out other prompts.
_SPLIT_SALT = "millrace-held-out:"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The prompts of a run. No prompt is in both halves; `prompt_id` is unique within each."""

    train: tuple[Prompt, ...]
    """Prompts to train on, at least one."""
    eval: tuple[Prompt, ...]
    """Prompts to evaluate on, at least one."""
    sets: Mapping[str, tuple[Prompt, ...]] = field(default_factory=dict)
    """Those of further evaluation sets, by name."""

    @property
    def asked(self) -> "PromptSet":
        """Everything that the policy is asked: with the prompts of the further sets among those for evaluation."""
        return replace(self, eval=(*self.eval, *(prompt for prompts in self.sets.values() for prompt in prompts)))


class PromptOrder:
    """The prompt of each group: every prompt once per epoch, each epoch in its own order.

    Examples:
        >>> prompts = [Prompt(prompt_id=name, text=name, answer="", source="example") for name in "abc"]
        >>> order = PromptOrder(prompts, seed=0, shuffle=False)
        >>> [order.prompt_at(group_id).text for group_id in range(4)]
        ['a', 'b', 'c', 'a']
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        """Shuffle `prompts` (at least one) by `seed` (≥ 0), or keep their order if not `shuffle`."""
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def prompt_at(self, n: int) -> Prompt:
        """The prompt of group number `n` (≥ 0), the same in every process. O(1) except at the start of an epoch."""
        return self._prompts[self.index_at(n)]

    def index_at(self, n: int) -> int:
        """The index of that prompt."""
        if n < 0:
            raise ValueError(f"group number is {n}; expected at least 0")
        epoch, position = divmod(n, len(self._prompts))
        if not self._shuffle:
            return position
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._order, self._epoch = generator.permutation(len(self._prompts)).tolist(), epoch
        return self._order[position]


class AskedSource(Protocol):
    """The sections of a source's config on which its prompts depend."""

    prompts: PromptsConfig
    evaluation: EvaluationConfig


def load_all_prompts(sources: Mapping[str, AskedSource]) -> dict[str, PromptSet]:
    """The prompts of each source, as `RunConfig.by_source` returns them. None trains on what any is evaluated on.

    Raises InputError as `load_prompts` does, naming the source.
    """
    loaded: dict[str, PromptSet] = {}
    for name, source in sources.items():
        with naming_source(name):
            sets = {
                key: tuple(
                    load_source(part.source, source.prompts, f"evaluation.sets.{key}.source")[: part.num_prompts]
                )
                for key, part in source.evaluation.sets.items()
            }
            loaded[name] = replace(load_prompts(source.prompts), sets=sets)
    held_out = {_question(prompt) for prompts in loaded.values() for prompt in prompts.asked.eval}
    for name, prompts in loaded.items():
        train = tuple(prompt for prompt in prompts.train if _question(prompt) not in held_out)
        if not train:
            read = f"all {len(prompts.train)} training prompts are evaluated on"
            raise PromptsError(read, file=f"source {name}", expected="others to train on")
        loaded[name] = replace(prompts, train=train)
    return loaded


def load_prompts(config: PromptsConfig) -> PromptSet:
    """Load both halves of a run's prompt set. Raises InputError naming the file and the line or row.

    Without `eval_source`, `num_eval` prompts of `source` are held out, chosen by hash: the same ones for every seed.
    With it, its prompts are the evaluation set, and the same prompts of `source` are left out of training.

    Examples:
        >>> prompts = load_prompts(PromptsConfig(source="arithmetic", digits=1, num_eval=8))
        >>> len(prompts.train), len(prompts.eval), prompts.eval[0].source
        (47, 8, 'arithmetic')
    """
    source, eval_source = config.source, config.eval_source
    prompts = load_source(source, config, learned=config.demonstrations)
    if eval_source is None:
        train, held_out = _hold_out(prompts, config.num_eval, commuted if source == ARITHMETIC else _asked)
        if not train:
            expected = f"more than the {config.num_eval} held out of them (prompts.num_eval)"
            raise PromptsError(f"{len(prompts)} prompts", file=source, expected=expected)
    else:
        held_out = load_source(eval_source, config, key="prompts.eval_source")
        held_out_asked = {_asked(prompt) for prompt in held_out}
        held_out = held_out[: config.num_eval]
        train = [prompt for prompt in prompts if _asked(prompt) not in held_out_asked]
        if not train:
            raise PromptsError(f"every prompt is in {eval_source} too", file=source, expected="some to train on")
    return PromptSet(train=tuple(train), eval=tuple(held_out))


def load_source(
    source: str, config: PromptsConfig, key: str = "prompts.source", *, learned: bool = False
) -> list[Prompt]:
    """All prompts of one source, in its order, read as `config` says. Raises as `load_prompts` does.

    `key` is the key of the config that holds `source`; errors name it. `learned`: whether the policy learns from its
    demonstrations, so that each prompt must have one.
    """
    try:
        return _load(source, config, learned=learned)
    except PromptsError as error:
        if error.key == "prompts.source":
            error.key = key
        raise


def _load(source: str, config: PromptsConfig, *, learned: bool) -> list[Prompt]:
    if config.demonstrations and is_stored_run(source):
        return stored_demonstrations(source, config.where)
    if learned and config.where is not None:
        raise PromptsError(f'"{source}" and prompts.where is set', key="prompts.source", expected="a stored run")
    if learned and (source in (ARITHMETIC, CHAINS) or prompt_sources(source, config)):
        raise PromptsError(f'"{source}"', key="prompts.source", expected="a file of demonstrations, or a stored run")
    if sources := prompt_sources(source, config):
        listed = listed_prompts(sources)
        return listed if config.chat else [replace(prompt, messages=()) for prompt in listed]
    if source == ARITHMETIC:
        return arithmetic_prompts(config.digits)
    if source == CHAINS:
        return chain_prompts()
    return read_prompts(source, config, learned=learned)


def _hold_out(
    prompts: Iterable[Prompt], num_eval: int, identity: Callable[[Prompt], str]
) -> tuple[list[Prompt], list[Prompt]]:
    """Splits off the `num_eval` different prompts first by hash. Those with the identity of one are not trained on."""
    prompts = list(prompts)

    def rank(prompt: Prompt) -> bytes:
        return hashlib.sha256((_SPLIT_SALT + identity(prompt)).encode()).digest()

    # A question that stands there twice is held out once: it says no more about the policy the second time.
    distinct: dict[str, Prompt] = {}
    for prompt in sorted(prompts, key=rank):
        distinct.setdefault(_asked(prompt), prompt)
    held_out = list(distinct.values())[:num_eval]
    held_out_identities = {identity(prompt) for prompt in held_out}
    return [prompt for prompt in prompts if identity(prompt) not in held_out_identities], held_out


def _question(prompt: Prompt) -> str:
    """The same for one question in several sources, as text or as a user's only message."""
    if prompt.source == ARITHMETIC:
        return f"{commuted(prompt)}="
    return str(prompt.messages[0]["content"]) if len(prompt.messages) == 1 else _asked(prompt)


def _asked(prompt: Prompt) -> str:
    return json.dumps(prompt.messages) if prompt.messages else prompt.text
