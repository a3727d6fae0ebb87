"""Seconds per token of a generator, looked up: a cost model is asked once for each few tokens in the cache."""

from collections.abc import Callable

_RESOLUTION = 9
"""A cache of the expected size is divided into up to 2 ** this parts, which count as equally large."""


class DecodeRates:
    """What `decode` says of up to `slots` requests, for caches of about `expected_tokens`: within a few thousandths of
    that many tokens."""

    def __init__(self, decode: Callable[[int, int], float], expected_tokens: float, slots: int) -> None:
        self._decode = decode
        self.shift = max(0, int(expected_tokens).bit_length() - _RESOLUTION)
        """Tokens in the cache, shifted right by so many bits, are the key in a row."""
        self.rows: list[dict[int, float]] = [{} for _ in range(slots + 1)]
        """By requests: the rates known so far."""

    def ask(self, running: int, key: int) -> float:
        """The rate, which is then in the row. Raises ValueError if it is not a positive number."""
        # The middle of what has this key.
        seconds = self._decode(running, (key << self.shift) + ((1 << self.shift) >> 1))
        if not 0 < seconds < float("inf"):
            raise ValueError(f"a cost model decodes {running} requests in {seconds} seconds per token")
        self.rows[running][key] = seconds
        return seconds
