"""What the policy is asked, in training and in evaluation."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from configs.section import Count, Section, Text


class ArithmeticConfig(Section):
    """The built-in prompts: every sum of two non-negative integers that these limits allow."""

    digits: Annotated[int, Field(ge=1, le=3)] = 2
    """Decimal digits of each summand, zero-padded."""
    max_sum: Annotated[int, Field(ge=1, le=1998)] = 99
    """Largest sum asked for; its digits are the (zero-padded) width of every answer."""


class ReasoningGymConfig(Section):
    """What `reasoning_gym:TASK` makes; nothing is downloaded."""

    size: Count = 1000
    """Problems of each task, those held out included."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Of the problems alone: runs with another `seed` of their own are still asked the same ones."""
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments of a task by the task's name, such as `{chain_sum: {max_digits: 2}}`; the rest has the task's
    defaults."""


class VerifiersConfig(Section):
    """What `verifiers:ENVIRONMENT` is loaded with."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's `load_environment`."""


class PromptsConfig(Section):
    """What the policy is asked."""

    source: Text = "arithmetic"
    """Training prompts: `arithmetic`; the path or URL of a .jsonl or .parquet file or of a folder that `datasets`
    saved; `reasoning_gym:TASK,…`; or `verifiers:ENVIRONMENT`, with `#eval` after it for its evaluation set."""
    eval_source: Text | None = None
    """Evaluation prompts, named like `source`; null holds `num_eval` prompts of `source` out of training."""
    prompt_field: Text = "prompt"
    """Key or column that holds the prompt's text."""
    answer_field: Text = "answer"
    """Key or column that holds the reference answer's text."""
    answer_format: Literal["text", "gsm8k", "boxed"] = "text"
    """Where the answer stands in that text: `text`: it is all of it; `gsm8k`: after the last `####`, commas between
    thousands left out; `boxed`: in the last `\\boxed{…}`."""
    template: Text | None = None
    """What the policy reads, with the prompt in place of `{prompt}`: instructions, a model's chat marks; null: the
    prompt alone."""
    num_eval: Count = 512
    """Prompts held out of `source` when there is no `eval_source`."""
    shuffle: bool = True
    """Whether each epoch visits the training prompts in a new order, drawn from `seed`."""
    arithmetic: ArithmeticConfig = Field(default_factory=ArithmeticConfig)
    """Limits of the built-in prompts."""
    reasoning_gym: ReasoningGymConfig = Field(default_factory=ReasoningGymConfig)
    """How `reasoning_gym:TASK` is made."""
    verifiers: VerifiersConfig = Field(default_factory=VerifiersConfig)
    """How `verifiers:ENVIRONMENT` is loaded."""

    @field_validator("template")
    @classmethod
    def _has_one_place_for_the_prompt(cls, template: str | None) -> str | None:
        if template is not None and template.count("{prompt}") != 1:
            raise ValueError("text that holds {prompt} once")
        return template


class EvaluationConfig(Section):
    """How progress is measured: on held-out prompts."""

    num_prompts: Count = 256
    """Most evaluation prompts asked at a time of measurement."""
    samples: Count = 1
    """Answers to each: 1 is decoded greedily; more are sampled at `generation.temperature`, and give pass@k and a
    majority vote too."""
    batch_size: Count = 256
    """Answers decoded together."""
