"""The nouns of Millrace: what stages hand to each other, with every field's unit, shape and whose policy it speaks of.

Shapes: P prompt tokens, R response tokens of one trajectory. Log-probabilities are natural logarithms (nats), float32.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One item of a prompt set."""

    prompt_id: str
    """Stable name of the prompt, unique in its set."""
    text: str
    """What the policy reads, before tokenisation."""
    answer: str
    """What the verifier compares with."""
    source: str
    """Where the prompt came from: `arithmetic` or the name of its file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn from the policy's logits."""

    temperature: float
    """Divides the logits; 0 means greedy decoding."""
    top_p: float
    """Nucleus mass in (0, 1]; 1 keeps the whole vocabulary."""
    max_new_tokens: int
    """Longest response, tokens; the end-of-sequence token counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One trajectory that an engine is asked for."""

    group_id: int
    """Its group; with `sample_index` the name by which the response comes back."""
    sample_index: int
    """Place in the group, 0 to group_size − 1."""
    prompt_tokens: tuple[int, ...]
    """[P] token ids."""
    seed: int
    """Of this trajectory alone, 63 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What an engine returns for one prompt: tokens and the behaviour policy μ that drew them."""

    tokens: tuple[int, ...]
    """[R] token ids, the end-of-sequence token included."""
    rollout_logprobs: tuple[float, ...]
    """[R] log μ of each token after temperature and top-p, nats."""
    version_spans: tuple[tuple[int, int], ...]
    """(policy version, index of its first token), ascending in both."""
    finish_reason: FinishReason
    """`stop`: the policy ended it; `length`: `max_new_tokens` did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A request with its response."""

    request: Request
    response: Response
    t_started: float
    """When the engine got the request, unix seconds."""
    t_finished: float
    """When its last token was sampled, unix seconds."""
