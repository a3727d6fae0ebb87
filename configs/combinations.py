"""Settings that are valid alone but not together. Each mistake names both keys."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network
from typing import TYPE_CHECKING

from configs.errors import UserError

if TYPE_CHECKING:
    from configs.schema import RunConfig


def impossible_combinations(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each pair of settings in `config` that can't be combined."""
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
    yield from _weights(config)
    yield from _control(config)


def _model(config: RunConfig) -> Iterator[UserError]:
    shape = config.model.bootstrap
    # Rotary embeddings rotate a head's features in pairs, so each head needs an even number.
    if config.model.path is None and shape.hidden_size % (2 * shape.num_heads):
        yield UserError(
            key="model.bootstrap.hidden_size",
            read=f"{shape.hidden_size} and model.bootstrap.num_heads is {shape.num_heads}",
            expected="hidden_size to be an even multiple of num_heads",
        )


def _prompts(config: RunConfig) -> Iterator[UserError]:
    prompts, num_prompts = config.prompts, config.evaluation.num_prompts
    named = [one.source for one in config.evaluation.sets.values()]
    sources = [source for source in (prompts.source, prompts.eval_source, *named) if source is not None]
    yield from _listed_prompts(config, sources)
    built_in = next((source for source in sources if source in ("arithmetic", "chains")), None)
    if prompts.template is not None and prompts.chat:
        yield UserError(
            key="prompts.template",
            read="set and prompts.chat is true",
            expected="null, because a conversation is written in the model's own template",
        )
    if prompts.template is not None and built_in is not None:
        yield UserError(
            key="prompts.template",
            read=f"set and prompts are from {built_in}",
            expected="null, because demonstrations of the built-in prompts have no template",
        )
    if "chains" in sources and prompts.chains.median_sums > prompts.chains.max_sums:
        yield UserError(
            key="prompts.chains.median_sums",
            read=f"{prompts.chains.median_sums:g} and prompts.chains.max_sums is {prompts.chains.max_sums}",
            expected="median_sums to be at most max_sums",
        )
    if prompts.eval_source is not None:
        if prompts.eval_source == prompts.source:
            yield UserError(
                key="prompts.eval_source",
                read=f'"{prompts.source}", like prompts.source',
                expected="different prompts, or a null eval_source to hold prompts.num_eval of them out",
            )
        return
    if num_prompts > prompts.num_eval:
        yield UserError(
            key="evaluation.num_prompts",
            read=f"{num_prompts} and prompts.num_eval is {prompts.num_eval}",
            expected="num_prompts to be at most num_eval",
        )
    if prompts.source != "arithmetic":
        return
    digits, max_sum = prompts.arithmetic.digits, prompts.arithmetic.max_sum
    num_problems = _num_sums(digits, max_sum)
    if num_problems <= prompts.num_eval:
        yield UserError(
            key="prompts.num_eval",
            read=(
                f"{prompts.num_eval}, and prompts.arithmetic.digits {digits} and prompts.arithmetic.max_sum {max_sum} "
                f"make {num_problems} problems"
            ),
            expected="more problems than num_eval",
        )


def _listed_prompts(config: RunConfig, sources: list[str]) -> Iterator[UserError]:
    scoring = config.scoring
    asked = [source.partition(":")[2] for source in sources if source.startswith("reasoning_gym:")]
    tasks = ",".join(asked).split(",")
    for task in config.prompts.reasoning_gym.config:
        if task not in tasks:
            yield UserError(
                key="prompts.reasoning_gym.config",
                read=f"arguments of {task} and prompts are from {' and '.join(sources)}",
                expected=f"arguments of a task in use, reasoning_gym:{task}",
            )
    # These rewards look up the data set entry of the prompt.
    for reward in {scoring.reward, *scoring.weights} & {"reasoning_gym", "verifiers"}:
        for source in sources:
            if not source.startswith(f"{reward}:"):
                yield UserError(
                    key="scoring.reward",
                    read=f"{reward} and prompts are from {source}",
                    expected=f"prompts made by {reward}",
                )


def _groups(config: RunConfig) -> Iterator[UserError]:
    generation, training = config.generation, config.training
    if training.groups_per_step % generation.replicas:
        yield UserError(
            key="training.groups_per_step",
            read=f"{training.groups_per_step} and generation.replicas is {generation.replicas}",
            expected="groups_per_step to be a multiple of replicas, so that all generators make equally many groups",
        )
    if training.groups_per_step % training.minibatches:
        yield UserError(
            key="training.minibatches",
            read=f"{training.minibatches} and training.groups_per_step is {training.groups_per_step}",
            expected="minibatches to divide groups_per_step",
        )
    # More are never on their way to the trainer, so the other places would stay empty.
    admitted = (config.effective_max_staleness + 1) * training.groups_per_step
    if generation.groups_per_batch > admitted:
        yield UserError(
            key="generation.groups_per_batch",
            read=f"{generation.groups_per_batch} and training.groups_per_step is {training.groups_per_step}",
            expected=(
                f"groups_per_batch to be at most {admitted}, the groups that a staleness of up to "
                f"{config.effective_max_staleness} allows"
            ),
        )
    if generation.max_new_tokens >= training.max_tokens_per_microbatch:
        microbatch = training.max_tokens_per_microbatch
        yield UserError(
            key="generation.max_new_tokens",
            read=f"{generation.max_new_tokens} and training.max_tokens_per_microbatch is {microbatch}",
            expected="a microbatch to hold at least one prompt with its response",
        )


