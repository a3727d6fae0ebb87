"""The identity of a config, and settings that may change when a run is resumed."""

import pytest

from configs.load import IMMUTABLE_ON_RESUME, changed_immutably
from configs.schema import RunConfig, dotted_fields
from configs.section import is_section
from configs.stored import config_hash


def make_config(**sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate(sections | {"training": {"max_steps": 3} | sections.get("training", {})})


def test_the_hash_is_the_same_for_the_same_config_and_another_for_another() -> None:
    configs = (make_config(), *(make_config(generation={"temperature": value}) for value in (1, 1.1)))
    base, same, other = (config_hash(config.model_dump(mode="json")) for config in configs)
    assert len(base) == 64
    assert same == base
    assert other != base


def test_a_changed_learning_rate_is_named_with_both_values() -> None:
    assert changed_immutably(make_config(), make_config(training={"learning_rate": 0.001})) == [
        "training.learning_rate was 0.0002 and is 0.001; expected a resumed run to keep it"
    ]


def test_every_change_that_matters_is_named() -> None:
    after = make_config(generation={"replicas": 2}, model={"path": "folder"}, prompts={"digits": 3})
    changes = changed_immutably(make_config(), after)
    assert [change.split(" ")[0] for change in changes] == [
        "generation.replicas",
        "model.path",
        "prompts.digits",
    ]


def test_an_engine_and_its_arguments_stay_as_what_a_rollout_means_may_hang_on_them() -> None:
    previous = make_config(generation={"engine": "vllm", "engine_args": {"max_model_len": 64}})
    after = make_config(generation={"engine": "vllm", "engine_args": {"max_model_len": 64, "quantization": "fp8"}})
    assert changed_immutably(previous, previous) == []
    assert changed_immutably(previous, after) == [
        'generation.engine_args was {"max_model_len": 64} and is {"max_model_len": 64, "quantization": "fp8"}; '
        "expected a resumed run to keep it"
    ]
    [change, *_] = changed_immutably(make_config(), make_config(generation={"engine": "vllm"}))
    assert change.startswith("generation.engine was")


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"max_steps": 9}},
        {"training": {"checkpoint_every": 9, "checkpoint_keep": 2}},
        {"training": {"threads": 9}},
        {"scoring": {"workers": 9}},
        {"training": {"parallel": {"data": 4, "tensor": 2}, "device": "cuda", "compute_dtype": "float32"}},
        {"training": {"activation_checkpointing": True, "max_tokens_per_microbatch": 99}},
        {"training": {"compile": True, "optimizer_offload": True}},
        {"training": {"selection": {"drop_zero_advantage": True}}},
        {"weights": {"transport": "store", "deadline_seconds": 1}},
        {"storage": {"root": "elsewhere", "commit_max_ms": 0}},
        {"evaluation": {"samples": 9, "every": None, "stop_after": 3}},
        {"promotion": {"margin": None}, "budget": {"max_steps": 9}, "supervision": {"hang_seconds": 9}},
        {"placement": {"score": {"work_pool": "hosts"}}, "staleness": {"too_old": "drop"}},
    ],
)
def test_a_resumed_run_may_go_on_longer_faster_and_elsewhere(change: dict[str, dict[str, object]]) -> None:
    assert changed_immutably(make_config(), make_config(**change)) == []


def test_a_new_setting_is_immutable_until_listed_as_free() -> None:
    leaves = {key for key, field in dotted_fields().items() if not is_section(field.annotation)}
    assert leaves > IMMUTABLE_ON_RESUME
    assert {key for key in leaves if key.startswith(("model.", "prompts.", "environment."))} <= IMMUTABLE_ON_RESUME
    free_of_training = {key for key in leaves - IMMUTABLE_ON_RESUME if key.startswith("training.")}
    assert free_of_training == {
        "training.max_steps",
        "training.on_collapse",
        "training.checkpoint_every",
        "training.checkpoint_keep",
        "training.parallel.data",
        "training.parallel.shard",
        "training.parallel.tensor",
        "training.device",
        "training.activation_checkpointing",
        "training.compile",
        "training.optimizer_offload",
        "training.max_tokens_per_microbatch",
        "training.selection.drop_zero_advantage",
        "training.threads",
    }
