"""The schema: strict, frozen, light, every field described."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.checks.combinations import impossible_combinations
from configs.generation import RESERVED
from configs.schema import RunConfig, dotted_fields
from millrace.generation.engines.vllm.startup import vllm_arguments


def make_config(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"training": {"max_steps": 3}} | sections)


@pytest.mark.parametrize("key", dotted_fields())
def test_every_field_has_a_description(key: str) -> None:
    field = dotted_fields()[key]
    description = field.description or getattr(field.annotation, "__doc__", None)
    assert description
    assert description.rstrip().endswith(".")


def test_the_descriptions_reach_the_json_schema_that_forms_are_made_of() -> None:
    definitions = RunConfig.model_json_schema()["$defs"]
    assert "tokens" in definitions["GenerationConfig"]["properties"]["max_new_tokens"]["description"]


def test_importing_configs_leaves_heavy_packages_and_our_own_out() -> None:
    program = (
        "import sys, configs.load, configs.schema, configs.errors\n"
        "heavy = {'torch', 'vllm', 'prefect', 'transformers', 'millrace', 'storage', 'numpy', 'pyarrow'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_config_can_not_be_changed() -> None:
    config = make_config()
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1


def test_a_config_survives_json() -> None:
    config = make_config(seed=7, generation={"temperature": 1, "top_p": 0.9})
    assert RunConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_a_whole_number_is_taken_where_a_real_one_is_expected() -> None:
    temperature = make_config(generation={"temperature": 2}).generation.temperature
    assert (temperature, type(temperature)) == (2.0, float)


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("seed", "3"),
        ("seed", True),
        ("seed", 3.0),
        ("name", 3),
        ("generation", {"temperature": "1.0"}),
        ("generation", {"temperature": True}),
        ("generation", {"temperature": float("inf")}),
        ("prompts", {"chat": 1}),
        ("prompts", {"chat": "true"}),
    ],
)
def test_nothing_else_is_converted(section: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        make_config(**{section: value})
    assert caught.value.error_count() == 1


@pytest.mark.parametrize("name", ["tiny-cpu", "a", "Run_2.1", "x" * 64])
def test_plain_names_are_taken(name: str) -> None:
    assert make_config(name=name).name == name


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "a b", "a\n", "x" * 65, "é"])
def test_names_that_make_bad_folders_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="letters, digits"):
        make_config(name=name)


def test_sync_mode_trains_on_fresh_rollouts_only_whatever_the_bound_says() -> None:
    bound = {"max_staleness": 4}
    assert make_config(pipeline={"mode": "sync"}, staleness=bound).effective_max_staleness == 0
    assert make_config(pipeline={"mode": "async"}, staleness=bound).effective_max_staleness == 4


def over_hosts(**where: object) -> dict[str, dict[str, object]]:
    """Sections of a trainer of four data ranks over two hosts, changed by `where`."""
    train = {"work_pool": "hosts", "hosts": 2, "network": "10.0.0.0/24"} | where
    return {
        "training": {"max_steps": 3, "parallel": {"data": 4}},
        "weights": {"transport": "store"},
        "placement": {"train": train},
    }


def demonstrated(**changes: dict[str, object]) -> dict[str, object]:
    """Sections of a run that learns demonstrations, changed by `changes`."""
    sections: dict[str, dict[str, object]] = {
        "model": {"path": "model"},
        "prompts": {"source": "shown.jsonl", "demonstrations": True},
        "generation": {"group_size": 1},
        "training": {"max_steps": 3, "loss": "cross_entropy"},
    }
    return {name: {**section, **changes.get(name, {})} for name, section in sections.items()}


def judged(judge: dict[str, object], **scoring: object) -> dict[str, object]:
    """Sections of a run whose judge may cost 1."""
    return {"scoring": {"reward": "judge", "judge": judge, "endpoint": {"url": "http://h", "max_cost": 1}, **scoring}}


IMPOSSIBLE: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "experts": (
        {"training": {"max_steps": 3, "router_replay": True}, "generation": {"engine": "vllm"}},
        ("training.router_replay", "generation.engine"),
    ),
    "the cost of a judge without prices": (
        judged({"model": "large"}),
        ("scoring.endpoint.max_cost", "scoring.judge.input_price", "scoring.judge.output_price"),
    ),
    "the cost of a judge that the scorers load": (
        judged({"input_price": 1}, model="folder"),
        ("scoring.endpoint.max_cost", "scoring.judge.model"),
    ),
    "the cost of http": (
        judged({"model": "large", "input_price": 1}, reward="weighted_sum", weights={"judge": 1, "http": 1}),
        ("scoring.endpoint.max_cost", "scoring.reward"),
    ),
    "rank": (
        {"training": {"max_steps": 3, "lora": {"rank": 513}}, "generation": {"engine": "vllm"}},
        ("training.lora.rank", "generation.engine"),
    ),
    "arithmetic": (
        {"prompts": {"num_eval": 55, "digits": 1}},
        ("prompts.digits", "prompts.num_eval"),
    ),
    "one source": (
        {"prompts": {"source": "a.jsonl", "eval_source": "a.jsonl"}},
        ("prompts.source", "prompts.eval_source"),
    ),
    "a template around sums": (
        {"prompts": {"template": "<{prompt}>"}},
        ("prompts.template",),
    ),
    "a template around chains": (
        {"prompts": {"source": "chains", "template": "<{prompt}>"}},
        ("prompts.template",),
    ),
    "arguments of another task": (
        {"prompts": {"source": "reasoning_gym:gcd", "reasoning_gym": {"config": {"lcm": {}}}}},
        ("prompts.reasoning_gym.config",),
    ),
    "a task's reward for sums": (
        {"scoring": {"reward": "reasoning_gym"}},
        ("scoring.reward",),
    ),
    "an environment's reward for a file": (
        {"scoring": {"reward": "verifiers"}, "prompts": {"source": "verifiers:sums", "eval_source": "a.jsonl"}},
        ("scoring.reward",),
    ),
    "shares": (
        {"generation": {"replicas": 3}},
        ("training.groups_per_step", "generation.replicas"),
    ),
    "minibatches": (
        {"training": {"max_steps": 3, "groups_per_step": 64, "minibatches": 3}},
        ("training.groups_per_step", "training.minibatches"),
    ),
    "a warm-up beyond the run": (
        {"training": {"max_steps": 3, "schedule": {"warmup_steps": 3}}},
        ("training.schedule.warmup_steps", "training.max_steps"),
    ),
    "a schedule longer than the run": (
        {"training": {"max_steps": 3, "schedule": {"decay": "cosine", "steps": 4}}},
        ("training.schedule.steps", "training.max_steps"),
    ),
    "a decay of no length": (
        {"training": {"max_steps": 3, "schedule": {"decay": "linear"}}},
        ("training.schedule.decay", "training.schedule.steps", "training.max_steps"),
    ),
    "a length of no decay": (
        {"training": {"max_steps": 3, "schedule": {"steps": 2}}},
        ("training.schedule.steps", "training.schedule.decay"),
    ),
    "no steps left to decay": (
        {"training": {"max_steps": 3, "schedule": {"decay": "linear", "warmup_steps": 2, "steps": 2}}},
        ("training.schedule.warmup_steps", "training.schedule.steps"),
    ),
    "steps at a rate of 0": (
        {"training": {"max_steps": 3, "schedule": {"decay": "linear", "steps": 2, "final_share": 0}}},
        ("training.schedule.final_share", "training.schedule.steps", "training.max_steps"),
    ),
    "batch": (
        {"generation": {"groups_per_batch": 321}},
        ("generation.groups_per_batch", "training.groups_per_step"),
    ),
    "batch in sync mode": (
        {"generation": {"groups_per_batch": 65}, "pipeline": {"mode": "sync"}},
        ("generation.groups_per_batch", "training.groups_per_step"),
    ),
    "microbatch": (
        {"generation": {"max_new_tokens": 16384}},
        ("generation.max_new_tokens", "training.max_tokens_per_microbatch"),
    ),
    "episodes begun again": (
        {"environment": {"name": "calculator"}, "storage": {"commit_unfinished_seconds": 60.0}},
        ("storage.commit_unfinished_seconds", "environment.name"),
    ),
    "one turn": (
        {"environment": {"name": "calculator", "max_turns": 1}},
        ("environment.name", "environment.max_turns"),
    ),
    "memory of one host": (
        {"storage": {"root": "memory://runs"}, "placement": {"score": {"work_pool": "hosts"}}},
        ("storage.root", "placement.score.work_pool"),
    ),
    "turns that nobody waits for": (
        {"placement": {"colocated": True}},
        ("placement.colocated", "pipeline.mode"),
    ),
    "one device on several hosts": (
        {
            "placement": {"colocated": True, "train": {"work_pool": "hosts"}},
            "pipeline": {"mode": "sync"},
            "weights": {"transport": "store"},
        },
        ("placement.colocated", "placement.train.work_pool"),
    ),
    "two devices": (
        {
            "placement": {"colocated": True},
            "pipeline": {"mode": "sync"},
            "training": {"max_steps": 3, "device": "cuda"},
        },
        ("placement.colocated", "generation.engine", "training.device"),
    ),
    "a wait that looks like a hang": (
        {"weights": {"transport": "direct"}, "supervision": {"hang_seconds": 30}},
        ("weights.deadline_seconds", "supervision.hang_seconds"),
    ),
    "a filter where equal rewards teach": (
        {
            "training": {
                "max_steps": 3,
                "advantage": "reinforce_plus_plus",
                "selection": {"drop_zero_advantage": True},
            }
        },
        ("training.selection.drop_zero_advantage", "training.advantage"),
    ),
    "a buffer longer than a response": (
        {"training": {"max_steps": 3, "selection": {"overlong_buffer": 17}}},
        ("training.selection.overlong_buffer", "generation.max_new_tokens"),
    ),
    "negative rewards for maxrl": (
        {"training": {"max_steps": 3, "advantage": "maxrl", "selection": {"overlong_buffer": 4}}},
        ("training.selection.overlong_buffer", "training.advantage"),
    ),
    "a factor of a task that is not asked": (
        {
            "prompts": {"source": "reasoning_gym:maze"},
            "training": {"max_steps": 3, "selection": {"source_factors": {"maze": 2.0, "chain_sum": 0.5}}},
        },
        ("training.selection.source_factors", "prompts.source"),
    ),
    "shared memory between hosts": (
        {"placement": {"train": {"work_pool": "hosts"}}, "weights": {"transport": "shm"}},
        ("weights.transport", "placement.train.work_pool"),
    ),
    "several hosts without a pool": (
        over_hosts(work_pool=None),
        ("placement.train.hosts", "placement.train.work_pool"),
    ),
    "several hosts that do not know where to meet": (
        over_hosts(network=None),
        ("placement.train.hosts", "placement.train.network"),
    ),
    "data ranks that the hosts can't share evenly": (
        over_hosts(hosts=3, network="10.0.0.0/24"),
        ("placement.train.hosts", "training.parallel.data"),
    ),
    "replicas of unequal sizes": (
        {"training": {"max_steps": 3, "parallel": {"data": 4, "shard": 3}}},
        ("training.parallel.shard", "training.parallel.data"),
    ),
    "more hosts at least than there are": (
        over_hosts(min_hosts=3),
        ("placement.train.hosts", "placement.train.min_hosts"),
    ),
    "adaptive control without a choice": (
        {"staleness": {"control": "adaptive", "max_staleness": 0}},
        ("staleness.control", "staleness.max_staleness"),
    ),
    "adaptive control of nothing": (
        {"staleness": {"control": "adaptive"}, "pipeline": {"mode": "sync"}},
        ("staleness.control", "pipeline.mode"),
    ),
    "an evaluation of a source that does not exist": (
        {"sources": {"sums": {}, "chains": {}}, "evaluation": {"weights": {"sums": 2.0, "chess": 1.0}}},
        ("evaluation.weights", "chess"),
    ),
    "a source with the name of the figure over all": ({"sources": {"held_out": {}}}, ("sources.held_out",)),
    "cross-entropy on a policy's own samples": (
        {"training": {"max_steps": 3, "loss": "cross_entropy"}},
        ("training.loss", "prompts.demonstrations"),
    ),
    "a group of one to compare": (
        {"generation": {"group_size": 1}},
        ("generation.group_size", "prompts.demonstrations"),
    ),
    "several equal demonstrations": (
        demonstrated(generation={"group_size": 2}),
        ("generation.group_size", "prompts.demonstrations"),
    ),
    "a ratio to whoever wrote a demonstration": (
        demonstrated(training={"loss": "aipo"}),
        ("training.loss", "prompts.demonstrations"),
    ),
    "demonstrations that a temperature sampled": (
        demonstrated(generation={"temperature": 0.5}),
        ("generation.temperature", "prompts.demonstrations"),
    ),
    "a mask by the ratio to whoever wrote a demonstration": (
        demonstrated(training={"masks": {"max_kl": 1.0}}),
        ("training.masks.max_kl", "prompts.demonstrations"),
    ),
    "demonstrations for a model to be made": (
        demonstrated(model={"path": None}),
        ("model.path", "prompts.demonstrations"),
    ),
    "a teacher of demonstrations": (
        {
            **demonstrated(training={"distillation": {"teacher": "expert"}}),
            "teachers": {"expert": {"path": "start"}},
        },
        ("training.distillation.teacher", "training.loss"),
    ),
    "a choice of rollouts that are not learned": (
        {"prompts": {"where": "reward >= 1"}},
        ("prompts.where", "prompts.demonstrations"),
    ),
    "adaptive control without ratios": (
        {"staleness": {"control": "adaptive", "too_old": "mask"}, "training": {"max_steps": 3, "loss": "reinforce"}},
        ("staleness.control", "training.loss"),
    ),
    "old tokens that are kept without ratios": (
        {"training": {"max_steps": 3, "loss": "reinforce"}},
        ("staleness.too_old", "training.loss"),
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_an_impossible_combination_names_every_key(case: str) -> None:
    sections, keys = IMPOSSIBLE[case]
    with pytest.raises(ValidationError) as caught:
        make_config(**sections)
    [error] = caught.value.errors()
    [mistake] = error["ctx"]["error"].mistakes
    assert mistake.key in keys
    assert mistake.expected
    assert [key for key in keys if key not in str(mistake)] == []


def test_adaptive_control_scales_the_learning_rate_by_the_effective_sample_size() -> None:
    config = make_config(staleness={"control": "adaptive"})
    assert config.effective_training.schedule.ess_scaling
    assert not config.training.schedule.ess_scaling


@pytest.mark.parametrize(
    "sections",
    [
        {"prompts": {"eval_source": "held.jsonl", "num_eval": 1}},
        judged({"model": "large", "output_price": 1}),
        {"sources": {"judged": judged({"model": "large", "input_price": 1}), "sums": {}}},
        {"prompts": {"source": "a.jsonl", "template": "<{prompt}>"}},
        demonstrated(prompts={"source": "runs/mine", "where": "reward >= 1"}),
        demonstrated(training={"loss": "my_losses:gentle"}),
        {**demonstrated(), "scoring": {"reward": "reasoning_gym"}},
        {
            "model": {"path": "model"},
            "sources": {
                "sums": {},
                "shown": {
                    "prompts": {"source": "shown.jsonl", "demonstrations": True},
                    "generation": {"group_size": 1},
                    "training": {"loss": "cross_entropy"},
                },
            },
        },
        {
            "scoring": {"reward": "reasoning_gym"},
            "prompts": {
                "source": "reasoning_gym:gcd,lcm",
                "eval_source": "reasoning_gym:products",
                "reasoning_gym": {"config": {"lcm": {}, "products": {}}},
            },
        },
        {"training": {"max_steps": 3, "schedule": {"decay": "linear", "steps": 3, "final_share": 0}}},
        {"training": {"max_steps": 3, "schedule": {"decay": "cosine", "warmup_steps": 1, "steps": 2}}},
        {"training": {"max_steps": 3, "minibatches": 64, "epochs": 3}},
        {"placement": {"score": {"work_pool": "hosts"}}},
        {"placement": {"train": {"work_pool": "hosts"}}, "weights": {"transport": "store"}},
        over_hosts(),
        over_hosts(hosts=4, min_hosts=4, network="127.0.0.0/8"),
        {"prompts": {"source": "a.parquet", "digits": 1}},
        {"prompts": {"num_eval": 54, "digits": 1}},
        {"generation": {"replicas": 64, "groups_per_batch": 320, "max_new_tokens": 16383}},
        {"staleness": {"max_staleness": 0}},
        {"environment": {"max_turns": 1}},
        {"placement": {"colocated": True}, "pipeline": {"mode": "sync"}},
        {"placement": {"colocated": True, "score": {"work_pool": "hosts"}}, "pipeline": {"mode": "sync"}},
        {
            "placement": {"colocated": True},
            "pipeline": {"mode": "sync"},
            "generation": {"engine": "vllm"},
            "training": {"max_steps": 3, "device": "cuda"},
        },
        over_hosts() | {"weights": {"transport": "direct"}},
    ],
)
def test_what_only_looks_impossible_is_taken(sections: dict[str, object]) -> None:
    assert list(impossible_combinations(make_config(**sections))) == []


@pytest.mark.parametrize("network", ["10.0.0.1/24", "10.0.0.0/33", "eth0", "fd00::/8"])
def test_the_trainer_s_network_is_written_as_networks_are(network: str) -> None:
    with pytest.raises(ValidationError, match=r"an IPv4 network such as 10\.0\.0\.0/24"):
        make_config(**over_hosts(network=network))


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_what_millrace_sets_of_vllms_arguments_a_person_can_not(name: str) -> None:
    with pytest.raises(ValidationError, match="1 validation error"):
        make_config(generation={"engine": "vllm", "engine_args": {name: 1}})


def test_speculative_decoding_may_not_change_the_distribution() -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 2}
    make_config(generation={"engine": "vllm", "engine_args": {"speculative_config": speculative}})
    synthetic = {**speculative, "rejection_sample_method": "synthetic"}
    with pytest.raises(ValidationError, match="samples from another distribution than the policy's"):
        make_config(generation={"engine": "vllm", "engine_args": {"speculative_config": synthetic}})


def test_all_that_millrace_sets_of_vllms_arguments_is_refused_to_a_person() -> None:
    user = dict.fromkeys(vllm_arguments(Path("policy"), dtype="float32", engine_args={}), "the user's")
    arguments = vllm_arguments(Path("policy"), dtype="float32", engine_args=user)
    assert {"model", "dtype", "logprobs_mode"} <= RESERVED
    assert {name for name, value in arguments.items() if value != "the user's"} <= RESERVED


@pytest.mark.parametrize("template", ["Solve this.", "{prompt} {prompt}", ""])
def test_a_template_has_one_place_for_the_prompt(template: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make_config(prompts={"source": "a.jsonl", "template": template})
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("transport", "rank", "adapters"),
    [("shm", 12, True), ("store", 12, True), ("direct", 12, False), ("shm", None, False)],
)
def test_vllm_gets_a_slot_for_each_version_in_flight_and_the_next(
    transport: str, rank: int | None, adapters: bool
) -> None:
    config = make_config(
        training={"max_steps": 3, "lora": {"rank": rank, "target_modules": ["q_proj"]}},
        generation={"engine": "vllm"},
        weights={"transport": transport},
        staleness={"max_staleness": 3},
    )
    assert config.sends_adapters == adapters
    expected = {
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras": 5,
        "max_cpu_loras": 5,
        "lora_target_modules": ["q_proj"],
    }
    assert config.vllm_adapter_arguments == (expected if adapters else {})