def _schedule(config: RunConfig) -> Iterator[UserError]:
    training, schedule = config.training, config.training.schedule
    if schedule.decay == "constant":
        if schedule.steps is not None:
            yield UserError(
                key="training.schedule.steps",
                read=f"{schedule.steps} and training.schedule.decay is constant",
                expected="linear or cosine, or null steps",
            )
        if schedule.warmup_steps >= training.max_steps:
            yield UserError(
                key="training.schedule.warmup_steps",
                read=f"{schedule.warmup_steps} and training.max_steps is {training.max_steps}",
                expected="a warm-up that ends within the run",
            )
    elif schedule.steps is None:
        yield UserError(
            key="training.schedule.steps",
            read=f"null and training.schedule.decay is {schedule.decay}",
            expected=(
                f"the number of steps that warm-up and decay take, such as training.max_steps, {training.max_steps}"
            ),
        )
    elif schedule.warmup_steps >= schedule.steps:
        yield UserError(
            key="training.schedule.warmup_steps",
            read=f"{schedule.warmup_steps} and training.schedule.steps is {schedule.steps}",
            expected="fewer steps of warm-up, because the decay follows it",
        )
    elif schedule.steps > training.max_steps:
        yield UserError(
            key="training.schedule.steps",
            read=f"{schedule.steps} and training.max_steps is {training.max_steps}",
            expected="a schedule that ends within the run",
        )
    elif schedule.final_share == 0 and schedule.steps < training.max_steps:
        yield UserError(
            key="training.schedule.final_share",
            read=f"0 and training.schedule.steps, {schedule.steps}, is below training.max_steps, {training.max_steps}",
            expected="a final share above 0, or the steps after the schedule would change nothing",
        )


def _selection(config: RunConfig) -> Iterator[UserError]:
    training, buffer = config.training, config.training.selection.overlong_buffer
    if training.selection.drop_zero_advantage and training.advantage == "reinforce_plus_plus":
        yield UserError(
            key="training.selection.drop_zero_advantage",
            read="true and training.advantage is reinforce_plus_plus",
            expected="false, because there a group whose rewards are all equal has an advantage over the batch",
        )
    if buffer is not None and buffer > config.generation.max_new_tokens:
        yield UserError(
            key="training.selection.overlong_buffer",
            read=f"{buffer} and generation.max_new_tokens is {config.generation.max_new_tokens}",
            expected="at most max_new_tokens",
        )
    if buffer is not None and training.advantage == "maxrl":
        yield UserError(
            key="training.selection.overlong_buffer",
            read=f"{buffer} and training.advantage is maxrl",
            expected="null, because maxrl needs rewards of at least 0 and the punishment can make them negative",
        )
    package, _, tasks = config.prompts.source.partition(":")
    known = tasks.split(",") if package == "reasoning_gym" else []
    for task in training.selection.source_factors:
        if task not in known:
            yield UserError(
                key="training.selection.source_factors",
                read=f'a factor of {task} and prompts.source is "{config.prompts.source}"',
                expected=f"a task in use, reasoning_gym:{task}",
            )


def _engine(config: RunConfig) -> Iterator[UserError]:
    generation = config.generation
    if generation.engine != "vllm" and generation.engine_args:
        yield UserError(
            key="generation.engine_args",
            read=f"{', '.join(generation.engine_args)} and generation.engine is {generation.engine}",
            expected="no arguments, or the engine vllm",
        )


def _experts(config: RunConfig) -> Iterator[UserError]:
    if config.training.router_replay and config.generation.engine == "vllm":
        yield UserError(
            key="training.router_replay",
            read="true and generation.engine is vllm, which does not record experts",
            expected="false, or transformers",
        )


def _environment(config: RunConfig) -> Iterator[UserError]:
    environment = config.environment
    if environment.name is not None and environment.max_turns == 1:
        yield UserError(
            key="environment.max_turns",
            read=f'1 and environment.name is "{environment.name}"',
            expected="at least 2, because with a single turn the policy never reads the environment's answer",
        )


def _scoring(config: RunConfig) -> Iterator[UserError]:
    scoring = config.scoring
    # Unused settings are allowed, so that a stored run can be scored again with only `scoring.reward` changed.
    for reward, key, value, expected in (
        ("python", "function", scoring.function, "package.module:function"),
        ("reward_model", "model", scoring.model, "the folder of a reward model"),
        ("weighted_sum", "weights", scoring.weights or None, "a weight for each reward to add"),
    ):
        if reward in (scoring.reward, *scoring.weights) and value is None:
            yield UserError(
                key=f"scoring.{key}", read=f"missing and scoring.reward is {scoring.reward}", expected=expected
            )


