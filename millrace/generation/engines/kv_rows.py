"""The rows of a batch as a causal language model sees them: they enter, get a token each, and leave.

append: texts ─► each different one once ─► by length, in passes of some thousand tokens ─► buffers ─► logits after them
decode: a token per row ─► one pass over all rows ─► logits after them

The rows' keys and values are in `kv_buffers.py`.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from millrace.errors import ModelFolderError
from millrace.generation.engines.kv_buffers import KeysValues, KvBuffers
from millrace.models.modules import ExpertRecorder

_PREFILL_TOKENS = 8192
"""Most tokens of a forward pass over rows that enter, padding included; a single longer row is one pass."""

Text = tuple[int, ...]


class KvRows:
    """A causal language model's cache of B rows of tokens, 0 at first. Only for use in inference mode."""

    def __init__(self, model: PreTrainedModel, pad: int, recorder: ExpertRecorder | None = None) -> None:
        """`pad` is any token id. Raises ModelFolderError if a layer of the model keeps more than keys and values."""
        self.experts: list[torch.Tensor] = []
        """What `recorder` noted in the last append or decode, by row: [tokens, layers, k]. Empty without it."""
        self._recorder = recorder
        _check_layers(model)
        self._model = model
        self._pad = pad
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._num_layers = len(DynamicCache(config=model.config).layers)
        self._buffers = KvBuffers(self._num_layers)

    def clear(self) -> None:
        """Forgets all rows. Their memory stays for the next ones."""
        self._buffers.clear()

    def free(self) -> None:
        """Forgets all rows and frees their memory."""
        self._buffers = KvBuffers(self._num_layers)

    def append(self, texts: Sequence[Text]) -> torch.Tensor:
        """Adds a row for each of the texts, in their order. Returns the [N, V] logits that follow them."""
        buffers, first = self._buffers, self._buffers.num_rows
        rows_of: dict[Text, list[int]] = defaultdict(list)
        for n, text in enumerate(texts):
            rows_of[text].append(n)
        order: list[int] = []
        logits: list[torch.Tensor] = []
        experts: list[torch.Tensor] = []
        for chunk in _chunks(sorted(rows_of, key=len)):
            logits_UV, layers = self._prefill(chunk)
            rows = [n for text in chunk for n in rows_of[text]]
            found = [u for u, text in enumerate(chunk) for _ in rows_of[text]]
            if not order:
                buffers.make_room(len(texts), max(len(text) for text in texts), layers)
            buffers.put([first + n for n in rows], layers, found)
            logits.append(logits_UV[found])
            if self._recorder is not None:
                experts_UPLK = self._recorder.take().unflatten(0, (len(chunk), -1))
                experts += [experts_UPLK[u, -len(text) :] for u, text in enumerate(chunk) for _ in rows_of[text]]
            order += rows
        buffers.add_rows([len(text) for text in texts])
        places = torch.tensor(order).argsort()
        self.experts = [experts[place] for place in places.tolist()] if experts else []
        return torch.cat(logits)[places]

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """Adds a token to each row, in their order. Returns the [B, V] logits that follow."""
        buffers = self._buffers
        buffers.make_room_for_a_token()
        lengths_B1 = buffers.lengths_B[:, None].to(self._model.device)
        columns_W = torch.arange(buffers.width + 1, device=self._model.device)
        mask_BW = columns_W >= buffers.width - lengths_B1
        input_ids_B1 = torch.tensor(tokens, device=self._model.device)[:, None]
        logits_BV = self._forward(input_ids_B1, mask_BW, lengths_B1, buffers.cache)
        buffers.add_token()
        if self._recorder is not None:
            self.experts = list(self._recorder.take().split(1))
        return logits_BV

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Removes rows. Returns which of the old rows is where now, [B]."""
        order = self._buffers.remove(rows)
        if not order:
            self.clear()
        return order

    def _prefill(self, texts: Sequence[Text]) -> tuple[torch.Tensor, list[KeysValues]]:
        """([N, V] logits after the texts, their keys and values by layer, padded on the left)."""
        longest = max(len(text) for text in texts)
        input_ids_NP = torch.tensor([[self._pad] * (longest - len(text)) + list(text) for text in texts])
        starts_N1 = torch.tensor([[longest - len(text)] for text in texts])
        columns_P = torch.arange(longest)
        positions_NP = (columns_P - starts_N1).clamp(min=0)
        mask_NP = columns_P >= starts_N1
        # Layers with sliding windows would drop columns of short rows that the others still need.
        layers = [DynamicLayer() for _ in range(self._num_layers)]
        device = self._model.device
        logits_NV = self._forward(
            input_ids_NP.to(device), mask_NP.to(device), positions_NP.to(device), Cache(layers=list(layers))
        )
        return logits_NV, [(layer.keys, layer.values) for layer in layers]  # type: ignore[misc]  # filled by now

    def _forward(
        self, input_ids_BS: torch.Tensor, mask_BW: torch.Tensor, positions_BS: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """[B, V] logits after the last column."""
        positions = {"position_ids": positions_BS} if self._takes_positions else {}
        output: Any = self._model(
            input_ids=input_ids_BS,
            attention_mask=mask_BW,
            past_key_values=cache,
            use_cache=True,
            **positions,
            **self._last_only,
        )
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV


def _chunks(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Splits texts, sorted by length, into passes of a limited number of tokens."""
    chunk: list[Text] = []
    for text in texts:
        if chunk and len(text) * (len(chunk) + 1) > _PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(text)
    yield chunk


def _check_layers(model: PreTrainedModel) -> None:
    """Raises ModelFolderError unless all that a layer remembers of a token is its keys and values."""
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if model._is_stateful or layers - {DynamicLayer, DynamicSlidingWindowLayer}:
        raise ModelFolderError(
            f"the engine transformers can't generate with a {model.config.model_type} model: its layers keep a state; "
            "expected a model whose layers keep the keys and values of every token"
        )
