"""The learning page: rewards, accuracy and training metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import plotly.graph_objects as go

from dashboard.queries import series as queries
from dashboard.queries.series import ChartLine
from dashboard.read.model import RunData
from dashboard.views.blocks import (
    NO_STEP,
    VERSIONS,
    Chart,
    Table,
    View,
    line_per_run,
    line_per_source,
    lines,
    missing,
    number,
    rows_per_run,
)
from dashboard.views.colours import BLUE, GREY, ORANGE, SKY, VERMILION, colour_number
from dashboard.views.figures import Series, line_chart
from dashboard.views.rewards import BLOCKS as RESPONSE_BLOCKS

RATIOS = dict(zip(queries.RATIO_QUANTILES, (SKY, BLUE, ORANGE, VERMILION), strict=True))


def _reward(runs: Sequence[RunData]) -> go.Figure:
    alone = len(runs) == 1
    series = []
    for index, run in enumerate(runs):
        reward, accuracy = queries.measured(run, "reward_mean"), queries.accuracy(run)
        name, colour = run.info.run_id, colour_number(index)
        series += [
            Series(name="reward" if alone else name, line=reward, colour=colour),
            Series(
                name="held-out accuracy" if alone else f"{name}, held-out accuracy",
                line=accuracy,
                colour=GREY if alone else colour,
                dots_only=True,
            ),
        ]
    series += line_per_source(runs, lambda run: queries.measured(run, "reward_mean"))
    return line_chart(series, x=VERSIONS, y="mean reward; accuracy", empty=NO_STEP)


def _accuracy(runs: Sequence[RunData]) -> go.Figure:
    alone = len(runs) == 1
    series = [
        Series(
            name="held out" if alone else run.info.run_id,
            line=queries.accuracy(run),
            colour=colour_number(number),
            interval=queries.accuracy_interval(run),
        )
        for number, run in enumerate(runs)
    ]
    if alone:
        further = queries.further_accuracies(runs[0])
        series += [
            Series(name=name, line=line, colour=colour_number(number), dash="dash")
            for number, (name, line) in enumerate(further.items(), start=1)
            if name not in runs[0].by_source
        ]
        series += line_per_source(runs, queries.accuracy)
    return line_chart(series, x=VERSIONS, y="accuracy", empty="No version has been evaluated yet.")


def _ratios(run: RunData) -> list[Series]:
    return [
        Series(name=quantile, line=queries.measured(run, f"importance_ratio_{quantile}"), colour=colour)
        for quantile, colour in RATIOS.items()
    ]


_OF_SAMPLED = {"mismatch_kl", "clip_fraction", "effective_sample_size", "chi_square"}
"""Metrics that say nothing of demonstrations, which no policy sampled."""


def _is_sampled(run: RunData) -> bool:
    return not run.info.is_supervised


def _chart(name: str, title: str, sentence: str, unit: str, *, from_zero: bool = False) -> Chart:
    def build(runs: Sequence[RunData]) -> go.Figure:
        def line(run: RunData) -> ChartLine:
            return queries.measured(run, name)

        series = [*line_per_run(runs, line), *line_per_source(runs, line)]
        empty, legend = missing(runs), len(series) > 1
        return line_chart(series, x=VERSIONS, y=unit, empty=empty, from_zero=from_zero, legend=legend)

    requires = _is_sampled if name in _OF_SAMPLED else None
    return Chart(
        id=f"learning-{name.replace('_', '-')}", title=title, sentence=sentence, build=build, requires=requires
    )


_SOURCES: Mapping[str, tuple[str, int]] = {
    "reward": ("reward_mean", 3),
    "without spread": ("zero_advantage_share", 2),
    "length, tokens": ("response_length_mean_tokens", 1),
    "length, trained ÷ taken": ("length_ratio", 3),
    "staleness": ("staleness_mean", 2),
    "a response takes, s": ("response_seconds_mean", 2),
    "its score takes, s": ("score_seconds_mean", 3),
}
"""Column of the table of sources → metric and decimals."""


def _sources(run: RunData) -> list[tuple[str, ...]]:
    status = (run.status or {}).get("sources", {})
    return [
        (
            source,
            number(status.get(source, {}).get("weight")),
            number(status.get(source, {}).get("trained_share"), 1, " %", factor=100),
            *(number(queries.recent(part, name), digits) for name, digits in _SOURCES.values()),
            number(status.get(source, {}).get("accuracy"), 3),
        )
        for source, part in run.by_source.items()
    ]


VIEW = View(
    name="learning",
    title="Learning",
    sentence="Whether the policy improves, and whether its training is sound.",
    blocks=(
        Chart(
            id="learning-reward",
            title="Reward and accuracy",
            sentence="Mean reward of the groups trained at each step, and the share of held-out prompts answered "
            "correctly by each evaluated version.",
            build=_reward,
            wide=True,
        ),
        Chart(
            id="learning-accuracy",
            title="Accuracy of the evaluated versions",
            sentence="Mean reward of one greedy answer per held-out prompt, with its 95 % interval, and of further "
            "evaluation sets. For several runs: the held-out prompts alone.",
            build=_accuracy,
        ),
        _chart(
            "response_length_mean_tokens",
            "Response length",
            "Mean length of the responses in the groups of each step.",
            "tokens",
            from_zero=True,
        ),
        _chart(
            "entropy",
            "Entropy",
            "Entropy of the policy's next token, mean over the trained tokens: near zero, it no longer explores.",
            "nats",
            from_zero=True,
        ),
        _chart(
            "mismatch_kl",
            "KL to the sampling policy",
            "KL divergence of the policy in training from the sampling policy, estimated from the sampled tokens.",
            "nats per token",
        ),
        _chart("grad_norm", "Gradient norm", "Global L2 norm before clipping.", "L2 norm", from_zero=True),
        _chart(
            "clip_fraction",
            "Clipped tokens",
            "Share of tokens whose weight the loss bounds: with AIPO, those whose importance ratio exceeds ρ.",
            "share of tokens",
            from_zero=True,
        ),
        _chart(
            "loss",
            "Loss",
            "Loss of the batch, after aggregation: cross entropy of demonstrations; of sampled responses a surrogate, "
            "whose sign has no meaning.",
            "loss",
        ),
        Table(
            id="learning-sources",
            title="Sources",
            sentence="Newest weight, share of the groups trained so far, means over the last ten steps with groups of "
            "the source, and the accuracy of the newest evaluated version.",
            build=lambda runs: rows_per_run(runs, ("source", "weight", "groups", *_SOURCES, "accuracy"), _sources),
            wide=True,
            requires=lambda run: bool(run.by_source),
        ),
        replace(
            _chart(
                "zero_advantage_share",
                "Groups without spread",
                "Share of the groups taken for each step in which all rewards are equal, including dropped ones: their "
                "advantages are 0, because the prompts are too easy or too hard.",
                "share of groups",
                from_zero=True,
            ),
            requires=lambda run: queries.is_measured(run, "zero_advantage_share"),
        ),
        *RESPONSE_BLOCKS,
        _chart(
            "truncated_share",
            "Truncated responses",
            "Share of each step's responses that were cut off by max_new_tokens or by the limit on turns.",
            "share of responses",
            from_zero=True,
        ),
        Chart(
            id="learning-ratio",
            title="Importance ratio",
            sentence="Probability of a token under the policy in training (π) divided by that under the policy that "
            "sampled it (μ): 5 % of the tokens are below p05, half below p50, and so on. For several runs: the mean.",
            build=lines(
                _ratios,
                lambda run: queries.measured(run, "importance_ratio_mean"),
                x=VERSIONS,
                y="π/μ",
                from_zero=False,
                logarithmic=True,
            ),
            requires=_is_sampled,
        ),
        _chart(
            "effective_sample_size",
            "Effective sample size",
            "How many equally weighted tokens the clipped weights are worth, as a share of all: 1 is on-policy.",
            "share of tokens",
        ),
        _chart(
            "chi_square",
            "Spread of the ratios",
            "χ² divergence of the policy in training from the sampling policy, estimated from the sampled tokens: "
            "the variance that unbounded importance weights would add.",
            "no unit, per token",
        ),
        _chart(
            "kl_to_reference",
            "Distance to the reference",
            "KL divergence of the policy in training from the start model, by the config's estimator; 0 if its "
            "coefficient is 0.",
            "nats per token",
            from_zero=True,
        ),
        _chart(
            "kl_to_teacher",
            "Distance to the teacher",
            "KL divergence of the policy in training from its teachers, estimated from the sampled tokens; 0 without a "
            "teacher.",
            "nats per token",
            from_zero=True,
        ),
        _chart(
            "learning_rate",
            "Learning rate",
            "Learning rate of the schedule at each step; with several updates per batch, their mean.",
            "learning rate",
            from_zero=True,
        ),
        _chart(
            "changed_weight_share",
            "Changed weights",
            "Share of the trained weights that a step changed, in the number format that generators receive; a small "
            "share in bfloat16 means that most updates are below its precision, and accumulate in the trainer.",
            "share of weights",
            from_zero=True,
        ),
    ),
    num_key=7,
)
