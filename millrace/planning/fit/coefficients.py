"""What a fit finds: how long each thing takes on the machine, apart from the config."""

from dataclasses import dataclass, fields

from configs.schema import RunConfig
from millrace.planning.simulation.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Seconds of work, without waiting: each is what one more of something costs."""

    decode_step: float
    """Per step of an engine, whatever it decodes."""
    decode_token: float
    """Per token that a step samples: one of each request."""
    decode_context: float
    """Per token in the key-value cache and step; in an engine that pads, padding included."""
    prefill_pass: float
    """Per time that requests enter an engine."""
    prefill_token: float
    """Per token that is computed for requests that enter."""
    recomputed_token: float
    """Per token of the caches that are computed again after new weights, counted in the same way."""
    collect: float
    """Of a generator, per time that responses end: it looks for weights and for room."""
    rollout: float
    """Of a generator, per rollout that it finishes: it becomes a row, and is committed."""
    pause: float
    """Of a generator, per version that it takes: verified, loaded, probed."""
    push: float
    """Per version, until generators may take it: hashed and offered."""
    score_rollout: float
    """Of a scorer, per rollout, beside the reward."""
    score_part: float
    """Of a scorer, per part of trajectories: read, committed."""
    reward: float
    """Of the reward itself, per rollout."""
    train_step: float
    """Per optimizer step."""
    train_token: float
    """Per token of a step, prompts included, with a forward and a backward pass."""
    train_rollout: float
    """Per rollout of a step."""
    handover: float
    """Per version, of the trainer."""
    checkpoint: float
    """Per checkpoint, of the trainer."""
    overhead_step: float
    """Of the trainer between two steps: ledger, status, metrics."""
    overhead_rollout: float
    """The same, per rollout: joined with its score, accounted for."""

    def scaled(self, factor: float) -> "Coefficients":
        """All of them times a factor."""
        return Coefficients(**{field.name: factor * getattr(self, field.name) for field in fields(self)})

    def costs(self, config: RunConfig, *, pulling: float, reward: float | None, cores: float | None) -> Costs:
        """Durations under `config`.

        `pulling`: share of its rollouts that take a backward pass. `reward`: seconds per rollout of another reward than
        the measured one.
        """
        rollouts = config.training.groups_per_step * config.generation.group_size
        reward_seconds = self.reward if reward is None else reward

        def decode(running: int, context: int) -> float:
            return self.decode_step + self.decode_token * running + self.decode_context * context

        def prefill(tokens: int) -> float:
            return self.prefill_pass + self.prefill_token * tokens

        def train(tokens: int, rollouts: int) -> float:
            passes = passes_share(pulling)
            return self.train_step + self.train_token * passes * tokens + self.train_rollout * rollouts

        def recompute(tokens: int) -> float:
            return self.recomputed_token * tokens

        return Costs(
            decode=decode,
            prefill=prefill,
            recompute=recompute,
            pads=pads(config),
            collect=self.collect,
            score=self.score_rollout + reward_seconds / config.scoring.workers,
            train=train,
            handover=self.handover,
            push=self.push,
            pause=self.pause,
            checkpoint=self.checkpoint,
            rollout=self.rollout,
            score_part=self.score_part,
            overhead=self.overhead_step + self.overhead_rollout * rollouts,
            cores=cores,
        )


def passes_share(pulling: float) -> float:
    """Of the work of a forward and a backward pass over all tokens, if the backward pass is over so many of them.

    A backward pass has twice the products of a forward pass.
    """
    return (1 + 2 * pulling) / 3


def pads(config: RunConfig) -> bool:
    """Whether the engine computes all requests of a batch as if they were as long as the longest."""
    return config.generation.engine == "transformers"
