"""Settings that are valid alone but not together. Each message names both keys in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from configs.learning.staleness import impossible_control
from configs.operation.weights import weight_combinations

if TYPE_CHECKING:
    from configs.schema import RunConfig


def impossible_combinations(config: RunConfig) -> Iterator[str]:
    """Yield one sentence for each pair of settings in `config` that can't be combined."""
    yield from _model(config)
    yield from _prompts(config)
    yield from _groups(config)
    yield from _schedule(config)
    yield from _selection(config)
    yield from _engine(config)
    yield from _experts(config)
    yield from _environment(config)
    yield from _scoring(config)
    yield from _placement(config)
    yield from _hosts_of_the_trainer(config)
    yield from _colocation(config)
    yield from weight_combinations(config)
    yield from impossible_control(config)


def _model(config: RunConfig) -> Iterator[str]:
    shape = config.model.bootstrap
    # Rotary embeddings rotate a head's features in pairs, so each head needs an even number.
    if config.model.path is None and shape.hidden_size % (2 * shape.num_heads):
        yield (
            f"model.bootstrap.hidden_size is {shape.hidden_size} and model.bootstrap.num_heads is {shape.num_heads}; "
            "expected hidden_size to be an even multiple of num_heads"
        )


def _prompts(config: RunConfig) -> Iterator[str]:
    prompts, num_prompts = config.prompts, config.evaluation.num_prompts
    named = [one.source for one in config.evaluation.sets.values()]
    sources = [source for source in (prompts.source, prompts.eval_source, *named) if source is not None]
    yield from _listed_prompts(config, sources)
    built_in = next((source for source in sources if source in ("arithmetic", "chains")), None)
    if prompts.template is not None and prompts.chat:
        yield (
            "prompts.template is set and prompts.chat is true; expected null, because a conversation is written in the "
            "model's own template"
        )
    if prompts.template is not None and built_in is not None:
        yield (
            f"prompts.template is set and prompts are from {built_in}; "
            "expected null, because demonstrations of the built-in prompts have no template"
        )
    if "chains" in sources and prompts.chains.median_sums > prompts.chains.max_sums:
        yield (
            f"prompts.chains.median_sums is {prompts.chains.median_sums:g} and prompts.chains.max_sums is "
            f"{prompts.chains.max_sums}; expected median_sums to be at most max_sums"
        )
    if prompts.eval_source is not None:
        if prompts.eval_source == prompts.source:
            yield (
                f'prompts.source and prompts.eval_source are both "{prompts.source}"; '
                "expected different prompts, or a null eval_source to hold prompts.num_eval of them out"
            )
        return
    if num_prompts > prompts.num_eval:
        yield (
            f"evaluation.num_prompts is {num_prompts} and prompts.num_eval is {prompts.num_eval}; "
            "expected num_prompts to be at most num_eval"
        )
    if prompts.source != "arithmetic":
        return
    digits, max_sum = prompts.arithmetic.digits, prompts.arithmetic.max_sum
    num_problems = _num_sums(digits, max_sum)
    if num_problems <= prompts.num_eval:
        yield (
            f"prompts.arithmetic.digits {digits} and prompts.arithmetic.max_sum {max_sum} make {num_problems} problems "
            f"and prompts.num_eval is {prompts.num_eval}; expected more problems than num_eval"
        )


def _listed_prompts(config: RunConfig, sources: list[str]) -> Iterator[str]:
    scoring = config.scoring
    asked = [source.partition(":")[2] for source in sources if source.startswith("reasoning_gym:")]
    tasks = ",".join(asked).split(",")
    for task in config.prompts.reasoning_gym.config:
        if task not in tasks:
            yield (
                f"prompts.reasoning_gym.config has arguments of {task} and prompts are from {' and '.join(sources)}; "
                f"expected arguments of a task in use, reasoning_gym:{task}"
            )
    # These rewards look up the data set entry of the prompt.
    for reward in {scoring.reward, *scoring.weights} & {"reasoning_gym", "verifiers"}:
        for source in sources:
            if not source.startswith(f"{reward}:"):
                yield f"the reward is {reward} and prompts are from {source}; expected prompts made by {reward}"


