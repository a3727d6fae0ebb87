"""Rules about what is generated, how it is rewarded, and how it is trained on."""

import json
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from configs.checks.names import prompt_sources
from configs.checks.rule import Rule
from configs.generation import VLLM_RANKS

if TYPE_CHECKING:
    from configs.schema import RunConfig

_BUILT_IN = ("arithmetic", "chains")


def _most_groups(config: "RunConfig") -> int:
    """Groups that the staleness bound admits. More are never on their way to the trainer."""
    return (config.effective_max_staleness + 1) * config.training.groups_per_step


def _num_sums(digits: int) -> int:
    """Count the pairs of numbers of up to `digits` digits whose sum has no more digits."""
    limit: int = 10**digits
    return limit * (limit + 1) // 2


def _of_samples_only() -> Iterator[Rule]:
    """Yield a rule for each setting that has a meaning only where a policy samples the responses."""
    for key, without in (
        ("generation.temperature", 1.0),
        ("generation.top_p", 1.0),
        ("generation.top_k", None),
        ("prompts.curriculum_window", None),
        ("training.schedule.ess_scaling", False),
        ("training.kl.importance_weighted", False),
        ("training.router_replay", False),
        *((f"training.masks.{name}", None) for name in ("min_token_ratio", "max_token_ratio")),
        *((f"training.masks.{name}", None) for name in ("max_kl", "max_kl_negative")),
    ):
        yield Rule(
            f"{key} prompts.demonstrations",
            lambda c, get=attrgetter(key), without=without: c.prompts.demonstrations and get(c) != without,  # type: ignore[misc]
            f"{json.dumps(without)}, because no policy samples demonstrations",
        )


