"""Generation with Hugging Face `transformers`: any causal language model, any device, no server.

Prompts are padded on the left and decoded as one batch with a key-value cache. Weights are replaced between batches
only, so each response has a single version span.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from millrace.engines.base import Engine
from millrace.types import Response, Sampling


class TransformersEngine(Engine):
    """Wraps a causal language model and the tokenizer whose end-of-sequence token stops a response.

    The model's own `generation_config` is replaced by one without any habits: a run's `Sampling` alone decides.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy_version: int = 0) -> None:
        self.model = model
        # `generate` fills what it is not told from the folder's own habits: a repetition penalty there would sample
        # from a policy that the trainer does not know.
        self.model.generation_config = GenerationConfig.from_model_config(model.config)
        self.policy_version = policy_version
        self.vocab_size: int = model.config.vocab_size
        self._eos: int = tokenizer.eos_token_id
        self._pad: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Response]:
        input_ids_BP, attention_mask_BP = self._left_padded(prompts)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model.eval()
            output: Any = self.model.generate(  # type: ignore[operator]
                input_ids=input_ids_BP,
                attention_mask=attention_mask_BP,
                max_new_tokens=sampling.max_new_tokens,
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
            self._response(tokens_R, logprobs_R)
            for tokens_R, logprobs_R in zip(tokens_BR.tolist(), logprobs_BR.tolist(), strict=True)
        ]

    def update_weights(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        parameters = dict(self.model.named_parameters())
        wrong = {
            "missing": parameters.keys() - tensors.keys(),
            "unknown": tensors.keys() - parameters.keys(),
            "of another shape": {
                n for n in parameters.keys() & tensors.keys() if parameters[n].shape != tensors[n].shape
            },
        }
        if any(wrong.values()):
            found = "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in wrong.items() if names)
            raise ValueError(f"weights of version {policy_version} do not fit the model: {found}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
        self.policy_version = policy_version

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(len(prompt) for prompt in prompts)
        input_ids_BP = torch.full((len(prompts), longest), self._pad)
        attention_mask_BP = torch.zeros((len(prompts), longest), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            input_ids_BP[i, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask_BP[i, longest - len(prompt) :] = 1
        return input_ids_BP.to(self.model.device), attention_mask_BP.to(self.model.device)

    def _response(self, tokens_R: list[int], logprobs_R: list[float]) -> Response:
        stopped = self._eos in tokens_R
        length = tokens_R.index(self._eos) + 1 if stopped else len(tokens_R)
        return Response(
            tokens=tuple(tokens_R[:length]),
            rollout_logprobs=tuple(logprobs_R[:length]),
            version_spans=((self.policy_version, 0),),
            finish_reason="stop" if stopped else "length",
        )


def _decoding(sampling: Sampling) -> dict[str, Any]:
    """`generate` arguments; top-k is switched off because `transformers` turns it on by default."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
