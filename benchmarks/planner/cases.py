"""Configs that the planner predicts on this machine: two families, each with a run that the fit may see.

tiny    the preset tiny-cpu: responses of three tokens
tail    a model that was never trained ends a response after each token with the same probability, so lengths are
        geometric: some 34 tokens in the mean, and of eight responses the longest has 90
"""

import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PRESET = "configs/presets/tiny-cpu.yaml"
LETTERS: Mapping[str, int] = {"tail": 22, "longer": 46}
"""Number of different letters in the prompts of a family: a model that was never trained draws from these, the end of
the response and two more tokens alike."""
_PROMPTS, _PROMPT_LETTERS, _MAX_TOKENS = 512, 12, 240
Settings = Mapping[str, object]

_SHARED: Settings = {
    # So low that lengths stay the same.
    "training.learning_rate": 1e-9,
    "training.checkpoint_every": 50,
    "evaluation.every": None,
    "promotion.margin": None,
    "prompts.num_eval": 8,
}
_TAIL: Settings = {
    **_SHARED,
    "generation.max_new_tokens": _MAX_TOKENS,
    "generation.groups_per_batch": 8,
    "training.groups_per_step": 8,
    "training.max_steps": 60,
}
FAMILIES: Mapping[str, Settings] = {
    "tiny": {**_SHARED, "training.max_steps": 150},
    "tail": _TAIL,
    "longer": {**_TAIL, "training.max_steps": 40},
}
UNTRAINED: Settings = {
    "model.warm_start_steps": 0,
}
"""How the start models are made whose lengths are geometric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A config and its run."""

    name: str
    family: str
    settings: Settings = field(default_factory=dict)


FITTED: Sequence[Case] = (Case(name="tiny", family="tiny"), Case(name="tail", family="tail"))
"""The runs that the fit sees."""

PREDICTED: Sequence[Case] = (
    Case(name="tiny-bound-0", family="tiny", settings={"staleness.max_staleness": 0}),
    Case(name="tiny-bound-4", family="tiny", settings={"staleness.max_staleness": 4}),
    Case(name="tiny-sync", family="tiny", settings={"pipeline.mode": "sync"}),
    Case(name="tiny-2-generators", family="tiny", settings={"generation.replicas": 2}),
    Case(name="tiny-quarter-places", family="tiny", settings={"generation.groups_per_batch": 8}),
    Case(name="tiny-half-batch", family="tiny", settings={"training.groups_per_step": 32}),
    Case(name="tiny-double-batch", family="tiny", settings={"training.groups_per_step": 128, "training.max_steps": 80}),
    Case(name="tail-bound-0", family="tail", settings={"staleness.max_staleness": 0}),
    Case(name="tail-bound-1", family="tail", settings={"staleness.max_staleness": 1}),
    Case(name="tail-bound-4-drop", family="tail", settings={"staleness.max_staleness": 4, "staleness.too_old": "drop"}),
    Case(name="tail-sync", family="tail", settings={"pipeline.mode": "sync"}),
    Case(name="tail-2-generators", family="tail", settings={"generation.replicas": 2}),
    Case(name="tail-half-places", family="tail", settings={"generation.groups_per_batch": 4}),
    Case(name="tail-double-places", family="tail", settings={"generation.groups_per_batch": 16}),
    Case(name="tail-double-batch", family="tail", settings={"training.groups_per_step": 16, "training.max_steps": 40}),
    Case(name="tail-longer", family="longer"),
)
"""The runs that it predicts, each by its changes."""


def write_prompts(path: Path, letters: int) -> None:
    """Prompts of random letters. Long answers make room for those of the start model."""
    rng, alphabet = random.Random(0), string.ascii_letters[:letters]
    texts = ["".join(rng.choices(alphabet, k=_PROMPT_LETTERS)) for _ in range(_PROMPTS)]
    answer = alphabet[0] * _MAX_TOKENS
    path.write_text("".join(json.dumps({"prompt": text, "answer": answer}) + "\n" for text in texts))
