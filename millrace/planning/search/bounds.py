"""How fast a config could be at best: the slower of training and generation, without waits. It ranks candidates.

    generation   places · group size requests decode at once; a step needs groups_per_step · group_size · mean length
                 tokens of all generators, its prompts, and after each version the caches once more
    training     one step on as many tokens, the hand-over, a share of a checkpoint

async: the slower of the two, or the time a version travels ÷ (bound + 1)
sync: all three, one after the other, and the longest response decodes to its end
"""

from dataclasses import dataclass
from statistics import fmean

from configs.schema import RunConfig
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import Lengths

_SAMPLED_GROUPS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Mean lengths, tokens."""

    prompt: float
    response: float
    context: float
    """Of the responses in flight at any moment, prompt and what is sampled so far: long ones are in flight longer."""
    longest: float
    """Response of the sample."""


def work_of(lengths: Lengths) -> Work:
    """From the first groups."""
    groups = [lengths.of_group(number) for number in range(_SAMPLED_GROUPS)]
    responses = [tokens for _, some in groups for tokens in some]
    prompt, response = fmean(tokens for tokens, _ in groups), fmean(responses)
    return Work(
        prompt=prompt,
        response=response,
        context=prompt + fmean(tokens**2 for tokens in responses) / (2 * response),
        longest=max(responses),
    )


def least_step_seconds(config: RunConfig, costs: Costs, work: Work) -> float:
    """Seconds per step that no schedule of this config can beat, but for the samples' chance."""
    training, generation = config.training, config.generation
    rollouts = training.groups_per_step * generation.group_size
    train = costs.train(round(rollouts * (work.prompt + work.response)), rollouts) + costs.handover + costs.overhead
    train += costs.checkpoint / training.checkpoint_every
    generate = _generate(config, costs, work)
    if config.pipeline.mode == "sync":
        return train + generate + costs.push
    # A generator may begin groups of at most bound + 1 steps before the next version has travelled to it.
    step = max(train, generate, (costs.push + costs.handover) / (config.effective_max_staleness + 1))
    if costs.cores is not None:
        busy = train * training.threads + generate * generation.replicas * generation.threads
        step = max(step, busy / costs.cores)
    return step


def _generate(config: RunConfig, costs: Costs, work: Work) -> float:
    """Seconds of one generator for its share of a step."""
    training, generation = config.training, config.generation
    share = training.groups_per_step / generation.replicas
    sync = config.pipeline.mode == "sync"
    admitted = share if sync else min(generation.groups_per_batch, share * (config.effective_max_staleness + 1))
    running = max(1, round(admitted * generation.group_size))
    per_token = costs.decode(running, round(running * work.context))
    decode = share * generation.group_size * work.response * per_token / running
    if sync:
        decode = max(decode, work.longest * costs.decode(1, round(work.context)))
    # Prompts are computed once per group; after new weights the caches of all requests in flight once more.
    again = 0.0 if sync else costs.prefill(round(running * work.context))
    return decode + costs.prefill(round(share * work.prompt)) + costs.pause + again
