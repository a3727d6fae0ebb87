"""Three shapes of work for both sides, each with its own small model and prompts.

    short         512 × (7 + 3)       sums of two numbers, such as `38+47=`
    long          64 × (7 + ≤ 64)     chains of sums modulo 5: `5:3+4=` is answered with `2 4:4+2=1 3:2+1=3 …`
    long_prompt   64 × (256 + ≤ 64)   the same after 249 characters of other chains

Every character is a token, and each prompt begins with another one. A response earns 1 if it is the right answer, and 0
if it is not.
"""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

from configs.recipe import Recipe
from configs.stored import DEFAULT_SOURCE
from configs.task import PromptsConfig
from millrace.bootstrap.tiny_model import Lesson, bootstrap
from millrace.prompts.files import read_prompts
from millrace.prompts.sums import arithmetic_prompts

GROUP_SIZE = 8
"""Responses per prompt."""
_SUMS = range(4, 9)
"""Sums in a chain: with the end token, 26 to 58 tokens in a response."""
_DIGITS = 5
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One shape of work."""

    name: str
    responses: int
    """Responses of an optimizer step."""
    prompt_tokens: int
    max_new_tokens: int
    learning_rate: float
    steps: int
    """Optimizer steps of a run, unless the command line says otherwise."""
    model: Recipe
    """The start model. Its warm start ends while some sampled answers are wrong, so that rewards have work left."""


_SMALL = Recipe(hidden_size=64, intermediate_size=320, target_imitation_rate=0.4, max_accuracy=1.0)
_LARGE = Recipe(
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    intermediate_size=768,
    # Of greedy answers. Of sampled ones fewer than half are right then: they have some forty tokens.
    target_imitation_rate=0.95,
    max_accuracy=1.0,
    learning_rate=5e-4,
    batch_size=64,
)
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="short",
            responses=512,
            prompt_tokens=7,
            max_new_tokens=3,
            learning_rate=2e-4,
            steps=100,
            model=_SMALL,
        ),
        Shape(
            name="long",
            responses=64,
            prompt_tokens=7,
            max_new_tokens=64,
            learning_rate=1e-4,
            steps=60,
            model=_LARGE,
        ),
        Shape(
            name="long_prompt",
            responses=64,
            prompt_tokens=256,
            max_new_tokens=64,
            # Its start model answers four of five prompts. With 1e-4 it soon answered fewer, on both sides.
            learning_rate=3e-5,
            steps=40,
            model=replace(_LARGE, learning_rate=2e-4, batch_size=16),
        ),
    )
}
"""The shapes by name."""


def write_prompts(shape: Shape, path: Path) -> None:
    """Writes the prompts with their answers as JSON lines."""
    if shape.max_new_tokens < _SUMS[-1]:
        records = [{"prompt": prompt.text, "answer": prompt.answer} for prompt in arithmetic_prompts(2)]
    else:
        rng = random.Random(_SEED)
        starts = [(count, a, b) for count in _SUMS for a in range(_DIGITS) for b in range(_DIGITS)]
        records = [{"prompt": _before(shape, rng) + _asked(*start), "answer": _written_out(*start)} for start in starts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_model(shape: Shape, prompts: Path, folder: Path) -> None:
    """Makes the start model in `folder`, as a Hugging Face folder that both sides load."""
    asked = read_prompts(str(prompts), PromptsConfig())
    lesson = Lesson(prompts=asked, recipe=shape.model, max_new_tokens=shape.max_new_tokens)
    bootstrap(
        {DEFAULT_SOURCE: lesson},
        shape.model,
        folder,
        seed=_SEED,
        report=lambda step, line: print(line, flush=True),
    )


def _before(shape: Shape, rng: random.Random) -> str:
    """Other chains, written out, which fill the prompt up to its length; the first of them is cut."""
    # A prompt begins with a special token, which has no character.
    characters = shape.prompt_tokens - 1 - len(_asked(_SUMS[0], 0, 0))
    text = ""
    while len(text) < characters:
        start = (rng.choice(_SUMS), rng.randrange(_DIGITS), rng.randrange(_DIGITS))
        text += f"{_asked(*start)}{_written_out(*start)}\n"
    return text[len(text) - characters :]


def _asked(count: int, a: int, b: int) -> str:
    return f"{count}:{a}+{b}="


def _written_out(count: int, a: int, b: int) -> str:
    """Each sum adds the last two digits, modulo their number."""
    sums = []
    for to_go in reversed(range(count)):
        a, b = b, (a + b) % _DIGITS
        sums.append(f"{b} {_asked(to_go, a, b)}" if to_go else str(b))
    return "".join(sums)
