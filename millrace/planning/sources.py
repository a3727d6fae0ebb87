"""What a plan has to know of the sources of a run: means by their weights, and the most of any."""

from collections.abc import Iterable

from configs.schema import RunConfig
from configs.sources import SourceConfig
from millrace.planning.durations import Lengths


def with_shares(config: RunConfig) -> list[tuple[float, RunConfig]]:
    """Returns the share of the groups of each source at the start, and its config."""
    sources = config.by_source()
    weights = {name: config.sources.get(name, SourceConfig()).weight for name in sources}
    total = sum(weights.values())
    return [(weights[name] / total, source) for name, source in sources.items()]


def mean_group_size(config: RunConfig) -> float:
    """Returns the mean number of responses of a group."""
    return sum(share * source.generation.group_size for share, source in with_shares(config))


def max_group_size(config: RunConfig) -> int:
    """Returns the number of responses of the largest groups."""
    return max(source.generation.group_size for source in config.by_source().values())


def max_new_tokens(config: RunConfig) -> int:
    """Returns the greatest length of a response."""
    return max(source.generation.max_new_tokens for source in config.by_source().values())


def common_group_size(config: RunConfig) -> int | None:
    """Returns the size that all groups have, or None if sources have groups of different sizes."""
    sizes = {source.generation.group_size for source in config.by_source().values()}
    return sizes.pop() if len(sizes) == 1 else None


def mixed_lengths(parts: Iterable[tuple[float, Lengths]]) -> Lengths:
    """Returns lengths of which each part has a share."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0][1]
    groups = [
        group for share, lengths in parts for group in lengths.groups[: max(1, round(share * len(lengths.groups)))]
    ]
    return Lengths(groups=groups, group_size=None, max_tokens=max(lengths.max_tokens for _, lengths in parts))
