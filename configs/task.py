"""The task of a source: its prompts, the environment that answers between turns, the reward, and the evaluation."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from configs.generation import EngineArgs
from configs.section import Count, NonNegative, Parameters, Positive, Replicas, Section, Text

HELD_OUT = "held_out"
"""The name of the held-out prompts among the results of an evaluation."""
_SET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


class ReasoningGymConfig(Parameters):
    """How `reasoning_gym:TASK` makes problems. Nothing is downloaded."""

    size: Count = 1000
    """Problems per task, held-out ones included."""
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments by task name, such as `{chain_sum: {max_digits: 2}}`; missing ones have the task's defaults."""


class VerifiersConfig(Parameters):
    """How `verifiers:ENVIRONMENT` is loaded."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the environment's `load_environment`."""


class PromptsConfig(Section):
    """Prompts for training and evaluation."""

    source: Text = "arithmetic"
    """Training prompts: `arithmetic` or `chains`; the path or URL of a .jsonl, .json, .csv or .parquet file, or of a
    folder saved by `datasets`, or with `demonstrations` of a stored run; ORG/NAME of a data set on a hub, or one of its
    files as `hf://datasets/ORG/NAME/FILE`; `reasoning_gym:TASK,…`; or `verifiers:ENVIRONMENT`, with `#eval` appended
    for its evaluation set."""
    eval_source: Text | None = None
    """Evaluation prompts, in the same form as `source`, left out of training; null: some of `source` are held out."""
    prompt_field: Text = "prompt"
    """Key or column with the prompt: text, or a list of messages, also as JSON text. Without it, `messages` is looked
    for."""
    answer_field: Text = "answer"
    """Key or column with the reference answer: text, a number, or the name of a class label."""
    answer_format: Literal["text", "gsm8k", "boxed"] = "text"
    """Where the answer is in that text: `text`: all of it; `gsm8k`: after the last `####`, without thousands
    separators; `boxed`: in the last `\\boxed{…}`."""
    demonstrations: bool = False
    """Whether each prompt is answered with a response that `source` holds, instead of a sampled one (supervised
    fine-tuning): conversations that end with the assistant's turn, prompts with a `response_field`, or the folder or
    URL of a stored run. Without an answer in its row, a demonstration's last turn is the reference answer."""
    response_field: Text = "response"
    """Key or column with the response of a demonstration: text that follows the prompt. Without it, all turns of the
    assistant in the conversation are learned."""
    where: Text | None = None
    """SQL condition on the rollouts of a stored run that are learned, such as `reward > 0 and staleness = 0`, over the
    columns of `consumed`; null: `reward >= 1`."""
    template: Text | None = None
    """Text the policy reads, with `{prompt}` where the prompt goes; null: the prompt alone. Not for chat, which has
    the model's own template."""
    chat: bool = False
    """Whether a text prompt is a user's message, written in the model's chat template. A prompt that is a list of
    messages always is."""
    system_prompt: Text | None = None
    """Message of the system before every conversation that has none; null: none, or the template's own."""
    response_prefix: Text | None = None
    """Text with which each response of the assistant begins, such as "The answer is"; it is part of the prompt."""
    tools: Text | None = None
    """JSON file with the functions that the policy may call, a list of {"type": "function", "function": {…}}."""
    num_eval: Count = 256
    """Number of evaluation prompts: held out of `source`, or at most as many as the first ones of `eval_source`."""
    shuffle: bool = True
    """Whether each epoch visits the training prompts in a new order, drawn from the run's `seed`."""
    curriculum_window: Count | None = None
    """Prompts that are always solved, or never, are asked a quarter as often as the others. A prompt counts as such if
    in its last `curriculum_window` groups every reward was 1 or more, or every reward was less, each time without
    spread; null: every prompt is asked as often as the others."""
    digits: Annotated[int, Field(ge=1, le=3)] = 2
    """Decimal digits of each summand of `arithmetic`, and of the sum."""
    reasoning_gym: ReasoningGymConfig = Field(default_factory=ReasoningGymConfig)
    verifiers: VerifiersConfig = Field(default_factory=VerifiersConfig)

    @field_validator("template")
    @classmethod
    def _has_one_place_for_the_prompt(cls, template: str | None) -> str | None:
        if template is not None and template.count("{prompt}") != 1:
            raise ValueError("text that contains {prompt} exactly once")
        return template


class EndpointConfig(Section):
    """The service that the rewards `http` and `judge` ask."""

    url: Text | None = None
    """`http`: where rows are posted; `judge`: the base of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1."""
    api_key: Text | None = None
    """Name of the environment variable with the key that is sent as a bearer token; null: none is sent."""
    in_flight: Count = 64
    """Maximum number of requests that a scorer waits for at once."""
    attempts: Count = 5
    """Maximum number of attempts per request. Statuses 408, 429 and 5xx and lost connections are tried again, after
    what `Retry-After` says, or a random pause that grows."""
    requests_per_minute: Count | None = None
    """Maximum number of attempts that a scorer starts per minute, evenly spaced; null: no limit."""
    rows: Count = 1
    """`http`: maximum number of responses per request."""
    max_requests: Count | None = None
    """Maximum number of attempts in a run, kills and resumes included; its scorers get equal shares. null: no limit. To
    continue, resume with a higher limit."""
    max_cost: Positive | None = None
    """The same limit for the cost at `scoring.judge.input_price` and `output_price`, in their currency; null: none. The
    first answer without `usage` reaches it."""
    at_limit: Literal["end", "pause"] = "end"
    """At `max_requests` or `max_cost`: `end`: the run ends with one line; `pause`: scoring waits for the run's end, and
    an automation on the event `service.limit-reached` may suspend it."""


