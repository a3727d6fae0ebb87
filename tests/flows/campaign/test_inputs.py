"""The inputs of a run besides its config: a changed input refuses a resume unless a person accepts it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from configs.load import PRESETS, load_config
from configs.schema import RunConfig
from flows.campaign.inputs import check_same_inputs, run_inputs
from flows.campaign.prepare import check, claim
from millrace.errors import InputError
from millrace.runs.record import latest_attempt
from storage.stores.factory import open_store

ROWS = [{"prompt": f"{n:02d}+{n:02d}=", "answer": f"{2 * n:02d}"} for n in range(40)]
HARD = [{"prompt": f"{n}*{n}=", "answer": str(n * n)} for n in range(20)]
SETTINGS = ("prompts.num_eval=8",)


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "train.jsonl", ROWS)


def configured(source: Path, *settings: str) -> RunConfig:
    root = source.parent / "runs"
    preset = PRESETS / "tiny-cpu.yaml"
    return load_config(preset, [f"prompts.source={source}", f"storage.root={root}", *SETTINGS, *settings])


def start(config: RunConfig, *, resumed: bool = False, accept: bool = False) -> None:
    """Checks and claims the run, as a controller does before the first stage."""
    resume = "required" if resumed else "never"
    inputs = check(config, "mine", resume=resume, accept_changed_inputs=accept)
    claim(config, "mine", resume=resume, inputs=inputs)


def changes(config: RunConfig) -> list[str]:
    return latest_attempt(open_store(f"{config.storage.root}/mine")).changes


def test_a_run_with_changed_prompts_is_not_resumed(source: Path) -> None:
    config = configured(source)
    start(config)
    write(source, ROWS[5:])
    with pytest.raises(InputError) as caught:
        start(config, resumed=True)
    assert f"prompts.source {source} was 40 prompts " in caught.value.read
    assert " and is 35 prompts " in caught.value.read
    assert "--accept-changed-inputs" in str(caught.value.expected)


def test_an_accepted_change_is_recorded_once(source: Path) -> None:
    config = configured(source)
    start(config)
    write(source, ROWS[::-1])
    start(config, resumed=True, accept=True)
    assert [change.partition(" was ")[0] for change in changes(config)] == [f"prompts.source {source}"]
    start(config, resumed=True)
    assert changes(config) == []


def test_a_changed_evaluation_set_refuses_and_a_smaller_one_does_not(source: Path) -> None:
    hard = write(source.parent / "hard.jsonl", HARD)
    config = configured(source, f"evaluation.sets.hard.source={hard}")
    start(config)
    write(hard, HARD[:9])
    with pytest.raises(InputError):
        start(config, resumed=True)
    start(configured(source, f"evaluation.sets.hard.source={hard}", "evaluation.sets.hard.num_prompts=5"), resumed=True)


def test_a_changed_reward_refuses(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    module = source.parent / "changing_reward.py"
    module.write_text("def score(prompt, response, answer, meta):\n    return 1.0\n")
    config = configured(source, "scoring.reward=changing_reward:score")
    start(config)
    module.write_text("def score(prompt, response, answer, meta):\n    return 2.0\n")
    with pytest.raises(InputError):
        start(config, resumed=True)


def test_a_users_loss_changes_with_other_modules_of_its_package(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    package = source.parent / "changing_losses"
    package.mkdir()
    for name in ("__init__", "mine", "helper"):
        (package / f"{name}.py").write_text("")
    config = configured(source, "training.loss=changing_losses.mine:loss")
    former = run_inputs(config, ["train"])
    (package / "helper.py").write_text("weight = 2\n")
    changed = run_inputs(config, ["train"])
    assert former.keys() == changed.keys() == {"training.loss changing_losses.mine:loss"}
    assert former != changed


def test_a_model_changes_with_its_template_and_any_part_of_its_weights(source: Path) -> None:
    folder = source.parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(100 << 20)
    config = configured(source, f"model.path={folder}")
    seen = [run_inputs(config, ["train"])]
    with weights.open("r+b") as file:
        file.seek(60 << 20)
        file.write(b"\1" * (1 << 20))
    seen.append(run_inputs(config, ["train"]))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    seen.append(run_inputs(config, ["train"]))
    (folder / "README.md").write_text("not part of the model")
    assert run_inputs(config, ["train"]) == seen[-1]
    assert len({json.dumps(inputs) for inputs in seen}) == 3


def test_a_changed_teacher_is_noticed_and_a_missing_one_refused(source: Path) -> None:
    folder = source.parent / "expert"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    settings = ["teachers.before.path=start", f"teachers.expert.path={folder}", "training.distillation.teacher=expert"]
    # A teacher of no source would be refused.
    settings += ["sources.sums.weight=1", "sources.words.training.distillation.teacher=before"]
    config = configured(source, *settings)
    key = f"teachers.expert.path {folder}"
    before = run_inputs(config, ["teach"])
    (folder / "config.json").write_text("{ }")
    assert before.keys() == run_inputs(config, ["teach"]).keys() == {key}
    assert run_inputs(config, ["teach"]) != before
    (folder / "config.json").unlink()
    folder.rmdir()
    with pytest.raises(InputError) as caught:
        run_inputs(config, ["teach"])
    assert caught.value.key == "teachers.expert.path"


def test_a_host_reads_only_the_inputs_of_its_stages(source: Path) -> None:
    config = configured(source)
    source.unlink()
    assert list(run_inputs(config, ["score"])) == ["reward exact_match"]
    with pytest.raises(InputError):
        run_inputs(config, ["generate"])


def test_a_host_with_other_prompts_than_the_controller_is_refused(source: Path) -> None:
    config = configured(source)
    start(config)
    attempt = latest_attempt(open_store(f"{config.storage.root}/mine"))
    check_same_inputs(attempt, config, ["generate", "score", "train", "evaluate"])
    write(source, ROWS[1:])
    check_same_inputs(attempt, config, ["score", "train"])
    with pytest.raises(InputError):
        check_same_inputs(attempt, config, ["generate"])


def test_a_host_compares_no_model_that_the_controller_does_not_have(source: Path) -> None:
    config = configured(source)
    start(config)
    attempt = latest_attempt(open_store(f"{config.storage.root}/mine"))
    elsewhere = config.model_copy(update={"model": config.model.model_copy(update={"path": "/of/another/host"})})
    check_same_inputs(attempt, elsewhere, ["generate", "score", "train", "evaluate"])


@pytest.mark.parametrize("key", ["scoring.model", "model.chat_template", "prompts.tools"])
def test_an_input_that_is_not_there_is_refused_where_no_check_reads_it(source: Path, key: str) -> None:
    # Checks of the model read them where it is.
    with pytest.raises(InputError) as caught:
        run_inputs(configured(source, f"{key}={source.parent / 'nowhere'}"), has_model=False)
    assert caught.value.key == key


# --- sources


def mixed(source: Path, *settings: str) -> RunConfig:
    """The run of `configured` with a second source, as a mixture."""
    sources = [f"sources.default.prompts.source={source}", "sources.sums.prompts.source=arithmetic"]
    return configured(source, *sources, *settings)


def test_each_source_has_inputs_of_its_own(source: Path) -> None:
    words = write(source.parent / "words.jsonl", ROWS)
    hard = write(source.parent / "hard.jsonl", HARD)
    settings = [f"sources.words.prompts.source={words}", f"sources.words.evaluation.sets.hard.source={hard}"]
    alone, inputs = run_inputs(configured(source)), run_inputs(mixed(source, *settings))
    assert inputs.items() >= alone.items()
    assert inputs.keys() - alone.keys() == {
        "sources.sums.prompts.source arithmetic",
        f"sources.words.prompts.source {words}",
        f"sources.words.evaluation.sets.hard {hard}, first 256",
    }


def test_a_changed_file_of_one_source_is_named(source: Path) -> None:
    words = write(source.parent / "words.jsonl", ROWS)
    config = mixed(source, f"sources.words.prompts.source={words}")
    start(config)
    write(words, ROWS[5:])
    with pytest.raises(InputError) as caught:
        start(config, resumed=True)
    assert f"sources.words.prompts.source {words}" in caught.value.read


def test_a_run_goes_on_with_an_added_source_and_other_weights_and_records_them(source: Path) -> None:
    start(configured(source, f"sources.default.prompts.source={source}"))
    grown = mixed(source)
    start(grown, resumed=True)
    assert [change.partition(" was ")[0] for change in changes(grown)] == ["sources.sums"]
    start(mixed(source, "sources.sums.weight=3.0"), resumed=True)
    assert changes(grown) == ["sources.sums.weight was not set and is 3.0"]
    with pytest.raises(InputError) as caught:
        start(configured(source), resumed=True)
    assert "sources was" in caught.value.read