def _groups(config: RunConfig) -> Iterator[str]:
    generation, training = config.generation, config.training
    if training.groups_per_step % generation.replicas:
        yield (
            f"training.groups_per_step is {training.groups_per_step} and generation.replicas is {generation.replicas}; "
            "expected groups_per_step to be a multiple of replicas, so that all generators make equally many groups"
        )
    if training.groups_per_step % training.minibatches:
        yield (
            f"training.groups_per_step is {training.groups_per_step} and training.minibatches is "
            f"{training.minibatches}; expected minibatches to divide groups_per_step"
        )
    # More are never on their way to the trainer, so the other places would stay empty.
    admitted = (config.effective_max_staleness + 1) * training.groups_per_step
    if generation.groups_per_batch > admitted:
        yield (
            f"generation.groups_per_batch is {generation.groups_per_batch} and training.groups_per_step is "
            f"{training.groups_per_step}; expected groups_per_batch to be at most {admitted}, the groups that a "
            f"staleness of up to {config.effective_max_staleness} allows"
        )
    if generation.max_new_tokens >= training.max_tokens_per_microbatch:
        yield (
            f"generation.max_new_tokens is {generation.max_new_tokens} and training.max_tokens_per_microbatch is "
            f"{training.max_tokens_per_microbatch}; expected a microbatch to hold at least one prompt with its response"
        )


def _schedule(config: RunConfig) -> Iterator[str]:
    training, schedule = config.training, config.training.schedule
    if schedule.decay == "constant":
        if schedule.steps is not None:
            yield (
                f"training.schedule.steps is {schedule.steps} and training.schedule.decay is constant; expected linear "
                "or cosine, or null steps"
            )
        if schedule.warmup_steps >= training.max_steps:
            yield (
                f"training.schedule.warmup_steps is {schedule.warmup_steps} and training.max_steps is "
                f"{training.max_steps}; expected a warm-up that ends within the run"
            )
    elif schedule.steps is None:
        yield (
            f"training.schedule.decay is {schedule.decay} and training.schedule.steps is null; expected the number of "
            f"steps that warm-up and decay take, such as training.max_steps, {training.max_steps}"
        )
    elif schedule.warmup_steps >= schedule.steps:
        yield (
            f"training.schedule.warmup_steps is {schedule.warmup_steps} and training.schedule.steps is "
            f"{schedule.steps}; expected fewer steps of warm-up, because the decay follows it"
        )
    elif schedule.steps > training.max_steps:
        yield (
            f"training.schedule.steps is {schedule.steps} and training.max_steps is {training.max_steps}; expected a "
            "schedule that ends within the run"
        )
    elif schedule.final_share == 0 and schedule.steps < training.max_steps:
        yield (
            f"training.schedule.final_share is 0 and training.schedule.steps, {schedule.steps}, is below "
            f"training.max_steps, {training.max_steps}; expected a final share above 0, or the steps after the "
            "schedule would change nothing"
        )


def _selection(config: RunConfig) -> Iterator[str]:
    training, overlong = config.training, config.training.selection.overlong
    if training.selection.drop_zero_advantage and training.advantage == "reinforce_plus_plus":
        yield (
            "training.selection.drop_zero_advantage is true and training.advantage is reinforce_plus_plus; expected "
            "false, because there a group whose rewards are all equal has an advantage over the batch"
        )
    if overlong.buffer_tokens is not None and overlong.buffer_tokens > config.generation.max_new_tokens:
        yield (
            f"training.selection.overlong.buffer_tokens is {overlong.buffer_tokens} and generation.max_new_tokens is "
            f"{config.generation.max_new_tokens}; expected at most max_new_tokens"
        )
    if overlong.buffer_tokens is not None and training.advantage == "maxrl":
        yield (
            f"training.selection.overlong.buffer_tokens is {overlong.buffer_tokens} and training.advantage is maxrl; "
            "expected null, because maxrl needs rewards of at least 0 and the punishment can make them negative"
        )
    package, _, tasks = config.prompts.source.partition(":")
    known = tasks.split(",") if package == "reasoning_gym" else []
    for task in training.selection.source_factors:
        if task not in known:
            yield (
                f"training.selection.source_factors has a factor of {task} and prompts.source is "
                f'"{config.prompts.source}"; expected a task in use, reasoning_gym:{task}'
            )


def _engine(config: RunConfig) -> Iterator[str]:
    generation = config.generation
    if generation.engine != "vllm" and generation.engine_args:
        yield (
            f"generation.engine is {generation.engine} and generation.engine_args has "
            f"{', '.join(generation.engine_args)}; expected no arguments, or the engine vllm"
        )


