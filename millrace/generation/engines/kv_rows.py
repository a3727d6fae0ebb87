"""The rows of a batch as a causal language model sees them: they enter, get a token each, and leave.

append: texts ─► each different one once ─► by length, in passes of some thousand tokens ─► buffers ─► logits after them
decode: a token per row ─► one pass over all rows ─► logits after them

All rows end at the same column of the buffers, and a row of n tokens begins n columns before it:

          begin of the longest          end: the next token of every row goes here
    row 0       │     a a a a a a a a a a │
    row 1       │ . . . . b b b b b b b b │      . masked
    row 2       │ c c c c c c c c c c c c │
    free        │                         │

A token is written into the column `end`. Once the columns are used up, the rows move back to the first columns, or to
new buffers with half as many free columns as used ones. Rows that enter were computed separately, and are copied in
before `end`. Rows that leave are replaced by the last rows. An empty batch keeps its buffers for the next one: on a
CPU, the first touch of memory is expensive. As rows are aligned on the right, distances between columns are distances
between tokens, and `transformers` makes the masks, those of sliding windows too.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from millrace.errors import ModelFolderError
from millrace.models.modules import ExpertRecorder

_PREFILL_TOKENS = 8192
"""Most tokens of a forward pass over rows that enter, padding included; a single longer row is one pass."""
_FREE_COLUMNS = 64
"""Fewest free columns of new buffers."""

Text = tuple[int, ...]
KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Of one layer, each [rows, heads, columns, features]."""


