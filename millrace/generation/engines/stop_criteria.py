"""Where a response ends: after an end token or a stop text, or at a length limit."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from millrace.types import FinishReason


class StopCriteria:
    """Ends responses at the tokens `stop_token_ids` and at `stop` texts.

    The response itself must contain the whole stop text: the end of its prompt does not count. The criterion for stop
    texts in `transformers` also looks into the prompt, and needs a tokenizer that knows the letters a to f.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(stop_token_ids)
        self._stop = stop
        # A token is at least one byte of text, so a stop text that was just completed began at most this far back. One
        # more, because some tokenizers drop a blank before the first token that they decode.
        self._look_back = 1 + max((len(text.encode()) for text in stop), default=0)

    def end(self, sampled: list[int], limit: int) -> FinishReason | None:
        """Why a response ends with the last of its `sampled` tokens, of which there may be `limit`; None if it doesn't.

        Called after each token.
        """
        if sampled[-1] in self._ends or (self._stop and self._completes_a_stop_text(sampled[-self._look_back :])):
            return "stop"
        return "length" if len(sampled) == limit else None

    def _completes_a_stop_text(self, newest: list[int]) -> bool:
        text = self._tokenizer.decode(newest, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stop)
