"""Generation with Hugging Face `transformers`: any causal language model, any device, no server.

All requests in flight are decoded as one batch with a key-value cache, prompts padded on the left. The tokens of a
response to continue are computed again with its prompt. Weights are replaced between batches only, so each response has
a single version span. A batch has one random state, seeded by the seeds of all its members, so a response can only be
repeated together with its batch.
"""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from millrace.generation.engines.base import Engine, check_names, unstarted
from millrace.generation.engines.stop_criteria import RowEnds
from millrace.models.offload import move
from millrace.types import FinishReason, Request, Response, Sampling, Trajectory
from millrace.weights.base import Weights


class TransformersEngine(Engine):
    """A causal language model with its tokenizer, whose end-of-sequence token ends a response, as `stop` texts do."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_version: int = 0,
        *,
        stop: Sequence[str] = (),
    ) -> None:
        self.model = model
        # `generate` takes its defaults from the model folder: a repetition penalty there would sample from a policy
        # that the trainer does not know.
        self.model.generation_config = GenerationConfig.from_model_config(model.config)
        self.policy_version = policy_version
        self._device: torch.device = model.device
        self.vocab_size: int = model.config.vocab_size
        self._tokenizer = tokenizer
        self._stop = stop
        self._eos: int = tokenizer.eos_token_id
        self._pad: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._waiting: list[Request] = []
        self._sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=1)

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if self._waiting and sampling != self._sampling:
            raise ValueError("requests that are decoded together need the same sampling")
        self._waiting += requests
        self._sampling = sampling

    def collect(self, seconds: float) -> list[Trajectory]:
        if not self._waiting:
            return []
        requests, self._waiting = self._waiting, []
        t_started = time.time()
        responses = self._decode(requests, self._sampling)
        t_finished = time.time()
        return [
            Trajectory(request=request, response=response, t_started=t_started, t_finished=t_finished)
            for request, response in zip(requests, responses, strict=True)
        ]

    @property
    def tokens_in_flight(self) -> int:
        return 0

    def abort(self) -> None:
        self._waiting = []

    def interrupt(self) -> list[Trajectory]:
        requests, self._waiting = self._waiting, []
        return [unstarted(request) for request in requests]

    def update_weights(self, weights: Weights) -> float:
        parameters = dict(self.model.named_parameters())
        check_names({name: parameter.shape for name, parameter in parameters.items()}, weights)
        started = time.monotonic()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights.tensors[name])
        self.policy_version = weights.id.policy_version
        return time.monotonic() - started

    @torch.inference_mode()
    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        input_ids_BP = torch.tensor([list(tokens)], device=self.model.device)
        self.model.eval()
        output: Any = self.model(input_ids=input_ids_BP)
        best = torch.log_softmax(output.logits[0, -1].float(), dim=-1).topk(min(most, self.vocab_size))
        return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def sleep(self) -> None:
        # There are no caches between two batches.
        move(self.model, torch.device("cpu"))

    def wake(self) -> None:
        move(self.model, self._device)

    def close(self) -> None:
        """Does nothing: it runs in the caller's process."""

    @torch.inference_mode()
    def _decode(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """One response per request, in order."""
        given = [(*request.prompt_tokens, *request.response_tokens) for request in requests]
        input_ids_BP, attention_mask_BP = self._left_padded(given)
        limits = [sampling.max_new_tokens - len(request.response_tokens) for request in requests]
        rows = RowEnds(self._tokenizer, self._stop, input_ids_BP.shape[1], limits)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_batch_seed(requests))
            self.model.eval()
            output: Any = self.model.generate(  # type: ignore[operator]
                input_ids=input_ids_BP,
                attention_mask=attention_mask_BP,
                max_new_tokens=max(limits),
                stopping_criteria=StoppingCriteriaList([rows]),
                eos_token_id=self._eos,
                pad_token_id=self._pad,
                return_dict_in_generate=True,
                output_scores=True,
                **_decoding(sampling),
            )
        tokens_BR = output.sequences[:, input_ids_BP.shape[1] :]
        # One step at a time: the [B, R, V] block of all steps never exists.
        logprobs_BR = torch.stack(
            [
                torch.log_softmax(scores_BV.float(), dim=-1).gather(1, tokens_BR[:, t : t + 1]).squeeze(1)
                for t, scores_BV in enumerate(output.scores)
            ],
            dim=1,
        )
        return [
            self._response(tokens_R, logprobs_R, *end)
            for tokens_R, logprobs_R, end in zip(tokens_BR.tolist(), logprobs_BR.tolist(), rows.ends, strict=True)
            if end is not None
        ]

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(len(prompt) for prompt in prompts)
        input_ids_BP = torch.full((len(prompts), longest), self._pad)
        attention_mask_BP = torch.zeros((len(prompts), longest), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            input_ids_BP[i, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask_BP[i, longest - len(prompt) :] = 1
        return input_ids_BP.to(self.model.device), attention_mask_BP.to(self.model.device)

    def _response(
        self, tokens_R: list[int], logprobs_R: list[float], length: int, finish_reason: FinishReason
    ) -> Response:
        return Response(
            tokens=tuple(tokens_R[:length]),
            rollout_logprobs=tuple(logprobs_R[:length]),
            version_spans=((self.policy_version, 0),),
            finish_reason=finish_reason,
        )


def _batch_seed(requests: Sequence[Request]) -> int:
    """A 63-bit seed from the seeds of all members."""
    digest = hashlib.sha256(",".join(str(request.seed) for request in requests).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _decoding(sampling: Sampling) -> dict[str, Any]:
    """Arguments of `generate`. Top-k is off; `transformers` turns it on by default."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
