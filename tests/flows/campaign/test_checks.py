"""Checks of a campaign before it starts, and the config of the short form."""

import json
import typing
from pathlib import Path

import pytest
from support.campaigns.campaigns import start_model

from configs.errors import ConfigError
from configs.load import PRESETS, load_config
from configs.schema import RunConfig
from configs.stored import changed_keys
from flows.campaign.from_preset import Preset, preset_config
from flows.campaign.prepare import check, check_on_host, claim, stored_values
from millrace.errors import InputError, PromptsError, RunExists, RunMissing
from millrace.runs.record import latest_attempt

PRESET = PRESETS / "tiny-cpu.yaml"
ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(20)]
FUNCTIONS = "tests.support.training.own_functions"


@pytest.mark.parametrize(
    "settings",
    [
        ["scoring.reward=telepathy"],
        ["scoring.reward=tests.support.rewards.nowhere:f"],
        ["scoring.reward=reward_model", "scoring.model=/no/such/model"],
        ["training.loss=my.nowhere:f"],
        [f"training.advantage={FUNCTIONS}:one_group"],
    ],
)
def test_an_unusable_function_is_a_user_error(tmp_path: Path, settings: list[str]) -> None:
    config = load_config(PRESET, [*settings, f"storage.root={tmp_path / 'runs'}"])
    with pytest.raises(InputError):
        check(config, "run", resume="never")
    assert not (tmp_path / "runs").exists()


def test_a_users_functions_pass_the_check(tmp_path: Path) -> None:
    settings = ["scoring.reward=tests.support.rewards.own_rewards:length"]
    settings += [f"training.loss={FUNCTIONS}:capped", f"training.advantage={FUNCTIONS}:better_than_half"]
    check(load_config(PRESET, [*settings, f"storage.root={tmp_path / 'runs'}"]), "run", resume="never")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"id": "own"}], ids=["no id", "an id"])
@pytest.mark.parametrize(
    "settings", [["scoring.reward=math"], ["scoring.reward=weighted_sum", "scoring.weights.math=1"]]
)
def test_a_prompt_with_an_unusable_answer_is_named(tmp_path: Path, settings: list[str], more: dict[str, str]) -> None:
    rows = [*ROWS, {"prompt": "Why?", "answer": "I don't know", **more}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    root = tmp_path / "runs"
    sources = [f"prompts.source={file}", "prompts.num_eval=2", f"storage.root={root}"]
    with pytest.raises(PromptsError) as caught:
        check(load_config(PRESET, [*settings, *sources]), "run", resume="never")
    assert caught.value.file == f"prompt {more.get('id', 'prompts.jsonl:21')} of prompts.jsonl"
    assert not root.exists()


# --- sources


def mixture(root: Path, *settings: str) -> RunConfig:
    """Sums by rule and words from a file."""
    file = root / "words.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS))
    sources = [f"sources.words.prompts.source={file}", "sources.words.prompts.num_eval=2", "sources.sums.weight=2"]
    return load_config(PRESET, [*sources, f"storage.root={root / 'runs'}", *settings])


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("scoring.reward=telepathy", "sources.words.scoring.reward"),
        ("scoring.reward=tests.support.rewards.nowhere:f", "sources.words.scoring.reward"),
        ("environment.name=tests.support.nowhere:Game", "sources.words.environment.name"),
        ("prompts.system_prompt=Be brief.", "sources.words.prompts.system_prompt"),
    ],
)
def test_an_unusable_part_of_one_source_is_named(tmp_path: Path, setting: str, key: str) -> None:
    with pytest.raises(InputError) as caught:
        check(mixture(tmp_path, f"sources.words.{setting}"), "run", resume="never")
    assert caught.value.key == key
    assert not (tmp_path / "runs").exists()


def test_a_source_without_prompts_left_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptsError) as caught:
        check(mixture(tmp_path, "sources.words.prompts.num_eval=20"), "run", resume="never")
    assert str(caught.value.file).startswith("source words: ")
    assert len(str(caught.value).splitlines()) == 1


def test_an_evaluation_set_of_a_source_is_checked_too(tmp_path: Path) -> None:
    config = mixture(tmp_path, "sources.words.evaluation.sets.hard.source=/no/such/file.jsonl")
    with pytest.raises(InputError) as caught:
        check(config, "run", resume="never")
    assert "words" in str(caught.value)


def test_a_mixture_passes_the_check(tmp_path: Path) -> None:
    settings = ["sources.words.scoring.reward=tests.support.rewards.own_rewards:length"]
    check(mixture(tmp_path, *settings, "sources.sums.environment.name=calculator"), "run", resume="never")


ELSEWHERE = [
    "generation.engine=vllm",
    "generation.engine_args.max_modellen=64",
    "training.device=cuda",
    "model.path=/of/another/host",
    "weights.transport=store",
    "promotion.margin=0",
    *(f"placement.{stage}.work_pool=gpus" for stage in ("generate", "score", "train", "evaluate")),
]


def refusal(root: Path, *settings: str) -> InputError:
    with pytest.raises(InputError) as caught:
        check(load_config(PRESET, [*ELSEWHERE, *settings, f"storage.root={root}"]), "run", resume="never")
    return caught.value


