"""Frozen layers and adapters: frozen weights stay and need no activations, and generators get whole weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer
from support.training.sharded_trainers import tiny_qwen3
from support.training.update_batches import batch_of_groups, make_trainer
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from configs.schema import ModelConfig
from millrace.errors import InputError
from millrace.maintenance.export import write_model_folder
from millrace.training.checkpoints.policy_state import load_weights
from millrace.training.lora import add_adapters, is_adapter
from millrace.training.parallel.sharding import base_tensors
from storage.checkpoints import CheckpointWriter, read_latest
from storage.stores.memory import MemoryStore

MakeModel = Callable[..., LlamaForCausalLM]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_embeddings_and_the_first_layers_stay_and_the_others_are_trained(
    make_model: MakeModel, num_layers: int
) -> None:
    trainer, start = make_trainer(make_model(0), frozen_layers=num_layers), dict(make_model(0).named_parameters())
    frozen = ("model.embed_tokens.", *(f"model.layers.{layer}." for layer in range(num_layers)))
    trainer.step(batch_of_groups())
    weights = trainer.weights()
    assert weights.keys() == start.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, start[name]) == name.startswith(frozen), name
    assert all(
        parameter.grad is None for name, parameter in trainer.model.named_parameters() if name.startswith(frozen)
    )


def test_the_gradient_of_what_is_trained_is_the_one_that_it_would_have_anyway(make_model: MakeModel) -> None:
    part, whole = make_trainer(make_model(0), frozen_layers=1), make_trainer(make_model(0))
    for trainer in (part, whole):
        trainer.step(batch_of_groups())
    expected = dict(whole.model.named_parameters())
    for name, parameter in part.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-7, msg=name)


def test_no_activation_of_a_frozen_layer_is_kept_for_a_backward_pass(make_model: MakeModel) -> None:
    trainer, needs_gradient = make_trainer(make_model(0), frozen_layers=1), []
    layers = trainer.model.get_submodule("model.layers").children()
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, output: needs_gradient.append(output.requires_grad))
    trainer.step(batch_of_groups(num_groups=1))
    assert needs_gradient == [False, True]


def test_a_checkpoint_holds_what_is_trained_and_becomes_whole_with_the_start_model(
    make_model: MakeModel, memory_store: MemoryStore
) -> None:
    trainer, batch = make_trainer(make_model(0), frozen_layers=1), batch_of_groups()
    trainer.step(batch)
    tensors, trained = trainer.tensors(), {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert tensors["model"].keys() == trained | {"frozen_layers"}
    assert {name.partition(".")[2] for name in tensors["optimizer"]} == trained
    CheckpointWriter(memory_store).commit(1, trainer.state(), {})
    checkpoint = read_latest(memory_store)
    assert checkpoint is not None
    whole = load_weights(memory_store, checkpoint, dict(make_model(0).named_parameters()))
    assert whole.keys() == trainer.weights().keys()
    for name, tensor in trainer.weights().items():
        assert torch.equal(whole[name], tensor), name
    resumed = make_trainer(make_model(0), frozen_layers=1)
    resumed.restore(1, trainer.state())
    assert resumed.step(batch) == trainer.step(batch)
    assert resumed.state() == trainer.state()


@pytest.mark.parametrize(("stored", "wanted"), [(0, 1), (1, 0), (1, 2)])
def test_a_checkpoint_with_another_number_of_frozen_layers_is_refused(
    make_model: MakeModel, stored: int, wanted: int
) -> None:
    files = make_trainer(make_model(0), frozen_layers=stored).state()
    trainer = make_trainer(make_model(1), frozen_layers=wanted)
    start = trainer.state()

    with pytest.raises(InputError):
        trainer.restore(1, files)
    assert trainer.state() == start


def test_an_exported_folder_is_whole(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, memory_store: MemoryStore, tmp_path: Path
) -> None:
    for part in (make_model(0), tokenizer):
        part.save_pretrained(tmp_path / "start")
    trainer = make_trainer(make_model(0), frozen_layers=1)
    trainer.step(batch_of_groups())
    CheckpointWriter(memory_store).commit(1, trainer.state(), {})
    checkpoint = read_latest(memory_store)
    assert checkpoint is not None
    write_model_folder(
        memory_store, checkpoint, tmp_path / "start", ModelConfig(dtype="float32"), tmp_path / "exported"
    )
    exported = dict(LlamaForCausalLM.from_pretrained(tmp_path / "exported").named_parameters())
    assert exported.keys() == trainer.weights().keys()
    for name, tensor in trainer.weights().items():
        assert torch.equal(exported[name], tensor), name


def test_adapters_are_in_the_layers_that_are_not_frozen(make_model: MakeModel) -> None:
    trainer = make_trainer(make_model(0), frozen_layers=1, lora={"rank": 2})
    adapters = {name for name, _ in trainer.model.named_parameters() if is_adapter(name)}
    assert len(adapters) == 2 * 4
    assert all(name.startswith("model.layers.1.self_attn.") for name in adapters)
    start = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    for _ in range(2):
        trainer.step(batch_of_groups())
    moved = {name for name, tensor in trainer.weights().items() if not torch.equal(tensor, start[name])}
    assert moved == {f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "qkvo"}


TARGETS = ["q_proj", "down_proj"]


def adapted(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose adapters add something to their weights."""
    model = tiny_qwen3().to(dtype)
    add_adapters(model, rank=4, alpha=8.0, target_modules=TARGETS)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_only_adapters_have_a_gradient_and_they_are_of_the_models_type() -> None:
    model = adapted(torch.bfloat16)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert len(trained) == 2 * len(TARGETS) * 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_new_adapter_changes_nothing() -> None:
    model, base = tiny_qwen3(), dict(tiny_qwen3().named_parameters())
    add_adapters(model, rank=4, alpha=8.0, target_modules=TARGETS)
    for name, tensor in base_tensors(model, whole=True):
        assert torch.equal(tensor, base[name]), name


def test_merged_weights_have_the_base_models_names_and_are_those_that_peft_makes() -> None:
    model = adapted()
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    merged = dict(base_tensors(model, whole=True))
    assert merged.keys() == dict(tiny_qwen3().named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, start[name]), f"{name} was changed"
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            tensor = merged[name.replace(".base_layer.", ".")]
            torch.testing.assert_close(tensor, parameter.detach(), rtol=1e-6, atol=1e-7, msg=name)


def test_adapters_in_bfloat16_are_added_up_before_they_are_rounded() -> None:
    model = adapted(torch.bfloat16)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    weight, down, up = (
        layer.get_parameter(name).float()
        for name in ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    )
    merged = dict(base_tensors(model, whole=True))["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(merged, (weight + up @ down * 2.0).bfloat16())


def test_a_target_that_is_no_linear_layer_is_named() -> None:
    with pytest.raises(InputError) as refused:
        add_adapters(tiny_qwen3(), rank=4, alpha=8.0, target_modules=["q_proj", "qkv_proj", "input_layernorm"])
    assert refused.value.key == "training.lora.target_modules"
    assert refused.value.read.startswith("input_layernorm, qkv_proj,")
