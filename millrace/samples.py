"""A scored group as the trainer sees it: its verified members, each with its advantage."""

from millrace.advantage import group_mean_advantages
from millrace.batch import Sample
from millrace.scored import ScoredGroup


def samples_of(group: ScoredGroup) -> list[Sample]:
    """One sample a verified member, in the group's order."""
    verified = group.verified
    advantages = group_mean_advantages([reward for reward in group.rewards if reward is not None])
    return [
        Sample(
            prompt_tokens=group.prompt_tokens[i],
            response_tokens=group.response_tokens[i],
            rollout_logprobs=group.rollout_logprobs[i],
            loss_mask=group.loss_mask[i],
            temperature=group.temperature,
            advantage=advantage,
        )
        for i, advantage in zip(verified, advantages, strict=True)
    ]