def _experts(config: RunConfig) -> Iterator[str]:
    if config.training.router_replay and config.generation.engine == "vllm":
        yield (
            "training.router_replay is true and generation.engine is vllm, which does not record experts; expected "
            "false, or transformers"
        )


def _environment(config: RunConfig) -> Iterator[str]:
    environment = config.environment
    if environment.name is not None and environment.max_turns == 1:
        yield (
            f'environment.name is "{environment.name}" and environment.max_turns is 1; '
            "expected at least 2, because with a single turn the policy never reads the environment's answer"
        )


def _scoring(config: RunConfig) -> Iterator[str]:
    scoring = config.scoring
    # Unused settings are allowed, so that a stored run can be scored again with only `scoring.reward` changed.
    for reward, key, value, expected in (
        ("python", "function", scoring.function, "package.module:function"),
        ("reward_model", "model", scoring.model, "the folder of a reward model"),
        ("weighted_sum", "weights", scoring.weights or None, "a weight for each reward to add"),
    ):
        if reward in (scoring.reward, *scoring.weights) and value is None:
            yield f"scoring.reward is {scoring.reward} and scoring.{key} is missing; expected {expected}"


def _num_sums(digits: int, max_sum: int) -> int:
    """Count the ordered pairs of numbers below 10**digits whose sum is at most `max_sum`."""
    limit = 10**digits
    return sum(min(limit, max_sum - a + 1) for a in range(min(limit, max_sum + 1)))


def _placement(config: RunConfig) -> Iterator[str]:
    placement = config.placement
    placed = {
        f"placement.{stage}.work_pool": place.work_pool
        for stage, place in (
            ("generate", placement.generate),
            ("score", placement.score),
            ("train", placement.train),
            ("evaluate", placement.evaluate),
        )
        if place.work_pool is not None
    }
    if not placed:
        return
    key, pool = next(iter(placed.items()))
    if config.storage.root.startswith("memory:"):
        yield (
            f'storage.root is "{config.storage.root}" and {key} is "{pool}"; '
            "expected a root that other hosts can reach, such as s3://bucket/prefix or a shared folder"
        )
    # Scorers and the evaluation read the store alone.
    key = next((key for key in placed if ".score." not in key and ".evaluate." not in key), "")
    if key and config.weights.transport == "shm":
        yield (
            f'weights.transport is "shm" and {key} is "{placed[key]}"; '
            "expected direct or store, because generators and trainer may be on different hosts"
        )


def _hosts_of_the_trainer(config: RunConfig) -> Iterator[str]:
    where, data = config.placement.train, config.training.parallel.data
    if where.hosts == 1:
        return
    hosts = f"placement.train.hosts is {where.hosts}"
    if where.work_pool is None:
        yield f"{hosts} and placement.train.work_pool is null; expected a work pool, whose workers start the ranks"
    if where.network is None:
        yield (
            f"{hosts} and placement.train.network is null; "
            "expected the network in which they reach each other, such as 10.0.0.0/24"
        )
    if data % where.hosts:
        yield (
            f"{hosts} and training.parallel.data is {data}; "
            "expected a multiple of the hosts, because each host has the same number of data ranks"
        )
    if where.min_hosts is not None and where.min_hosts > where.hosts:
        yield f"{hosts} and placement.train.min_hosts is {where.min_hosts}; expected at most the number of hosts"


def _colocation(config: RunConfig) -> Iterator[str]:
    placement, engine, device = config.placement, config.generation.engine, config.training.device
    if not placement.colocated:
        return
    if config.pipeline.mode != "sync":
        yield (
            f'placement.colocated is true and pipeline.mode is "{config.pipeline.mode}"; '
            "expected sync, because in async mode trainer and generators never wait for each other"
        )
    for key, place in (("generate", placement.generate), ("train", placement.train)):
        if place.work_pool is not None:
            yield (
                f'placement.colocated is true and placement.{key}.work_pool is "{place.work_pool}"; '
                "expected null, because jobs of a pool may be on different hosts"
            )
    # transformers generates on the CPU. vLLM can only sleep on a GPU.
    if (engine, device) not in {("transformers", "cpu"), ("vllm", "cuda")}:
        yield (
            f'placement.colocated is true, generation.engine is "{engine}" and training.device is "{device}"; '
            "expected the engine vllm with cuda, or transformers with cpu, so that both use the same device"
        )
