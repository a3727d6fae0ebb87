"""The reward that a run's config names, for every stage that judges, and for the checks before there is any."""

from configs.schema import RunConfig
from millrace.packages import EXTRAS
from millrace.prompt_sources.origin import makers
from millrace.rewards.factory import make_reward
from millrace.rewards.sandbox import Limits
from millrace.rewards.scorer import Scorer
from millrace.stages.inputs import package_options


def make_scorer(config: RunConfig) -> Scorer:
    """The scorer, of which nothing is loaded yet. Raises InputError for a reward or an option that can't be used."""
    scoring = config.scoring
    reward = make_reward(
        scoring.reward,
        answer_pattern=scoring.answer_pattern,
        function=scoring.function,
        model=scoring.model,
        device=scoring.device,
        weights=scoring.weights,
        sources=_made_sources(config),
    )
    limits = Limits(workers=scoring.workers, timeout_seconds=scoring.timeout_seconds, memory_mb=scoring.memory_mb)
    return Scorer(reward, limits)


def _made_sources(config: RunConfig) -> list[str]:
    """`Prompt.source` of the prompts that packages make."""
    options = package_options(config)
    return [
        maker.source()
        for source in (config.prompts.source, config.prompts.eval_source)
        if source is not None and source.partition(":")[0] in EXTRAS
        for maker in makers(source, options[source.partition(":")[0]])
    ]
