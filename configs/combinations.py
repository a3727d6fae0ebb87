"""Settings that are valid alone but not together. Each mistake names both keys.

A rule is a line of the table: the keys, when they contradict each other, and what would be right. The first key is the
one to change. Its value is shown, then the others':

    generation.engine_args is {"max_model_len": 64} and generation.engine is "transformers"; expected no arguments, …
"""

import json
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.errors import UserError
from configs.generation import VLLM_RANKS
from configs.operation import LIVE, SHARDED, data_parallel, one_gpu
from configs.stored import DEFAULT_SOURCE
from configs.task import HELD_OUT

if TYPE_CHECKING:
    from configs.schema import RunConfig

_LONGEST_SHOWN = 80
_BUILT_IN = ("arithmetic", "chains")


class Rule(NamedTuple):
    """Settings that can't be combined."""

    keys: str
    """Dotted keys, separated by blanks; the one to change is first."""
    is_broken: Callable[["RunConfig"], bool]
    expected: str | Callable[["RunConfig"], str]
    """A right value of the first key, and why."""


def impossible_combinations(config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each rule that `config`, or a source of it, breaks."""
    mistakes: dict[tuple[str | None, str], UserError] = {}
    for name, of_source in config.by_source().items():
        for mistake in (*_broken(_RULES, config, name, of_source), *_rewards_without_entries(config, name, of_source)):
            # Sources that inherit the same keys break a rule alike.
            mistakes[mistake.key, mistake.read] = mistake
    yield from mistakes.values()
    yield from _broken(_RULES_OF_ALL, config, DEFAULT_SOURCE, config)
    yield from _unasked_tasks(config)
    yield from _half_schedules(config)
    yield from _penalties_without_reference(config)
    yield from _wrong_names(config)
    yield from _wrong_teachers(config)


def _broken(rules: Sequence[Rule], run: "RunConfig", source: str, config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each of the rules that `config`, of this source, breaks."""
    for rule in rules:
        if rule.is_broken(config):
            key, *contradicted = rule.keys.split()
            read = " and ".join(
                [
                    _shown(config, key),
                    *(f"{_where_set(run, source, other)} is {_shown(config, other)}" for other in contradicted),
                ]
            )
            expected = rule.expected if isinstance(rule.expected, str) else rule.expected(config)
            yield UserError(key=_where_set(run, source, key), read=read, expected=expected)


def _where_set(run: "RunConfig", source: str, key: str) -> str:
    """The name of the key whose value the source has: its own, or the run's that it inherits."""
    section, name, *_ = *key.split("."), ""
    own = getattr(run.sources.get(source), section, None)
    return f"sources.{source}.{key}" if own is not None and name in own.model_fields_set else key


def _penalties_without_reference(config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each source with a KL penalty in a run that loads no reference policy."""
    for name, source in config.by_source().items():
        if source.training.kl.coefficient and not config.training.kl.coefficient:
            expected = "0, or a training.kl.coefficient above 0: without it the run loads no reference policy"
            key = f"sources.{name}.training.kl.coefficient"
            yield UserError(key=key, read=str(source.training.kl.coefficient), expected=expected)


def _wrong_names(config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each name of a source that contradicts the run's other settings."""
    names = config.by_source().keys()
    for name in config.evaluation.weights:
        if name not in names:
            expected = f"sources of the run: {', '.join(names)}"
            yield UserError(key="evaluation.weights", read=f"set for {name}, which is not a source", expected=expected)
    own = [source.scoring.replicas for source in config.sources.values()]
    if config.sources and None not in own:
        expected = "null for one source at least, because the run's own scorers need work"
        yield UserError(
            key=f"sources.{next(iter(config.sources))}.scoring.replicas", read=str(own[0]), expected=expected
        )
    if HELD_OUT in config.sources:
        expected = "another name, because results of evaluations name the accuracy over all sources so"
        yield UserError(key=f"sources.{HELD_OUT}", read="a source", expected=expected)


def _wrong_teachers(config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each teacher that is used and not there, or there and not used."""
    used: set[str] = set()
    for name, source in config.by_source().items():
        if (teacher := source.training.distillation.teacher) is None:
            continue
        used.add(teacher)
        if teacher not in config.teachers:
            expected = (
                f"one of {', '.join(config.teachers)}" if config.teachers else "a teacher of the section teachers"
            )
            key = _where_set(config, name, "training.distillation.teacher")
            yield UserError(key=key, read=json.dumps(teacher), expected=expected)
    for name in config.teachers.keys() - used:
        expected = "a source with it as training.distillation.teacher, or no such teacher"
        yield UserError(key=f"teachers.{name}", read="a teacher of no source", expected=expected)


def _shown(config: "RunConfig", key: str) -> str:
    value: Any = attrgetter(key)(config)
    text = json.dumps(getattr(value, "name", value), ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def _sources(config: "RunConfig") -> list[str]:
    """Where a source of the run has all its prompts from."""
    prompts, sets = config.prompts, config.evaluation.sets.values()
    return [prompts.source, *filter(None, [prompts.eval_source]), *(each.source for each in sets)]


def _unasked_tasks(config: "RunConfig") -> Iterator[UserError]:
    """Settings by task of `reasoning_gym` whose task no prompt of any source is from."""
    configs = config.by_source().values()
    training_only = [each.prompts.source for each in configs]
    evaluation_too = [source for each in configs for source in _sources(each)]
    arguments = {task for each in configs for task in each.prompts.reasoning_gym.config}
    for key, names, sources in (
        ("prompts.reasoning_gym.config", arguments, evaluation_too),
        ("training.selection.source_factors", config.training.selection.source_factors, training_only),
    ):
        lists = (source.removeprefix("reasoning_gym:") for source in sources if source.startswith("reasoning_gym:"))
        for task in set(names) - set(",".join(lists).split(",")):
            yield UserError(
                key=key,
                read=f"set for {task} and prompts.source is {' and '.join(map(json.dumps, training_only))}",
                expected=f"a task in use, reasoning_gym:{task}",
            )


def _half_schedules(config: "RunConfig") -> Iterator[UserError]:
    """Weights of sources that would change at no time, or to no weight."""
    for name, source in config.sources.items():
        for key, other in (("final_weight", "weight_steps"), ("weight_steps", "final_weight")):
            if getattr(source, key) is None and getattr(source, other) is not None:
                yield UserError(
                    key=f"sources.{name}.{other}",
                    read=f"{getattr(source, other)} and sources.{name}.{key} is null",
                    expected=f"{key} with it, or null for both",
                )


def _rewards_without_entries(run: "RunConfig", name: str, config: "RunConfig") -> Iterator[UserError]:
    # These look up the prompt's entry in the data set.
    for reward in {config.scoring.reward, *config.scoring.weights} & {"reasoning_gym", "verifiers"}:
        # A stored run keeps the source of each prompt.
        for source in () if config.prompts.demonstrations else _sources(config):
            if not source.startswith(f"{reward}:"):
                yield UserError(
                    key=_where_set(run, name, "scoring.reward"),
                    read=f'"{reward}" and prompts are from {source}',
                    expected=f"prompts made by {reward}",
                )


def _most_groups(config: "RunConfig") -> int:
    """Groups that the staleness bound admits. More are never on their way to the trainer."""
    return (config.effective_max_staleness + 1) * config.training.groups_per_step


def _num_sums(digits: int) -> int:
    """Count the pairs of numbers of up to `digits` digits whose sum has no more digits."""
    limit: int = 10**digits
    return limit * (limit + 1) // 2


def _demonstrates(config: "RunConfig") -> bool:
    return config.generation.engine == "demonstrations"


def _of_samples_only() -> Iterator[Rule]:
    """Yield a rule for each setting that has a meaning only where a policy samples the responses."""
    for key, without in (
        ("generation.temperature", 1.0),
        ("generation.top_p", 1.0),
        ("generation.top_k", None),
        ("prompts.curriculum_window", None),
        ("training.selection.drop_zero_advantage", False),
        ("training.schedule.ess_scaling", False),
        ("training.kl.importance_weighted", False),
        *((f"training.masks.{name}", None) for name in ("min_token_ratio", "max_token_ratio")),
        *((f"training.masks.{name}", None) for name in ("max_kl", "max_kl_negative")),
    ):
        yield Rule(
            f"{key} generation.engine",
            lambda c, get=attrgetter(key), without=without: _demonstrates(c) and get(c) != without,  # type: ignore[misc]
            f"{json.dumps(without)}, because no policy samples demonstrations",
        )


def _pool_rules(
    stages: Sequence[str], keys: str, is_broken: Callable[["RunConfig"], bool], expected: str
) -> Iterator[Rule]:
    """Yield a rule for each of `stages`, broken if a work pool starts it and the config `is_broken`."""
    for stage in stages:
        pool = attrgetter(f"placement.{stage}.work_pool")
        yield Rule(keys.format(stage=stage), lambda c, pool=pool: pool(c) is not None and is_broken(c), expected)  # type: ignore[misc]


_RULES = (
    Rule(
        "prompts.template prompts.chat",
        lambda c: c.prompts.template is not None and c.prompts.chat,
        "null, because a conversation is written in the model's own template",
    ),
    Rule(
        "prompts.template prompts.source",
        lambda c: c.prompts.template is not None and any(source in _BUILT_IN for source in _sources(c)),
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
        "prompts.demonstrations generation.engine",
        lambda c: c.prompts.demonstrations != _demonstrates(c),
        lambda c: "true with this engine" if _demonstrates(c) else "false, or the engine demonstrations",
    ),
    Rule(
        "training.loss generation.engine",
        lambda c: ":" not in c.training.loss.name and (c.training.loss.name == "cross_entropy") != _demonstrates(c),
        lambda c: (
            "cross_entropy, because demonstrations have no log-probabilities of a policy that sampled them"
            if _demonstrates(c)
            else "a loss with an advantage, or the engine demonstrations: on its own samples a policy learns nothing"
        ),
    ),
    Rule(
        "generation.group_size generation.engine",
        lambda c: (c.generation.group_size == 1) != _demonstrates(c),
        lambda c: (
            "1, the demonstration" if _demonstrates(c) else "at least 2, because advantages compare the responses"
        ),
    ),
    Rule(
        "model.path generation.engine",
        lambda c: c.model.path is None and _demonstrates(c),
        "the folder of a model, because bootstrap's knows the characters of answers only",
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
    # ---- hosts ----
    *_pool_rules(
        ("generate", "score", "teach", "train", "evaluate"),
        "storage.root placement.{stage}.work_pool",
        lambda c: c.storage.root.startswith("memory:"),
        "a root that other hosts can reach, such as s3://bucket/prefix or a shared folder",
    ),
    # Scorers, teachers and the evaluation read the store alone.
    *_pool_rules(
        ("generate", "train"),
        "weights.transport placement.{stage}.work_pool",
        lambda c: c.weights.transport == "shm",
        "direct or store, because generators and trainer may be on different hosts",
    ),
    Rule(
        "placement.train.work_pool placement.train.hosts",
        lambda c: c.placement.train.hosts > 1 and c.placement.train.work_pool is None,
        "a work pool, whose workers start the ranks",
    ),
    Rule(
        "placement.train.network placement.train.hosts",
        lambda c: c.placement.train.hosts > 1 and c.placement.train.network is None,
        "the network in which they reach each other, such as 10.0.0.0/24",
    ),
    Rule(
        "training.parallel.data placement.train.hosts",
        lambda c: c.training.parallel.data % c.placement.train.hosts != 0,
        "a multiple of the hosts, because each host has the same number of data ranks",
    ),
    Rule(
        "training.parallel.shard training.parallel.data",
        lambda c: c.training.parallel.data % (c.training.parallel.shard or 1) != 0,
        "a divisor of the data ranks, because each group of them holds the whole model",
    ),
    Rule(
        "placement.train.min_hosts placement.train.hosts",
        lambda c: c.placement.train.hosts > 1 and (c.placement.train.min_hosts or 0) > c.placement.train.hosts,
        "at most the number of hosts",
    ),
    Rule(
        "placement.colocated pipeline.mode",
        lambda c: c.placement.colocated and c.pipeline.mode != "sync",
        "sync, because in async mode trainer and generators never wait for each other",
    ),
    *_pool_rules(
        ("generate", "train"),
        "placement.{stage}.work_pool placement.colocated",
        lambda c: c.placement.colocated,
        "null, because jobs of a pool may be on different hosts",
    ),
    Rule(
        "placement.train.devices training.device",
        lambda c: c.placement.train.devices is not None and c.training.device == "cpu",
        "null, because the trainer uses no GPU, or the device cuda",
    ),
    Rule(
        "placement.generate.devices generation.engine",
        lambda c: c.placement.generate.devices is not None and c.generation.engine != "vllm",
        "null, because it generates on the CPU, or the engine vllm",
    ),
    Rule(
        "placement.generate.devices placement.train.devices placement.colocated",
        lambda c: (
            c.placement.colocated
            and None not in (c.placement.generate.devices, c.placement.train.devices)
            and c.placement.generate.devices != c.placement.train.devices
        ),
        "the same GPUs, or null for one of them, because trainer and generators take turns on the same",
    ),
    Rule(
        "placement.colocated generation.engine training.device",
        # transformers generates on the CPU. vLLM can only sleep on a GPU.
        lambda c: (
            c.placement.colocated
            and (c.generation.engine, c.training.device) not in {("transformers", "cpu"), ("vllm", "cuda")}
        ),
        "the engine vllm with cuda, or transformers with cpu, so that both use the same device",
    ),
    # ---- weights and staleness ----
    Rule(
        "weights.transport generation.engine",
        lambda c: c.weights.transport in LIVE and c.generation.engine != "vllm",
        "auto, because only vLLM receives weights in its workers",
    ),
    Rule(
        "weights.transport training.device",
        lambda c: c.weights.transport in LIVE and (c.weights.transport == "gloo") != (c.training.device == "cpu"),
        "gloo with a trainer on the CPU, or nccl_m2n, nccl or ipc with one on GPUs",
    ),
    Rule(
        "weights.transport generation.engine_args",
        lambda c: c.weights.transport in LIVE and data_parallel(c),
        "generation.replicas in place of data_parallel_size, or auto",
    ),
    Rule(
        "weights.transport placement.colocated",
        lambda c: (
            c.weights.transport in LIVE
            and not (
                c.placement.colocated and one_gpu(c) if c.weights.transport == "ipc" else not c.placement.colocated
            )
        ),
        "ipc if trainer and a single generator share one GPU; nccl allows one process per GPU",
    ),
    Rule(
        "weights.deadline_seconds supervision.hang_seconds",
        # A push that waits for a frozen generator reports no progress.
        lambda c: c.effective_weights.transport in SHARDED and c.weights.deadline_seconds >= c.supervision.hang_seconds,
        "a shorter deadline, or sync_weights would count as hung while it waits for a generator",
    ),
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
        "a loss with importance ratios, such as aipo, which weight the tokens that are too old",
    ),
)

_RULES_OF_ALL = (
    *(
        Rule(
            f"placement.{stage}.devices scoring.reward scoring.device",
            lambda c, stage=stage: (  # type: ignore[misc]
                getattr(c.placement, stage).devices is not None
                and not (c.loads_scoring_model and c.scoring.device == "cuda")
            ),
            "null, because only a model that scorers load with the device cuda uses a GPU",
        )
        for stage in ("score", "evaluate")
    ),
    Rule(
        "placement.teach.devices",
        lambda c: c.placement.teach.devices is not None and all(each.device == "cpu" for each in c.teachers.values()),
        "null, because no teacher has the device cuda",
    ),
)
"""Rules about the whole run, which one source can't break."""
