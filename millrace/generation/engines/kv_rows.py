"""The rows of a batch as a causal language model sees them: they enter, get a token each, and leave.

append: texts ─► each different one once ─► by length, in passes of some thousand tokens ─► buffers ─► logits after them
decode: a token per row ─► one pass over all rows ─► logits after them

All rows end at the same column of the buffers, and a row of n tokens begins n columns before it:

          begin of the longest          end: the next token of every row goes here
    row 0       │     a a a a a a a a a a │
    row 1       │ . . . . b b b b b b b b │      . masked
    row 2       │ c c c c c c c c c c c c │
    free        │                         │

A token is written into the column `end`. Once rows or columns are used up, the rows move to larger buffers. Rows that
enter were computed separately, and are copied in before `end`. Rows that leave are replaced by the last rows. An empty
batch keeps its buffers for the next one: on a CPU, the first touch of memory is expensive. As rows are aligned on the
right, distances between columns are distances between tokens, and `transformers` makes the masks, those of sliding
windows too. Columns without a token hold zeros: a masked value counts 0 times, and that must not be 0 times NaN.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from millrace.models.modules import ExpertRecorder

_PREFILL_TOKENS = 8192
"""Most tokens of a forward pass over rows that enter, padding included; a single longer row is one pass."""
_FREE_COLUMNS = 64
"""Fewest free columns of new buffers."""

Text = tuple[int, ...]


class KvRows:
    """A causal language model's cache of B rows of tokens, 0 at first. Append, decode and remove in inference mode."""

    def __init__(self, model: PreTrainedModel, recorder: ExpertRecorder | None = None) -> None:
        self.experts: list[torch.Tensor] = []
        """Experts of the last append or decode, by row: [tokens, layers, k]. Empty without `recorder`."""
        self._model = model
        self._recorder = recorder
        self._layers = [_Layer(self) for _ in DynamicCache(config=model.config).layers]
        self._cache = Cache(layers=list(self._layers))
        self._num_rows = self._max_rows = self._max_columns = 0
        self._lengths_B = torch.zeros(0, dtype=torch.long)
        self.width = 0
        """Tokens of the longest row."""
        self.end = 0

    @torch.inference_mode()
    def clear(self) -> None:
        """Removes all rows. Their memory stays for the next ones."""
        self.remove(range(self._num_rows))

    def append(self, texts: Sequence[Text]) -> torch.Tensor:
        """Adds a row for each of the texts, in their order. Returns the [N, V] logits that follow them."""
        logits_NV = torch.empty(0)
        self.experts = [torch.empty(0)] * len(texts) if self._recorder is not None else []
        for chunk in _chunks(sorted(dict.fromkeys(texts), key=len)):
            logits_UV, layers = self._prefill(chunk)
            index_in_chunk = {text: u for u, text in enumerate(chunk)}
            rows = [n for n, text in enumerate(texts) if text in index_in_chunk]
            sources = [index_in_chunk[texts[n]] for n in rows]
            if not len(logits_NV):
                self._make_room(self._num_rows + len(texts), max(self.width, *map(len, texts)), layers)
                logits_NV = logits_UV.new_empty(len(texts), logits_UV.shape[1])
            logits_NV[rows] = logits_UV[sources]
            rows_N = torch.tensor(rows, device=logits_NV.device) + self._num_rows
            columns = slice(self.end - len(chunk[-1]), self.end)
            for layer, pair in zip(self._layers, layers, strict=True):
                for buffer, new in zip(layer.buffers, pair, strict=True):
                    buffer[:, :, columns].index_copy_(0, rows_N, new[sources])
            if self._recorder is not None:
                experts_UPLK = self._recorder.take().unflatten(0, (len(chunk), -1))
                for n, u in zip(rows, sources, strict=True):
                    self.experts[n] = experts_UPLK[u, -len(texts[n]) :]
        self._num_rows += len(texts)
        self._lengths_B = torch.cat([self._lengths_B, torch.tensor([len(text) for text in texts])])
        return logits_NV

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """Adds a token to each row, in their order. Returns the [B, V] logits that follow."""
        self._make_room(self._num_rows, self.width, [layer.buffers for layer in self._layers])
        device = self._model.device
        lengths_B1 = self._lengths_B[:, None].to(device)
        mask_BW = torch.arange(self.width + 1, device=device) >= self.width - lengths_B1
        logits_BV = self._forward(torch.tensor(tokens, device=device)[:, None], mask_BW, lengths_B1, self._cache)
        self.end += 1
        self.width += 1
        self._lengths_B += 1
        if self._recorder is not None:
            self.experts = list(self._recorder.take().split(1))
        return logits_BV

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Removes rows and moves the last ones into their places. Returns the old row of each place, [B]."""
        order = list(range(self._num_rows))
        for row in sorted(rows, reverse=True):
            order[row] = order[-1]
            order.pop()
        holes = [row for row, old_row in enumerate(order) if row != old_row]
        for layer in self._layers:
            for buffer in layer.buffers:
                used = self.used(buffer)
                used[holes] = used[[order[row] for row in holes]]
                used[len(order) :] = 0
        self._num_rows = len(order)
        self._lengths_B = self._lengths_B[order]
        self.width = max(self._lengths_B.tolist(), default=0)
        return order

    def used(self, buffer: torch.Tensor, new: int = 0) -> torch.Tensor:
        """The part of a buffer that holds rows, and `new` columns more."""
        return buffer[: self._num_rows, :, self.end - self.width : self.end + new]

    def _prefill(self, texts: Sequence[Text]) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
        """([N, V] logits after the texts, their keys and values by layer, padded on the left)."""
        longest = max(len(text) for text in texts)
        input_ids_NP = torch.tensor([[0] * (longest - len(text)) + list(text) for text in texts])
        starts_N1 = torch.tensor([[longest - len(text)] for text in texts])
        columns_P = torch.arange(longest)
        positions_NP = (columns_P - starts_N1).clamp(min=0)
        mask_NP = columns_P >= starts_N1
        # Layers with sliding windows would drop columns of short rows that the others still need.
        layers = [DynamicLayer() for _ in self._layers]
        device = self._model.device
        logits_NV = self._forward(
            input_ids_NP.to(device), mask_NP.to(device), positions_NP.to(device), Cache(layers=list(layers))
        )
        return logits_NV, [(layer.keys, layer.values) for layer in layers]  # type: ignore[misc]  # filled by now

    def _forward(
        self, input_ids_BS: torch.Tensor, mask_BW: torch.Tensor, positions_BS: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """[B, V] logits after the last column."""
        output: Any = self._model(
            input_ids=input_ids_BS,
            attention_mask=mask_BW,
            position_ids=positions_BS,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV

    def _make_room(self, num_rows: int, width: int, layers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Makes room for `num_rows` rows of up to `width` tokens, and a column after them.

        `layers` has keys and values by layer, for their heads, features and type.
        """
        if not self._num_rows and num_rows <= self._max_rows and width + _FREE_COLUMNS <= self._max_columns:
            self.end = width
        elif num_rows > self._max_rows or width > self.end or self.end == self._max_columns:
            # Rows enter one by one as well: some to spare.
            self._max_rows = num_rows + self._num_rows // 4
            self._max_columns = width + width // 2 + _FREE_COLUMNS
            for layer, pair in zip(self._layers, layers, strict=True):
                moved = [self.used(buffer) for buffer in layer.buffers]
                layer.buffers = tuple(
                    like.new_zeros(self._max_rows, like.shape[1], self._max_columns, like.shape[3]) for like in pair
                )
                # At first there is none to move.
                for buffer, rows in zip(layer.buffers, moved, strict=False):
                    buffer[: self._num_rows, :, width - self.width : width] = rows
            self.end = width
        self.width = width


def _chunks(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Splits texts, sorted by length, into passes of a limited number of tokens."""
    chunk: list[Text] = []
    for text in texts:
        if chunk and len(text) * (len(chunk) + 1) > _PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(text)
    yield chunk


class _Layer(CacheLayerMixin):
    """One layer's buffers, as `transformers` calls them while it computes a token of each row."""

    buffers: tuple[torch.Tensor, ...] = ()
    """Keys and values, each [rows, heads, columns, features]; empty until the first rows enter."""

    def __init__(self, rows: KvRows) -> None:
        super().__init__()
        self._rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new column; returns all columns in use, the new one included."""
        keys, values = (self._rows.used(buffer, new=1) for buffer in self.buffers)
        keys[:, :, -1:] = key_states
        values[:, :, -1:] = value_states
        return keys, values

    def get_seq_length(self) -> int:
        return self._rows.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.width + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: rows enter before they get tokens."""