def _num_sums(digits: int, max_sum: int) -> int:
    """Count the ordered pairs of numbers below 10**digits whose sum is at most `max_sum`."""
    limit = 10**digits
    return sum(min(limit, max_sum - a + 1) for a in range(min(limit, max_sum + 1)))


def _placement(config: RunConfig) -> Iterator[UserError]:
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
        yield UserError(
            key="storage.root",
            read=f'"{config.storage.root}" and {key} is "{pool}"',
            expected="a root that other hosts can reach, such as s3://bucket/prefix or a shared folder",
        )
    # Scorers and the evaluation read the store alone.
    key = next((key for key in placed if ".score." not in key and ".evaluate." not in key), "")
    if key and config.weights.transport == "shm":
        yield UserError(
            key="weights.transport",
            read=f'"shm" and {key} is "{placed[key]}"',
            expected="direct or store, because generators and trainer may be on different hosts",
        )


def _hosts_of_the_trainer(config: RunConfig) -> Iterator[UserError]:
    where, data = config.placement.train, config.training.parallel.data
    if where.hosts == 1:
        return
    hosts = f"placement.train.hosts is {where.hosts}"
    if where.work_pool is None:
        yield UserError(
            key="placement.train.work_pool",
            read=f"null and {hosts}",
            expected="a work pool, whose workers start the ranks",
        )
    if where.network is None:
        yield UserError(
            key="placement.train.network",
            read=f"null and {hosts}",
            expected="the network in which they reach each other, such as 10.0.0.0/24",
        )
    if data % where.hosts:
        yield UserError(
            key="training.parallel.data",
            read=f"{data} and {hosts}",
            expected="a multiple of the hosts, because each host has the same number of data ranks",
        )
    if where.min_hosts is not None and where.min_hosts > where.hosts:
        yield UserError(
            key="placement.train.min_hosts",
            read=f"{where.min_hosts} and {hosts}",
            expected="at most the number of hosts",
        )


def _colocation(config: RunConfig) -> Iterator[UserError]:
    placement, engine, device = config.placement, config.generation.engine, config.training.device
    if not placement.colocated:
        return
    if config.pipeline.mode != "sync":
        yield UserError(
            key="placement.colocated",
            read=f'true and pipeline.mode is "{config.pipeline.mode}"',
            expected="sync, because in async mode trainer and generators never wait for each other",
        )
    for key, place in (("generate", placement.generate), ("train", placement.train)):
        if place.work_pool is not None:
            yield UserError(
                key=f"placement.{key}.work_pool",
                read=f'"{place.work_pool}" and placement.colocated is true',
                expected="null, because jobs of a pool may be on different hosts",
            )
    # transformers generates on the CPU. vLLM can only sleep on a GPU.
    if (engine, device) not in {("transformers", "cpu"), ("vllm", "cuda")}:
        yield UserError(
            key="placement.colocated",
            read=f'true, generation.engine is "{engine}" and training.device is "{device}"',
            expected="the engine vllm with cuda, or transformers with cpu, so that both use the same device",
        )


def _weights(config: RunConfig) -> Iterator[UserError]:
    if config.weights.transport != "direct":
        return
    # A push that waits for a frozen generator reports no progress.
    deadline, hang = config.weights.deadline_seconds, config.supervision.hang_seconds
    if deadline >= hang:
        yield UserError(
            key="weights.deadline_seconds",
            read=f"{deadline:g} and supervision.hang_seconds is {hang:g}",
            expected="a shorter deadline, or sync_weights would count as hung while it waits for a generator",
        )
    where, host = config.placement.train, config.weights.host
    if where.hosts > 1 and where.network is not None and "/" not in host and not IPv4Network(where.network).is_loopback:
        yield UserError(
            key="weights.host",
            read=f"{host} and placement.train.hosts is {where.hosts}",
            expected=f"a network such as {where.network}, because sync_weights may run on any of these hosts",
        )


def _control(config: RunConfig) -> Iterator[UserError]:
    staleness = config.staleness
    if staleness.ess_floor >= staleness.ess_target:
        yield UserError(
            key="staleness.ess_floor",
            read=f"{staleness.ess_floor:g} and staleness.ess_target is {staleness.ess_target:g}",
            expected="ess_floor to be less than ess_target",
        )
    if staleness.control != "adaptive":
        return
    if config.pipeline.mode == "sync":
        yield UserError(
            key="staleness.control",
            read="adaptive and pipeline.mode is sync, which has a bound of 0",
            expected="control to be fixed",
        )
    if staleness.min_staleness > staleness.max_staleness:
        yield UserError(
            key="staleness.min_staleness",
            read=f"{staleness.min_staleness} and staleness.max_staleness is {staleness.max_staleness}",
            expected="min_staleness to be at most max_staleness",
        )
    if config.training.loss.name == "reinforce":
        yield UserError(
            key="staleness.control",
            read=(
                "adaptive and training.loss is reinforce, which has no importance ratios and suffers from staleness "
                "that they don't bound"
            ),
            expected="another loss, such as aipo",
        )
