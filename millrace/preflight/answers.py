"""Checks before a run starts that its reward can use the prompts' answers."""

from collections.abc import Sequence

from configs.prompts import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.dataset import PromptSet
from millrace.prompts.files import place_of
from millrace.prompts.packages import prompt_sources
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt


def check_answers(scorer: Scorer, asked: PromptSet, prompts: PromptsConfig, further: Sequence[str] = ()) -> None:
    """Raises PromptsError with one sentence if no response to some prompt can be scored, because of its answer.

    The sentence names the prompt's file and line. `further` are prompt sources besides those of `prompts`.
    """
    found = scorer.first_unusable((*asked.train, *asked.eval))
    if found is not None:
        prompt, reason = found
        raise PromptsError(f"{_place(prompt, prompts, further)}: no response to it can be scored: {reason}")


def _place(prompt: Prompt, prompts: PromptsConfig, further: Sequence[str]) -> str:
    for source in (prompts.source, prompts.eval_source, *further):
        if source is not None and not prompt_sources(source, prompts) and (place := place_of(prompt, source, prompts)):
            return place
    return f"prompt {prompt.prompt_id} of {prompt.source}"