def test_a_controller_needs_no_gpu_vllm_or_model_for_stages_of_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All checks before that of the pools have passed.
    monkeypatch.setattr("flows.campaign.remote_stages.check_pools", lambda jobs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check(load_config(PRESET, [*ELSEWHERE, f"storage.root={tmp_path}"]), "run", resume="never")


def test_a_stage_on_the_controllers_host_needs_the_model_there(tmp_path: Path) -> None:
    assert refusal(tmp_path, "placement.score.work_pool=null").key == "model.path"


def test_a_host_checks_the_model_that_the_controller_does_not_have() -> None:
    config = load_config(PRESET, ELSEWHERE)
    with pytest.raises(InputError) as caught:
        check_on_host(config, [("train", 0)], {})
    assert caught.value.key == "model.path"
    check_on_host(config, [("train", 0)], {"model.path /of/another/host": "files 0123"})


@pytest.mark.vllm
def test_a_host_checks_vllm_for_its_generator() -> None:
    config = load_config(PRESET, [*ELSEWHERE, f"model.path={start_model()}"])
    with pytest.raises(InputError) as caught:
        check_on_host(config, [("generate", 0)], {f"model.path {start_model()}": "files 0123"})
    assert caught.value.key == "generation.engine_args.max_modellen"


def test_too_few_gpus_are_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.device_leases.host_devices", lambda: ("0", "1"))
    settings = ["training.device=cuda", "training.parallel.data=3", f"storage.root={tmp_path / 'runs'}"]
    with pytest.raises(InputError) as caught:
        check(load_config(PRESET, settings), "run", resume="never")
    assert "3 trainer ranks = 3 GPUs" in caught.value.read
    assert not (tmp_path / "runs").exists()


def test_a_model_that_a_gpu_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.campaign.prepare.query_gpus", lambda field: ["1 MiB", "81559 MiB"])
    monkeypatch.setattr("tasks.device_leases.host_devices", lambda: ("0", "1"))
    settings = ["training.device=cuda", f"model.path={start_model()}", f"storage.root={tmp_path / 'runs'}"]
    with pytest.raises(InputError) as caught:
        check(load_config(PRESET, settings), "run", resume="never")
    assert "a trainer's GPU" in caught.value.read
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("preset", typing.get_args(Preset))
def test_an_empty_form_is_the_preset(preset: Preset) -> None:
    assert preset_config(preset, {"name": None, "model.path": None}, []) == load_config(PRESETS / f"{preset}.yaml")


def test_the_form_offers_every_preset() -> None:
    assert set(typing.get_args(Preset)) == {file.stem for file in PRESETS.glob("*.yaml")}


def test_fields_change_the_preset_and_advanced_wins_over_them() -> None:
    fields = {"name": "mine", "training.max_steps": 7, "training.learning_rate": 1e-05, "scoring.reward": None}
    config = preset_config("tiny-cpu", fields, ["training.max_steps=9", "storage.root=s3://bucket/runs"])
    assert (config.name, config.training.max_steps, config.training.learning_rate) == ("mine", 9, 1e-05)
    assert config.storage.root == "s3://bucket/runs"


def test_a_wrong_setting_of_the_form_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        preset_config("tiny-cpu", {}, ["training.max_stepz=9"])
    assert (caught.value.file, caught.value.key) == ("the form", "training.max_stepz")


# --- the record of a start


def test_a_start_with_the_same_config_changes_no_setting_and_records_its_command(tmp_path: Path) -> None:
    config = load_config(PRESET, [f"storage.root={tmp_path}", "weights.transport=auto"])
    command = "millrace run tiny-cpu.yaml --run-id run --resume"
    store, first = claim(config, "run", resume="never", inputs={}, command=command)
    _, second = claim(config, "run", resume="required", inputs={}, command=command)
    assert changed_keys(first.config, stored_values(config)) == second.changes == []
    assert latest_attempt(store).origin.command == command


# --- the order of checks


def never() -> None:
    pytest.fail("a check that only reads files came after the start of other processes")


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (["prompts.source={file}", "prompts.prompt_field=question"], {"key": "question", "read": "missing"}),
        (["prompts.source={folder}/row.jsonl"], {"read": "no such file", "expected": "rows.jsonl in {folder}"}),
        (["model.path={model}", "generation.max_new_tokens=2000"], {"file": "prompt rows.jsonl:1"}),
        (["model.path={model}s"], {"key": "model.path"}),
        (["scoring.reward=telepathy"], {"key": "scoring.reward"}),
    ],
)
def test_mistakes_in_files_are_found_before_anything_is_started(
    tmp_path: Path, settings: list[str], fields: dict[str, str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a" * 10_000, "answer": "b"}) + '\n{"prompt": "c", "answer": "d"}')
    places = {"file": str(file), "folder": str(tmp_path), "model": str(start_model())}
    settings = [f"prompts.source={file}", "prompts.num_eval=1", f"storage.root={tmp_path}", *settings]
    config = load_config(PRESET, [setting.format(**places) for setting in settings])
    with pytest.raises(InputError) as caught:
        check(config, "run", resume="never", start=never)
    found = caught.value.fields()
    assert {name: found[name] for name in fields} == {name: text.format(**places) for name, text in fields.items()}


def test_a_run_that_exists_or_is_missing_is_found_before_anything_is_started(tmp_path: Path) -> None:
    config = load_config(PRESET, [f"storage.root={tmp_path}"])
    with pytest.raises(RunMissing):
        check(config, "run", resume="required", start=never)
    claim(config, "run", resume="never", inputs={})
    with pytest.raises(RunExists):
        check(config, "run", resume="never", start=never)
    with pytest.raises(InputError):
        check(load_config(PRESET, [f"storage.root={tmp_path}", "seed=5"]), "run", resume="latest", start=never)
