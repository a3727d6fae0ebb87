"""A policy for tests of engines: its weights as a receiver returns them, and its log-probabilities.

model ─► ReceiveBuffer ─► Weights ─► update_weights
  └──► log-probabilities of the whole text at once: no padding, no cache, no batch
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import DynamicCache, PreTrainedModel

from millrace.generation.engines.base import Engine
from millrace.types import Response, Trajectory
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.fingerprint import fingerprint
from millrace.weights.shared_tensors import ReceiveBuffer, shapes_of
from storage.stores.memory import memory_folder

Offer = Callable[[PreTrainedModel, int], Weights]
"""`offer(model, policy_version)`: the model's parameters as a version in shared memory, until the next call."""


@contextmanager
def offering() -> Iterator[Offer]:
    """Yields an `Offer`."""
    buffer = ReceiveBuffer(memory_folder() / f"test-{uuid.uuid4().hex}")

    def offer(model: PreTrainedModel, policy_version: int) -> Weights:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        tensors = buffer.tensors_for(shapes_of(parameters))
        for name, parameter in parameters.items():
            tensors[name].copy_(parameter)
        manifest = Manifest(
            id=WeightsId(incarnation=0, policy_version=policy_version, t_offered=0.5), fingerprint=fingerprint(tensors)
        )
        return Weights(manifest=manifest, tensors=tensors, shared=buffer.shared)

    yield offer
    buffer.close()


def all_of(engine: Engine) -> list[Trajectory]:
    """Collects until nothing is in flight."""
    done: list[Trajectory] = []
    while engine.in_flight:
        done += engine.collect(1.0)
    return done


def response_logits(model: PreTrainedModel, prompt: Sequence[int], response: Response) -> torch.Tensor:
    """[R, V] before each token of the response."""
    tokens = torch.tensor([[*prompt, *response.tokens]])
    with torch.no_grad():
        logits_RV: torch.Tensor = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
    return logits_RV


def kept_cache_logits(models: Mapping[int, PreTrainedModel], prompt: Sequence[int], response: Response) -> torch.Tensor:
    """[R, V] before each token of the response, if keys and values of earlier versions were kept at each update.

    The newest token at an update has none yet: the new version computes them.
    """
    tokens = torch.tensor([[*prompt, *response.tokens]])
    cache, logits, first = DynamicCache(), [], 0
    for version, start, end in spans(response):
        last = len(prompt) + end - 1
        with torch.no_grad():
            output = models[version](input_ids=tokens[:, first:last], past_key_values=cache, use_cache=True)
        logits.append(output.logits[0, start - end :])
        first = last
    return torch.cat(logits)


def spans(response: Response) -> list[tuple[int, int, int]]:
    """(policy version, index of its first token, index after its last) of each version span."""
    starts = [start for _, start in response.version_spans]
    ends = [*starts[1:], len(response.tokens)]
    return [(version, start, end) for (version, start), end in zip(response.version_spans, ends, strict=True)]


def mismatches(
    models: Mapping[int, PreTrainedModel], prompt: Sequence[int], response: Response, *, kept: bool = False
) -> list[float]:
    """|rollout − trainer log-probability| of each token sampled at temperature 1, nats.

    Each token is scored by the model of the version that its span names, from everything before it; `kept`: with the
    keys and values that earlier versions computed. Tokens of an environment are left out.
    """
    result = []
    mask = response.loss_mask
    for version, start, end in spans(response):
        logits = (
            kept_cache_logits(models, prompt, response) if kept else response_logits(models[version], prompt, response)
        )
        logprobs_RV = torch.log_softmax(logits, dim=-1)
        for r in (r for r in range(start, end) if mask[r]):
            expected = logprobs_RV[r, response.tokens[r]].item()
            result.append(abs(response.rollout_logprobs[r] - expected))
    return result


def largest_mismatch(
    models: Mapping[int, PreTrainedModel], prompt: Sequence[int], response: Response, *, kept: bool = False
) -> float:
    """The largest of `mismatches`; 0.0 if there is no such token."""
    return max(mismatches(models, prompt, response, kept=kept), default=0.0)
