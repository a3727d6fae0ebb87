"""A checkpoint becomes a Hugging Face folder with exactly the same policy, or nothing appears."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from support.campaigns.command import run_command
from support.training.rank_files import rank_files
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from configs.schema import ModelConfig, RunConfig
from configs.training import TrainingConfig
from millrace.bootstrap.tiny_model import character_tokenizer
from millrace.errors import InputError, ModelFolderError, RunMissing
from millrace.evaluation.results import write_result
from millrace.runs.record import create_run
from millrace.training.checkpoints.files import Block, lone_files
from millrace.training.checkpoints.names import MODEL, weights_checksum
from millrace.training.checkpoints.policy_state import policy_state
from millrace.training.lora import add_adapters
from storage.checkpoints import CheckpointWriter, stored_checkpoints
from storage.errors import StreamCorrupt
from storage.stores.local import LocalStore

TOKENIZER = character_tokenizer(["0123456789+="])


def make_model(seed: int, hidden_size: int = 16) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=hidden_size,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


class Run:
    """A run with its start model in another folder."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder / "run")
        self.start = folder / "start"
        make_model(seed=0).save_pretrained(self.start)
        TOKENIZER.save_pretrained(self.start)
        self.store = LocalStore(folder / "run")
        config = RunConfig(training=TrainingConfig(max_steps=9), model=ModelConfig(path=str(self.start)))
        create_run(self.store, "run", config.model_dump(mode="json"))

    def commit(self, version: int, files: dict[str, bytes]) -> None:
        CheckpointWriter(self.store).commit(version, files, {})

    def commit_model(self, version: int, model: PreTrainedModel) -> None:
        """Commits the files of a trainer with one rank."""
        self.commit(version, lone_files({MODEL: {name: weight.detach() for name, weight in model.named_parameters()}}))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def export(run_url: str, *words: str) -> str:
    """Output of the command."""
    code, output = run_command("export", run_url, *words)
    assert code == 0
    return output


def logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = model.eval()(torch.tensor([tokens])).logits
    return values


def assert_same_policy(folder: Path, model: PreTrainedModel) -> None:
    tokens = AutoTokenizer.from_pretrained(folder, local_files_only=True)("1+2=")["input_ids"]
    exported = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert torch.equal(logits(exported, tokens), logits(model, tokens))


def test_a_version_is_exported_completely(run: Run, tmp_path: Path) -> None:
    models = {version: make_model(seed=version) for version in (3, 6)}
    for version, model in models.items():
        run.commit_model(version, model)
    folder = tmp_path / "deep" / "model"
    assert export(run.url, "--to", str(folder), "--version", "3") == f"version 3; written to {folder}\n"
    assert_same_policy(folder, models[3])
    names = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert names <= {file.name for file in folder.iterdir()}
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "the same people can read all of them"
    assert [file.name for file in folder.parent.iterdir()] == ["model"], "no temporary folder is left"
    (tmp_path / "empty").mkdir()
    export(run.url, "--to", str(tmp_path / "empty"))
    assert_same_policy(tmp_path / "empty", models[6])


def test_files_of_several_ranks_are_exported_whole(run: Run, tmp_path: Path) -> None:
    model = make_model(seed=4)
    blocks: list[dict[str, Block]] = [{}, {}]
    for name, parameter in model.named_parameters():
        first, second = parameter.detach().tensor_split(2)
        blocks[0][name] = Block(first, (0,) * first.dim())
        blocks[1][name] = Block(second, (len(first), *(0,) * (first.dim() - 1)))
    run.commit(4, rank_files(MODEL, blocks))
    export(run.url, "--to", str(tmp_path / "model"))
    assert_same_policy(tmp_path / "model", model)


def test_adapters_are_exported_merged_and_for_peft(run: Run, tmp_path: Path) -> None:
    adapted = AutoModelForCausalLM.from_pretrained(run.start)
    add_adapters(adapted, rank=2, alpha=4.0, target_modules=["q_proj", "v_proj"])
    parameters = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.normal_()
    state = policy_state(parameters, torch.optim.AdamW(parameters.values()), lora_scaling=2.0)
    run.commit(5, lone_files(state))
    export(run.url, "--to", str(tmp_path / "model"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = TOKENIZER("1+2=")["input_ids"]
    assert torch.allclose(logits(exported, tokens), logits(adapted, tokens), atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(run.start)
    assert not torch.allclose(logits(exported, tokens), logits(base, tokens), atol=1e-2)
    with_adapter = PeftModel.from_pretrained(base, str(tmp_path / "model/adapter"))
    assert torch.allclose(logits(with_adapter, tokens), logits(adapted, tokens), atol=1e-5)


def test_a_missing_version_run_or_free_folder_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunMissing):
        export(str(tmp_path / "none"), "--to", str(tmp_path / "model"))
    with pytest.raises(InputError):
        export(run.url, "--to", str(tmp_path / "model"))
    for version in (3, 6):
        run.commit_model(version, make_model(seed=version))
    with pytest.raises(InputError) as raised:
        export(run.url, "--to", str(tmp_path / "model"), "--version", "4")
    assert raised.value.expected == "one of 3, 6"
    assert not (tmp_path / "model").exists()
    with pytest.raises(InputError):
        export(run.url, "--to", str(run.start))


def test_a_damaged_file_or_another_start_model_leaves_no_folder(run: Run, tmp_path: Path) -> None:
    run.commit_model(3, make_model(seed=3, hidden_size=8))
    with pytest.raises(ModelFolderError):
        export(run.url, "--to", str(tmp_path / "model"))
    run.commit(6, {"model.safetensors": b"no weights at all"})
    with pytest.raises(StreamCorrupt):
        export(run.url, "--to", str(tmp_path / "model"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "start"]


def test_the_best_evaluated_version_is_exported(run: Run, tmp_path: Path) -> None:
    models = {version: make_model(seed=version) for version in (3, 6, 9)}
    for version, model in models.items():
        run.commit_model(version, model)
    with pytest.raises(InputError):
        export(run.url, "--to", str(tmp_path / "none"), "--best")
    checkpoints = stored_checkpoints(run.store)
    for version, accuracy in ((3, 0.25), (6, 0.75), (9, 0.5)):
        measured = {"policy_version": version, "weights_checksum": weights_checksum(checkpoints[version])}
        write_result(run.store, {**measured, "accuracy": accuracy, "prompts": 8, "t": 50.0})
    assert export(run.url, "--to", str(tmp_path / "best"), "--best").startswith("version 6; written to")
    assert_same_policy(tmp_path / "best", models[6])


def test_the_base_model_is_exported_if_it_is_the_best(run: Run, tmp_path: Path) -> None:
    run.commit_model(3, make_model(seed=3))
    trained = {"policy_version": 3, "weights_checksum": weights_checksum(stored_checkpoints(run.store)[3])}
    base = {"policy_version": 0, "weights_checksum": None}
    for measured, accuracy in ((base, 1.0), (trained, 0.5)):
        write_result(run.store, {**measured, "accuracy": accuracy, "prompts": 8, "t": 50.0})
    output = export(run.url, "--to", str(tmp_path / "best"), "--best")
    assert output.startswith("version 0, the base model")
    assert_same_policy(tmp_path / "best", make_model(seed=0))


def test_a_version_and_the_promoted_one_exclude_each_other(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        export(run.url, "--to", str(tmp_path / "model"), "--promoted", "--version", "3")
    assert caught.value.code == 2
