"""Counts the requests and tokens used at a service, and enforces the limits on them."""

from dataclasses import asdict, dataclass
from threading import Lock

from configs.task import EndpointConfig
from millrace.errors import InputError


class LimitReached(InputError):
    """A configured limit of requests or cost allows no further request; `pauses` says that the run waits then."""

    pauses = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Requests and tokens used at a service."""

    requests: int = 0
    """Attempts, also those that failed."""
    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(**{name: count + getattr(other, name) for name, count in asdict(self).items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Prices of a million tokens."""

    input: float = 0.0
    output: float = 0.0

    def cost(self, usage: Usage) -> float:
        """In the prices' currency."""
        return (usage.input_tokens * self.input + usage.output_tokens * self.output) / 1e6


class Meter:
    """Counts for all threads of a process, whose share of the limits is one of `sharers`."""

    def __init__(self, limits: EndpointConfig, prices: Prices) -> None:
        self.prices = prices
        self._limits = limits
        self._lock = Lock()
        self._usage, self._sharers = Usage(), 1

    @property
    def usage(self) -> Usage:
        """Requests and tokens so far, predecessors of this process included."""
        with self._lock:
            return self._usage

    def begin(self, usage: Usage, sharers: int) -> None:
        """Continue from `usage`, which predecessors of this process counted; `sharers` processes share the limits."""
        with self._lock:
            self._usage, self._sharers = usage, sharers

    def count_request(self) -> None:
        """Count a request that is about to be sent. Raises LimitReached instead if a limit is used up."""
        with self._lock:
            usage, limits = self._usage, self._limits
            used_up = "and this process's share is used up by"
            if limits.max_requests is not None and usage.requests >= limits.max_requests / self._sharers:
                read = f"{limits.max_requests:,}, {used_up} {usage.requests:,} requests"
                raise self._limit_reached("max_requests", read, "a higher limit")
            cost = self.prices.cost(usage)
            if limits.max_cost is not None and cost >= limits.max_cost / self._sharers:
                read = f"{limits.max_cost:,g}, {used_up} a cost of {cost:.4g}"
                raise self._limit_reached("max_cost", read, "a higher limit")
            self._usage += Usage(requests=1)

    def count_tokens(self, tokens: Usage | None) -> None:
        """Count an answer's tokens; None if it reports none. Raises LimitReached if a cost limit needs them."""
        if tokens is not None:
            with self._lock:
                self._usage += tokens
        elif self._limits.max_cost is not None:
            read = f"{self._limits.max_cost:,g}, and an answer of the service has no usage, which counts its tokens"
            raise self._limit_reached("max_cost", read, "null, or a service that reports its tokens")

    def _limit_reached(self, key: str, read: str, expected: str) -> LimitReached:
        error = LimitReached(read, key=f"scoring.endpoint.{key}", expected=expected)
        error.pauses = self._limits.at_limit == "pause"
        return error
