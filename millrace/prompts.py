"""Prompts: where they come from, which are held out, and in which order they are asked.

arithmetic ─────┐                               ┌─► train ─► PromptOrder: group number n ─► prompt
a file ─────────┤                               │            (a permutation of train for every epoch, from the seed)
reasoning_gym ──┼─► prompts ─► split ─► template┤
verifiers ──────┘                               └─► eval     (never in train, by construction)
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millrace.errors import PromptsError
from millrace.packages import EXTRAS
from millrace.prompt_sources.arithmetic import ARITHMETIC, arithmetic_prompts, commuted
from millrace.prompt_sources.files import Reading, read_prompts
from millrace.prompt_sources.listing import listed_prompts
from millrace.types import Prompt

__all__ = ["ARITHMETIC", "PromptOrder", "PromptSet", "load_prompts"]

# Part of every stored run's meaning: another salt holds out other prompts.
_SPLIT_SALT = "millrace-held-out:"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The prompts of a run. No text is in both halves; `prompt_id` is unique within each."""

    train: tuple[Prompt, ...]
    """What rollouts are made of, at least one."""
    eval: tuple[Prompt, ...]
    """What progress is measured on, at least one."""


class PromptOrder:
    """Which prompt belongs to which group of the run: `prompts` once per epoch, each epoch in an order of its own."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        """Order `prompts` (at least one) by `seed` (≥ 0), or leave them as they stand when not `shuffle`."""
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: Sequence[int] = ()

    def prompt_at(self, n: int) -> Prompt:
        """The prompt of global group number `n` (≥ 0), the same in every process. O(1) but at an epoch's first use."""
        if n < 0:
            raise ValueError(f"group number is {n}; expected at least 0")
        epoch, position = divmod(n, len(self._prompts))
        if epoch != self._epoch:
            self._order, self._epoch = self._order_of(epoch), epoch
        return self._prompts[self._order[position]]

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        order: list[int] = generator.permutation(len(self._prompts)).tolist()
        return order


def load_prompts(
    *,
    source: str,
    eval_source: str | None,
    prompt_field: str,
    answer_field: str,
    digits: int,
    max_sum: int,
    num_eval: int,
    answer_format: str = "text",
    template: str | None = None,
    package_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> PromptSet:
    """Load both halves of a prompt set.

    A source is one of
    - `arithmetic`: every sum of two numbers of `digits` digits up to `max_sum`;
    - the path or fsspec URL of a `.jsonl` or `.parquet` file, or of a folder that `datasets` saved, with text under
      `prompt_field`, the answer in `answer_format` (`text`, `gsm8k` or `boxed`) under `answer_field`, and `id` if it
      likes;
    - `reasoning_gym:TASK,…` or `verifiers:ENVIRONMENT`, whose options `package_options` has by the package's name.

    Without `eval_source`, `num_eval` prompts (≥ 1) of `source` are held out, chosen by hash: the same ones for every
    seed. With it, its prompts are the evaluation, and those of `source` with the same text are left out of training.
    A `template` is what the policy reads in the end, with the prompt where it says `{prompt}`.

    Raises PromptsError naming the file and the line or row.
    """
    reading = Reading(prompt_field=prompt_field, answer_field=answer_field, answer_format=answer_format)

    def load(name: str) -> list[Prompt]:
        package, colon, _ = name.partition(":")
        if colon and package in EXTRAS:
            return listed_prompts(name, (package_options or {})[package])
        return arithmetic_prompts(digits, max_sum) if name == ARITHMETIC else read_prompts(name, reading)

    prompts = load(source)
    if eval_source is None:
        train, held_out = _hold_out(prompts, num_eval, commuted if source == ARITHMETIC else _text)
        if not train:
            raise PromptsError(f"{source}: {len(prompts)} prompts; expected more than the {num_eval} held out of them")
    else:
        held_out = load(eval_source)
        held_out_texts = {prompt.text for prompt in held_out}
        train = [prompt for prompt in prompts if prompt.text not in held_out_texts]
        if not train:
            raise PromptsError(f"{source}: every prompt is in {eval_source} too; expected some to train on")
    # Last: which prompts are held out follows from what they ask, however that is put.
    return PromptSet(train=_put(train, template), eval=_put(held_out, template))


def _put(prompts: Iterable[Prompt], template: str | None) -> tuple[Prompt, ...]:
    if template is None:
        return tuple(prompts)
    before, _, after = template.partition("{prompt}")
    return tuple(replace(prompt, text=before + prompt.text + after) for prompt in prompts)


def _hold_out(
    prompts: Iterable[Prompt], num_eval: int, identity: Callable[[Prompt], str]
) -> tuple[list[Prompt], list[Prompt]]:
    """Split off the `num_eval` prompts first by hash; what shares an identity with one of them is not trained on."""
    prompts = list(prompts)

    def rank(prompt: Prompt) -> bytes:
        return hashlib.sha256((_SPLIT_SALT + identity(prompt)).encode()).digest()

    held_out = sorted(prompts, key=rank)[:num_eval]
    taken = {identity(prompt) for prompt in held_out}
    return [prompt for prompt in prompts if identity(prompt) not in taken], held_out


def _text(prompt: Prompt) -> str:
    return prompt.text