class KvRows:
    """A causal language model's cache of B rows of tokens, 0 at first. Only for use in inference mode."""

    def __init__(self, model: PreTrainedModel, pad: int, recorder: ExpertRecorder | None = None) -> None:
        """`pad` is any token id. Raises ModelFolderError if a layer of the model keeps more than keys and values."""
        self.experts: list[torch.Tensor] = []
        """Experts of the last append or decode, by row: [tokens, layers, k]. Empty without `recorder`."""
        self._recorder = recorder
        _check_layers(model)
        self._model = model
        self._pad = pad
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._num_layers = len(DynamicCache(config=model.config).layers)
        self._buffers = _Buffers(self._num_layers)

    def clear(self) -> None:
        """Removes all rows. Their memory stays for the next ones."""
        self._buffers.clear()

    def free(self) -> None:
        """Removes all rows and frees their memory."""
        self._buffers = _Buffers(self._num_layers)

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
            sources = [u for u, text in enumerate(chunk) for _ in rows_of[text]]
            if not order:
                buffers.make_room(len(texts), max(len(text) for text in texts), layers)
            buffers.put([first + n for n in rows], layers, sources)
            logits.append(logits_UV[sources])
            if self._recorder is not None:
                experts_UPLK = self._recorder.take().unflatten(0, (len(chunk), -1))
                experts += [experts_UPLK[u, -len(text) :] for u, text in enumerate(chunk) for _ in rows_of[text]]
            order += rows
        buffers.num_rows += len(texts)
        buffers.lengths_B = torch.cat([buffers.lengths_B, torch.tensor([len(text) for text in texts])])
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
        buffers.end += 1
        buffers.width += 1
        buffers.lengths_B += 1
        if self._recorder is not None:
            self.experts = list(self._recorder.take().split(1))
        return logits_BV

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Removes rows. Returns the old row of each place, [B]."""
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
            f"a {model.config.model_type} model, whose layers keep a state",
            key="generation.engine",
            expected="a model whose layers keep the keys and values of every token",
        )


class _Buffers:
    """Two buffers per layer, [rows, heads, columns, features], and which of their rows and columns are in use."""

    def __init__(self, num_layers: int) -> None:
        self.num_rows = 0
        self.end = 0
        self.width = 0
        """Tokens of the longest row."""
        self.lengths_B = torch.zeros(0, dtype=torch.long)
        """[B] tokens of each row."""
        self._max_rows = 0
        self._max_columns = 0
        self._layers = [_Layer(self) for _ in range(num_layers)]
        self.cache = Cache(layers=list(self._layers))
        """The cache that a model reads and extends by a token of each row."""

    def clear(self) -> None:
        self.num_rows = self.end = self.width = 0
        self.lengths_B = self.lengths_B[:0]

    def make_room(self, num_rows: int, longest: int, like: Sequence[KeysValues]) -> None:
        """Makes room for `num_rows` more rows of up to `longest` tokens, with heads and features like these."""
        needed, width = self.num_rows + num_rows, max(self.width, longest)
        if needed > self._max_rows or width > self.end:
            self._move(needed, width, like)
        if width > self.width:
            self._blank(range(self.num_rows), self.end - width, self.end - self.width)
            self.width = width

    def make_room_for_a_token(self) -> None:
        if self.end == self._max_columns:
            self._move(self.num_rows, self.width, [layer.stored for layer in self._layers])

    def put(self, rows: Sequence[int], layers: Sequence[KeysValues], sources: Sequence[int]) -> None:
        """Copies the rows `sources` of these layers into rows that have room, right before `end`."""
        begin = self.end - layers[0][0].shape[2]
        self._blank(rows, self.end - self.width, begin)
        rows_N, sources_N = (torch.tensor(each, device=layers[0][0].device) for each in (rows, sources))
        for layer, pair in zip(self._layers, layers, strict=True):
            for buffer, new in zip(layer.stored, pair, strict=True):
                buffer[:, :, begin : self.end].index_copy_(0, rows_N, new[sources_N])

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Fills the places of removed rows with the last ones. Returns the old row of each place, [B]."""
        leaving = set(rows)
        num_left = self.num_rows - len(leaving)
        holes = [row for row in rows if row < num_left]
        movers = [row for row in range(num_left, self.num_rows) if row not in leaving]
        order = list(range(num_left))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if movers:
            for layer in self._layers:
                for buffer in layer.stored:
                    used = self.used(buffer)
                    used[holes] = used[movers]
        self.num_rows = num_left
        self.lengths_B = self.lengths_B[order]
        self.width = max(self.lengths_B.tolist(), default=0)
        return order

    def used(self, buffer: torch.Tensor, new: int = 0) -> torch.Tensor:
        """The part of a buffer that is in use, and `new` columns more."""
        return buffer[: self.num_rows, :, self.end - self.width : self.end + new]

    def _blank(self, rows: Sequence[int], begin: int, end: int) -> None:
        """Fills columns that are to be masked: a masked value counts 0 times, and that must not be 0 times NaN."""
        if rows and begin < end:
            for layer in self._layers:
                for buffer in layer.stored:
                    buffer[list(rows), :, begin:end] = 0

    def _move(self, num_rows: int, end: int, layers: Sequence[KeysValues]) -> None:
        """Moves the rows so that they end before column `end`: to new buffers, unless there is room in the old ones."""
        fits = num_rows <= self._max_rows and end + _FREE_COLUMNS <= self._max_columns
        if not fits:
            # Rows enter one by one as well: some to spare.
            self._max_rows = num_rows + self.num_rows // 4
            self._max_columns = end + end // 2 + _FREE_COLUMNS
        for layer, pair in zip(self._layers, layers, strict=True):
            used = [self.used(buffer) for buffer in layer.stored] if self.num_rows else []
            if not fits:
                keys, values = (
                    like.new_empty(self._max_rows, like.shape[1], self._max_columns, like.shape[3]) for like in pair
                )
                layer.stored = keys, values
            for buffer, old in zip(layer.stored, used, strict=False):
                # A copy: the old columns and the new ones may overlap.
                buffer[: self.num_rows, :, end - self.width : end] = old.clone() if fits else old
        self.end = end


class _Layer(CacheLayerMixin):
    """One layer's buffers, as `transformers` calls them while it computes a token of each row."""

    stored: KeysValues
    """Unset until the first rows enter."""

    def __init__(self, buffers: _Buffers) -> None:
        super().__init__()
        self._buffers = buffers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new column; returns all columns in use, the new one included."""
        num_rows, end = self._buffers.num_rows, self._buffers.end
        keys, values = self.stored
        keys[:num_rows, :, end : end + 1] = key_states
        values[:num_rows, :, end : end + 1] = value_states
        return self._buffers.used(keys, new=1), self._buffers.used(values, new=1)

    def get_seq_length(self) -> int:
        return self._buffers.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._buffers.width + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: rows enter before they get tokens."""