class JudgeConfig(Section):
    """How the reward `judge` asks a language model."""

    model: Text | None = None
    """Name of the model at the endpoint; null: the scorers load the model in `scoring.model`, and ask no service."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Library that computes a model that the scorers load, on `scoring.device`."""
    engine_args: EngineArgs = Field(default_factory=dict)
    """Arguments of that library, as `generation.engine_args`; only with `vllm`."""
    rubric: Text = "Grade whether the response solves the task correctly and completely."
    """The judge's instructions."""
    highest: Positive = 10.0
    """The highest grade; the reward is the grade divided by it, 0 to 1."""
    relative: bool = False
    """Whether the judge reads all responses of a group together and grades each relative to the others."""
    max_tokens: Count = 1024
    """Maximum length of the judge's answer, reasoning included."""
    max_tokens_field: Text | None = "max_tokens"
    """Name of that field of a request, such as `max_completion_tokens`; null: it is not sent."""
    temperature: NonNegative | None = 0.0
    """Sampling temperature of the judge; null: it is not sent, as some models ask for."""
    input_price: NonNegative = 0.0
    """Price of a million tokens that the judge reads."""
    output_price: NonNegative = 0.0
    """Price of a million tokens that the judge writes."""


class RewardConfig(Section):
    """How responses are rewarded; a source may have its own."""

    reward: Text = "exact_match"
    """Reward: `exact_match`, `http`, `judge`, `math`, `reasoning_gym`, `reward_model`, `verifiers` or `weighted_sum`;
    or your own, as `package.module:function`, called with prompt, response, answer and a dict of other fields."""
    answer_pattern: str | None = None
    """Regular expression: the first group of its last match is the answer; null: all that follows `</think>` is."""
    model: Text | None = None
    """Folder of a Hugging Face model, or its ORG/NAME on a hub. For the reward `reward_model`: sequence classification
    with one label. For `judge` without a name in `judge.model`: a chat model."""
    weights: dict[str, float] = Field(default_factory=dict)
    """For the reward `weighted_sum`: weights by reward name, no unit."""
    endpoint: EndpointConfig = Field(default_factory=EndpointConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    timeout_seconds: Positive = 10.0
    """Maximum wall time to score a response, all attempts at an endpoint included, seconds; after that its status is
    `timeout` and it has no reward."""
    memory_mb: Count = 1024
    """Maximum memory of a process that scores a response, beyond what loading the reward takes, MiB."""
    replicas: Replicas | None = None
    """Number of scorer processes of the source alone, so that no other scorer loads its reward; null: the run's
    scorers score it. At least one source must leave it null."""

    @property
    def loads_model(self) -> bool:
        """Whether scorers load a model: `reward_model` is the reward or a part of it, or a judge without a service."""
        rewards = (self.reward, *self.weights)
        return "reward_model" in rewards or ("judge" in rewards and self.judge.model is None)

    @field_validator("answer_pattern")
    @classmethod
    def _has_a_group(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            num_groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"a regular expression, but this one does not compile ({error})") from error
        if num_groups == 0:
            raise ValueError("a regular expression with a group (...) around the answer")
        return pattern


class ScoringConfig(RewardConfig):
    """How responses are rewarded."""

    replicas: Replicas = 1
    """Number of scorer processes that all sources without their own share."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of a model that scorers load."""
    threads: Count = 1
    """CPU threads per scorer."""
    workers: Count = 1
    """Responses that a scorer scores in parallel, each in a process that can be killed."""


class EvaluationSetConfig(Section):
    """One further set of evaluation prompts. They are read with the fields and the template of `prompts`."""

    source: Text
    """The prompts, in the same form as `prompts.source`."""
    num_prompts: Count = 256
    """Maximum number of prompts per evaluation, the first ones of the source."""
    samples: Count = 1
    """Responses per prompt, as in `evaluation.samples`."""


class EvaluationSetsConfig(Section):
    """What progress is measured on; a source may have its own."""

    samples: Count = 1
    """Responses per prompt: 1: greedy decoding only; more: as many are also sampled at `generation.temperature`, for
    pass@k and a majority vote."""
    sets: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """Further sets by name, such as `{hard: {source: hard.jsonl}}`, measured in addition to the held-out prompts, whose
    name is `held_out`."""

    @field_validator("sets")
    @classmethod
    def _have_plain_names(cls, sets: dict[str, EvaluationSetConfig]) -> dict[str, EvaluationSetConfig]:
        if wrong := [name for name in sets if not _SET_NAME.fullmatch(name) or name == HELD_OUT]:
            raise ValueError(
                f"names of 1 to 32 letters, digits, '_' and '-', the first a letter, other than {HELD_OUT}; "
                f"found {wrong[0]!r}"
            )
        return sets


class EvaluationConfig(EvaluationSetsConfig):
    """How progress is measured on held-out prompts."""

    every: Count | None = 20
    """Policy versions between two evaluations during training. The trainer checkpoints each of these versions.
    null: only at the start and at the end of an attempt."""
    stop_after: Count | None = None
    """Training ends, as at `training.max_steps`, after this many evaluations in a row without a better accuracy on the
    held-out prompts; null: never."""
    weights: dict[str, Positive] = Field(default_factory=dict)
    """Weights of the sources in the run's accuracy, which decides the best version, early stop and promotion: the mean
    over their held-out prompts. Sources left out do not count. {}: their weights in the mixture."""


class EnvironmentConfig(Section):
    """The other side of a conversation, between the policy's turns: a tool, a game, a simulated user."""

    name: Text | None = None
    """`calculator` (text), `calculator_tool` (chat, with tool calls), or the import path `package.module:Class` of your
    own environment; null: none, each response is one turn."""
    max_turns: Count = 4
    """Maximum number of policy turns per response; `generation.max_new_tokens` limits their total length, tokens
    written by the environment included."""
