"""What a case should come to: its own config, simulated, with the durations and lengths of its sleeping stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.long_tail.campaign import GROUP_SIZE, MAX_TOKENS, Case, settings
from benchmarks.sleeping.pace import LongTail
from configs.schema import RunConfig
from millrace.planning.durations import Costs, Lengths
from millrace.planning.simulation import simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of the steps after the warm-up."""

    share: float
    """Of the steps that generator or trainer could make alone."""
    dropped_share: float
    """Of the rollouts that the trainer took."""
    masked_token_share: float
    """Of the tokens trained."""
    staleness_mean: float
    staleness_max: int
    length_ratio: float
    """Mean length of the rollouts trained ÷ of all that the trainer took."""
    loss_share: float
    """Tokens that carried loss ÷ tokens that the engine could have sampled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Lengths(Lengths):
    """Those of the sleeping engine; its prompts cost nothing."""

    tail: LongTail

    def of_group(self, group_id: int) -> tuple[int, Sequence[int]]:
        return 0, [min(MAX_TOKENS, self.tail.tokens(group_id, i)) for i in range(GROUP_SIZE)]


def expected(case: Case, *, steps: int, warmup: int) -> Figures:
    """The figures of `steps` steps without the first `warmup`. A trainer or an engine alone makes a step in 1 s."""
    tail = case.pace(1.0).long_tail
    assert tail is not None
    costs = Costs(
        decode=lambda requests, tokens: tail.seconds_per_token,
        prefill=lambda tokens: 0.0,
        score=0.0,
        train=lambda tokens, rollouts: 1.0,
        handover=0.0,
        push=0.0,
        pause=0.0,
        checkpoint=0.0,
    )
    config = RunConfig.model_validate(settings(case, Path("runs"), steps))
    lengths = _Lengths(tail=tail, groups=(), group_size=GROUP_SIZE, max_tokens=MAX_TOKENS)
    found = simulate(config, costs, lengths, steps=steps, warmup=warmup)
    with_loss = found.tokens_per_second * (1 - found.masked_token_share)
    return Figures(
        share=1 / found.step_seconds,
        dropped_share=found.dropped_share,
        masked_token_share=found.masked_token_share,
        staleness_mean=found.staleness_mean,
        staleness_max=found.staleness_max,
        length_ratio=found.length_ratio,
        loss_share=with_loss * tail.seconds_per_token / tail.places,
    )
