"""The keys and values of a batch whose rows come and go between two tokens.

Two buffers per layer, [rows, heads, columns, features]. All rows end at the same column, and a row of n tokens begins n
columns before it:

          begin of the longest          end: the next token of every row goes here
    row 0       │     a a a a a a a a a a │
    row 1       │ . . . . b b b b b b b b │      . masked
    row 2       │ c c c c c c c c c c c c │
    free        │                         │

- **A token** is written into the column `end`. Nothing is copied until the columns are used up. Then the rows move back
  to the first columns, or to new buffers with half as many free columns as used ones.
- **Rows that enter** were computed separately, and are copied in before `end`.
- **Rows that leave** are replaced by the last rows: one copy of a row each.
- **An empty batch** keeps its buffers for the next one: on a CPU, memory is dear when it is touched first.

So the cost of a token depends on the rows alive and on the longest of them. As rows are aligned on the right, distances
between columns are distances between tokens, and `transformers` makes the masks, those of sliding windows too. Layers
with such windows keep all their columns here.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Of one layer, each [rows, heads, columns, features]."""

_FREE_COLUMNS = 64
"""Fewest free columns of new buffers."""


class KvBuffers:
    """The buffers, and which of their rows and columns are in use."""

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
        """Forgets all rows. The buffers stay."""
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

    def put(self, rows: Sequence[int], layers: Sequence[KeysValues], found: Sequence[int]) -> None:
        """Copies the rows `found` of these layers into rows that have room, right before `end`."""
        num_texts, _, num_columns, _ = layers[0][0].shape
        begin = self.end - num_columns
        self._blank(rows, self.end - self.width, begin)
        first, copies = rows[0], len(rows) // num_texts
        # As whole groups enter: each text for as many rows, one behind the other.
        by_text = [u for u in range(num_texts) for _ in range(copies)] == [*found]
        if by_text and [*rows] == list(range(first, first + len(rows))):
            for buffer, new in self._pairs(layers):
                place = buffer[first : first + len(rows), :, begin : self.end]
                place.unflatten(0, (num_texts, copies)).copy_(new[:, None])
            return
        rows_N, found_N = (torch.tensor(each, device=layers[0][0].device) for each in (rows, found))
        for buffer, new in self._pairs(layers):
            buffer[:, :, begin : self.end].index_copy_(0, rows_N, new[found_N])

    def add_rows(self, lengths: Sequence[int]) -> None:
        """Takes rows that were put behind the last one into use."""
        self.num_rows += len(lengths)
        self.lengths_B = torch.cat([self.lengths_B, torch.tensor(lengths)])

    def add_token(self) -> None:
        """Takes the column that the model has written into use."""
        self.end += 1
        self.width += 1
        self.lengths_B += 1

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

    def _pairs(self, layers: Sequence[KeysValues]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each buffer with what `layers` have for it."""
        for mine, other in zip(self._layers, layers, strict=True):
            yield from zip(mine.stored, other, strict=True)

    def _move(self, num_rows: int, end: int, layers: Sequence[KeysValues]) -> None:
        """Moves the rows so that they end before column `end`: to new buffers, unless there is room in the old ones."""
        fits = num_rows <= self._max_rows and end + _FREE_COLUMNS <= self._max_columns
        if not fits:
            # Rows enter one by one as well: some to spare.
            self._max_rows = num_rows + self.num_rows // 4
            self._max_columns = end + end // 2 + _FREE_COLUMNS
        for layer, pair in zip(self._layers, layers, strict=True):
            before = [self.used(buffer) for buffer in layer.stored] if self.num_rows else []
            if not fits:
                keys, values = (
                    like.new_empty(self._max_rows, like.shape[1], self._max_columns, like.shape[3]) for like in pair
                )
                layer.stored = keys, values
            for buffer, old in zip(layer.stored, before, strict=False):
                # A copy: the old columns and the new ones may overlap.
                buffer[: self.num_rows, :, end - self.width : end] = old.clone() if fits else old
        self.end = end


class _Layer(CacheLayerMixin):
    """One layer's buffers, as `transformers` calls them while it computes a token of each row."""

    stored: KeysValues
    """Unset until the first rows enter."""

    def __init__(self, buffers: KvBuffers) -> None:
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
