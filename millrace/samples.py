"""Scored groups as the trainer sees them: their verified members, each with its advantage."""

from collections.abc import Sequence

from millrace.advantage import ADVANTAGES
from millrace.batch import Sample
from millrace.scored import ScoredGroup
from millrace.staleness import staleness


def samples_of(groups: Sequence[ScoredGroup], advantage: str, policy_versions: int | Sequence[int]) -> list[Sample]:
    """One sample a verified member of a batch's `groups`, in their order; the advantages are of the whole batch.

    `policy_versions` is the trainer's before the step: one for all, or one a group where they are taken from several.
    Raises what the `advantage` of that name does where rewards are not what it expects.
    """
    versions = [policy_versions] * len(groups) if isinstance(policy_versions, int) else policy_versions
    rewards = [[reward for reward in group.rewards if reward is not None] for group in groups]
    return [
        Sample(
            prompt_tokens=group.prompt_tokens[i],
            response_tokens=group.response_tokens[i],
            rollout_logprobs=group.rollout_logprobs[i],
            loss_mask=group.loss_mask[i],
            temperature=group.temperature,
            advantage=value,
            staleness=staleness(version, int(group.min_policy_versions[i])),
        )
        for group, version, values in zip(groups, versions, ADVANTAGES[advantage](rewards), strict=True)
        for i, value in zip(group.verified, values, strict=True)
    ]
