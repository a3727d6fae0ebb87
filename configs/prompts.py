"""What the policy is asked, in training and in evaluation."""

from typing import Annotated

from pydantic import Field

from configs.section import Count, Section, Text


class ArithmeticConfig(Section):
    """The built-in prompts: every sum of two non-negative integers that these limits allow."""

    digits: Annotated[int, Field(ge=1, le=3)] = 2
    """Decimal digits of each summand, zero-padded."""
    max_sum: Annotated[int, Field(ge=1, le=1998)] = 99
    """Largest sum asked for; its digits are the (zero-padded) width of every answer."""


class PromptsConfig(Section):
    """What the policy is asked."""

    source: Text = "arithmetic"
    """Training prompts: `arithmetic`, or the path or URL of a .jsonl or .parquet file."""
    eval_source: Text | None = None
    """Evaluation prompts, named like `source`; null holds `num_eval` prompts of `source` out of training."""
    prompt_field: Text = "prompt"
    """Key or column that holds the prompt's text."""
    answer_field: Text = "answer"
    """Key or column that holds the reference answer's text."""
    num_eval: Count = 512
    """Prompts held out of `source` when there is no `eval_source`."""
    shuffle: bool = True
    """Whether each epoch visits the training prompts in a new order, drawn from `seed`."""
    arithmetic: ArithmeticConfig = Field(default_factory=ArithmeticConfig)
    """Limits of the built-in prompts."""


class EvaluationConfig(Section):
    """How progress is measured: greedy decoding of held-out prompts."""

    num_prompts: Count = 256
    """Most evaluation prompts asked at a time of measurement."""
    batch_size: Count = 256
    """Prompts decoded together."""