LEARNING_RULES = (
    Rule(
        "prompts.template prompts.chat",
        lambda c: c.prompts.template is not None and c.prompts.chat,
        "null, because a conversation is written in the model's own template",
    ),
    Rule(
        "prompts.template prompts.source",
        lambda c: c.prompts.template is not None and any(source in _BUILT_IN for source in prompt_sources(c)),
        "null, because demonstrations of the built-in prompts have no template",
    ),
    Rule(
        "prompts.eval_source prompts.source",
        lambda c: c.prompts.eval_source == c.prompts.source,
        "different prompts, or null to hold prompts.num_eval of them out",
    ),
    Rule(
        "prompts.num_eval prompts.digits",
        lambda c: (
            c.prompts.source == "arithmetic"
            and c.prompts.eval_source is None
            and c.prompts.num_eval >= _num_sums(c.prompts.digits)
        ),
        lambda c: f"less than the {_num_sums(c.prompts.digits):,} sums of that length",
    ),
    Rule(
        "training.groups_per_step generation.replicas",
        lambda c: c.training.groups_per_step % c.generation.replicas != 0,
        "a multiple of the replicas, so that all generators make equally many groups",
    ),
    Rule(
        "training.minibatches training.groups_per_step",
        lambda c: c.training.groups_per_step % c.training.minibatches != 0,
        "a divisor of groups_per_step",
    ),
    Rule(
        "generation.groups_per_batch training.groups_per_step",
        lambda c: c.generation.groups_per_batch > _most_groups(c),
        lambda c: f"at most {_most_groups(c)}, the groups that a staleness of up to {c.effective_max_staleness} allows",
    ),
    Rule(
        "generation.max_new_tokens training.max_tokens_per_microbatch",
        lambda c: c.generation.max_new_tokens >= c.training.max_tokens_per_microbatch,
        "a microbatch to hold at least one prompt with its response",
    ),
    Rule(
        "generation.engine_args generation.engine",
        lambda c: c.generation.engine != "vllm" and bool(c.generation.engine_args),
        "no arguments, or the engine vllm",
    ),
    Rule(
        "scoring.judge.engine_args scoring.judge.engine",
        lambda c: c.scoring.judge.engine != "vllm" and bool(c.scoring.judge.engine_args),
        "no arguments, or the engine vllm",
    ),
    Rule(
        "scoring.endpoint.max_cost scoring.reward",
        lambda c: c.scoring.endpoint.max_cost is not None and "http" in (c.scoring.reward, *c.scoring.weights),
        "null, because only judges have prices; scoring.endpoint.max_requests limits http",
    ),
    Rule(
        "scoring.endpoint.max_cost scoring.judge.input_price scoring.judge.output_price scoring.judge.model",
        lambda c: (
            c.scoring.endpoint.max_cost is not None
            and "judge" in (c.scoring.reward, *c.scoring.weights)
            and not (c.scoring.judge.model and (c.scoring.judge.input_price or c.scoring.judge.output_price))
        ),
        "null, or a price above 0 of a judge at a service, because without one nothing ever costs anything",
    ),
    Rule(
        "training.lora.rank generation.engine",
        lambda c: c.sends_adapters and c.generation.engine == "vllm" and (c.training.lora.rank or 0) > VLLM_RANKS[-1],
        f"at most {VLLM_RANKS[-1]}, the highest rank that vLLM serves",
    ),
    Rule(
        "training.router_replay generation.engine",
        lambda c: c.training.router_replay and c.generation.engine != "transformers",
        "false, or the engine transformers, because no other one records experts",
    ),
    # ---- demonstrations ----
    Rule(
        "training.loss prompts.demonstrations",
        lambda c: (
            ":" not in c.training.loss.name and (c.training.loss.name == "cross_entropy") != c.prompts.demonstrations
        ),
        lambda c: (
            "cross_entropy, because demonstrations have no log-probabilities of a policy that sampled them"
            if c.prompts.demonstrations
            else "a loss with an advantage, because from its own samples alone a policy learns nothing"
        ),
    ),
    Rule(
        "generation.group_size prompts.demonstrations",
        lambda c: (c.generation.group_size == 1) != c.prompts.demonstrations,
        lambda c: (
            "1, the demonstration"
            if c.prompts.demonstrations
            else "at least 2, because advantages compare the responses"
        ),
    ),
    Rule(
        "model.path prompts.demonstrations",
        lambda c: c.model.path is None and c.prompts.demonstrations,
        "the folder of a model, because bootstrap's knows the characters of answers only",
    ),
    Rule(
        "training.distillation.teacher training.loss",
        lambda c: c.training.distillation.teacher is not None and c.training.loss.name == "cross_entropy",
        "null, because cross_entropy ignores advantages, a teacher's too",
    ),
    Rule(
        "training.distillation.coefficient training.distillation.top_k",
        lambda c: not c.training.distillation.coefficient and c.training.distillation.top_k is None,
        "above 0, or the forward KL on a top_k",
    ),
    Rule(
        "training.distillation.forward_coefficient training.distillation.top_k",
        lambda c: c.training.distillation.forward_coefficient != 1 and c.training.distillation.top_k is None,
        "1, or a top_k, whose forward KL it weights",
    ),
    Rule(
        "prompts.where prompts.demonstrations",
        lambda c: c.prompts.where is not None and not c.prompts.demonstrations,
        "null, because only rollouts that are learned are chosen",
    ),
    *_of_samples_only(),
    Rule(
        "environment.max_turns environment.name",
        lambda c: c.environment.name is not None and c.environment.max_turns == 1,
        "at least 2, because with a single turn the policy never reads the environment's answer",
    ),
    Rule(
        "storage.commit_unfinished_seconds environment.name",
        lambda c: (
            c.storage.commit_unfinished_seconds is not None
            and c.environment.name is not None
            and c.pipeline.mode == "async"
        ),
        "null, because an environment's state can't be stored: each commit begins its episodes again, maybe for ever",
    ),
    # ---- learning rate ----
    Rule(
        "training.schedule.steps training.schedule.decay",
        lambda c: c.training.schedule.decay == "constant" and c.training.schedule.steps is not None,
        "linear or cosine, or null steps",
    ),
    Rule(
        "training.schedule.steps training.schedule.decay",
        lambda c: c.training.schedule.decay != "constant" and c.training.schedule.steps is None,
        lambda c: f"the steps that warm-up and decay take, such as training.max_steps, {c.training.max_steps}",
    ),
    Rule(
        "training.schedule.steps training.max_steps",
        lambda c: (c.training.schedule.steps or 0) > c.training.max_steps,
        "a schedule that ends within the run",
    ),
    Rule(
        "training.schedule.warmup_steps training.schedule.steps training.max_steps",
        lambda c: c.training.schedule.warmup_steps >= (c.training.schedule.steps or c.training.max_steps),
        "a warm-up that ends within the schedule, because the decay follows it",
    ),
    Rule(
        "training.schedule.final_share training.schedule.steps training.max_steps",
        lambda c: (
            c.training.schedule.final_share == 0
            and c.training.schedule.steps is not None
            and c.training.schedule.steps < c.training.max_steps
        ),
        "a final share above 0, or the steps after the schedule would change nothing",
    ),
    # ---- objective and selection ----
    Rule(
        "training.selection.drop_zero_advantage training.advantage",
        lambda c: c.training.selection.drop_zero_advantage and c.training.advantage == "reinforce_plus_plus",
        "false, because there a group whose rewards are all equal has an advantage over the batch",
    ),
    Rule(
        "training.selection.overlong_buffer generation.max_new_tokens",
        lambda c: (c.training.selection.overlong_buffer or 0) > c.generation.max_new_tokens,
        "at most max_new_tokens",
    ),
    Rule(
        "training.selection.overlong_buffer training.advantage",
        lambda c: c.training.selection.overlong_buffer is not None and c.training.advantage == "maxrl",
        "null, because maxrl needs rewards of at least 0 and the penalty can make them negative",
    ),
    # ---- staleness ----
    Rule(
        "staleness.control pipeline.mode",
        lambda c: c.staleness.control == "adaptive" and c.pipeline.mode == "sync",
        "fixed, because the bound of sync mode is 0",
    ),
    Rule(
        "staleness.control staleness.max_staleness",
        lambda c: c.staleness.control == "adaptive" and c.staleness.max_staleness < 1,
        "fixed, because the bound has nowhere to go",
    ),
    Rule(
        "staleness.control training.loss",
        lambda c: c.staleness.control == "adaptive" and c.training.loss.name in ("reinforce", "cross_entropy"),
        "a loss with importance ratios, such as aipo, which bound what staleness does to it",
    ),
    Rule(
        "staleness.too_old training.loss",
        lambda c: c.bounds_admission_only and c.training.loss.name == "reinforce",
        "mask, or a loss with importance ratios, such as aipo, which weight the tokens that are too old",
    ),
)
