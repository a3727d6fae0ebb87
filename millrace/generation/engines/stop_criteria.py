"""Ends the rows of a batch that `transformers` decodes: after an end token or a stop text, or at a length limit."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from millrace.types import FinishReason


class RowEnds(StoppingCriteria):
    """Ends each row separately, and records where and why.

    The response itself must contain the whole stop text: the end of its prompt does not count. The criterion for stop
    texts in `transformers` also looks into the prompt, and needs a tokenizer that knows the letters a to f.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], prompt_length: int, limits: Sequence[int]
    ) -> None:
        """Each row starts with `prompt_length` tokens, and row b may get `limits[b]` more (at least 1)."""
        self._tokenizer = tokenizer
        self._eos: int = tokenizer.eos_token_id
        self._stop = stop
        # A token is at least one byte of text, so a stop text that was just completed began at most this far back. One
        # more, because some tokenizers drop a blank before the first token that they decode.
        self._look_back = 1 + max((len(text.encode()) for text in stop), default=0)
        self._prompt_length = prompt_length
        self._limits = limits
        self.ends: list[tuple[int, FinishReason] | None] = [None] * len(limits)
        """[B] (length of row b in tokens, reason of its end); None while it continues."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """[B] bool: which rows of the [B, S] token ids have ended."""
        num_new = input_ids.shape[1] - self._prompt_length
        newest = input_ids[:, -min(num_new, self._look_back) :].tolist()
        for row, tokens in enumerate(newest):
            if self.ends[row] is None:
                self.ends[row] = self._end(tokens, num_new, self._limits[row])
        return torch.tensor([end is not None for end in self.ends], device=input_ids.device)

    def _end(self, newest: list[int], num_new: int, limit: int) -> tuple[int, FinishReason] | None:
        if newest[-1] == self._eos or (self._stop and self._completes_a_stop_text(newest)):
            return num_new, "stop"
        return (num_new, "length") if num_new == limit else None

    def _completes_a_stop_text(self, tokens: list[int]) -> bool:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stop)
