"""A LoRA run's versions travel as adapters: small, whole, and the trainer's policy at the other end."""

import dataclasses
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from support.stores.dict_store import DictStore
from support.training.update_batches import batch_of_groups, make_trainer
from support.weights.versions import manifest_of
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from millrace.errors import WeightsCorrupt, WeightsMismatch
from millrace.generation.engines.transformers import TransformersEngine
from millrace.stages.train.handover import Handover
from millrace.training.lora import add_adapters, described
from millrace.training.parallel.sharding import adapter_tensors
from millrace.training.trainer import Trainer
from millrace.weights.adapter import CONFIG_FILE, TENSORS_FILE
from millrace.weights.base import Weights, WeightsSender
from millrace.weights.fingerprint import fingerprint
from millrace.weights.shm import ShmReceiver, ShmRelay, ShmSender
from millrace.weights.store import StoreReceiver, StoreSender
from storage import layout
from storage.checkpoints import checkpoints_backwards

MakeModel = Callable[..., LlamaForCausalLM]
NUM_VERSIONS = 20


def lora_trainer(model: LlamaForCausalLM, frozen_layers: int = 0) -> Trainer:
    lora = {"rank": 2, "target_modules": ["q_proj", "o_proj", "up_proj"]}
    return make_trainer(model, lora=lora, frozen_layers=frozen_layers)


def adapter_weights(trainer: Trainer) -> Weights:
    """The trainer's version as sync_weights publishes it."""
    tensors = {name: tensor.detach().clone() for name, tensor in trainer.adapter().items()}
    manifest = manifest_of(trainer.policy_version)
    described_as = described(trainer._training)
    return Weights(
        manifest=dataclasses.replace(manifest, adapter=described_as, fingerprint=fingerprint(tensors)), tensors=tensors
    )


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.tensor([[1, 5, 7, 3, 9]])).logits
    return result


@pytest.mark.parametrize("frozen_layers", [0, 1])
@pytest.mark.parametrize("transport", ["shm", "store"])
def test_a_generator_holds_the_trainers_weights_bit_for_bit_after_each_of_20_versions(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, transport: str, frozen_layers: int
) -> None:
    trainer = lora_trainer(make_model(0), frozen_layers)
    engine = TransformersEngine(make_model(0), tokenizer)
    store, path = DictStore(), tmp_path / "handover"
    with (
        closing(ShmSender(path, trainer.adapter(), 1)) as sender,
        closing(ShmRelay(path)) as relay,
        closing(relay if transport == "shm" else StoreSender(store)) as publisher,
        closing(
            ShmReceiver(path, 0) if transport == "shm" else StoreReceiver(store, tmp_path / "received")
        ) as receiver,
    ):
        assert isinstance(publisher, WeightsSender)
        handover, newest = Handover(trainer, sender, described(trainer._training)), None
        for version in range(NUM_VERSIONS + 1):
            if version:
                trainer.step(batch_of_groups(seed=version))
            handover.publish(manifest_of(version))
            relayed = relay.poll(newest)
            assert relayed is not None
            publisher.publish(relayed)
            received = receiver.poll(newest)
            assert received is not None
            assert received.manifest.adapter == described(trainer._training)
            newest = received.id
            engine.update_weights(received)
            assert engine.policy_version == version
            generated = dict(engine.model.named_parameters())
            for name, tensor in trainer.weights().items():
                assert torch.equal(generated[name], tensor), f"version {version}, {name}"
    assert not torch.equal(logits(engine.model), logits(make_model(0)))


def test_a_stored_version_is_a_folder_that_peft_loads(make_model: MakeModel, tmp_path: Path) -> None:
    trainer, store = lora_trainer(make_model(0), frozen_layers=1), DictStore()
    sender = StoreSender(store)
    for seed in (1, 2):
        trainer.step(batch_of_groups(seed=seed))
        sender.publish(adapter_weights(trainer))
    newest, _ = checkpoints_backwards(store, layout.WEIGHTS)
    assert {Path(ref.path).name for ref in newest.files.values()} == {TENSORS_FILE, CONFIG_FILE}
    for ref in newest.files.values():
        (tmp_path / Path(ref.path).name).write_bytes(bytes(store.get(ref.path)))
    policy = make_model(0)
    policy.load_state_dict(trainer.weights(), strict=False)
    loaded = PeftModel.from_pretrained(make_model(0), str(tmp_path))
    assert sum(".lora_A." in name for name, _ in loaded.named_parameters()) == 3
    torch.testing.assert_close(logits(loaded), logits(policy), rtol=1e-5, atol=1e-5)


def test_a_late_reader_of_a_lora_run_reads_the_newest_adapter_alone(make_model: MakeModel, tmp_path: Path) -> None:
    trainer, store = lora_trainer(make_model(0)), DictStore()
    sender = StoreSender(store)
    for seed in (1, 2, 3):
        trainer.step(batch_of_groups(seed=seed))
        sender.publish(adapter_weights(trainer))
    versions = list(checkpoints_backwards(store, layout.WEIGHTS))
    for older in versions[1:]:
        for ref in older.files.values():
            store.delete(ref.path)
    received = StoreReceiver(store, tmp_path / "received").poll(None)
    assert received is not None
    assert received.id.policy_version == 3
    assert fingerprint(received.tensors) == fingerprint(trainer.adapter())


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_adapter_is_named_and_the_generator_keeps_its_version(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, damage: str
) -> None:
    trainer, store = lora_trainer(make_model(0)), DictStore()
    trainer.step(batch_of_groups())
    StoreSender(store).publish(adapter_weights(trainer))
    (stored,) = checkpoints_backwards(store, layout.WEIGHTS)
    path = next(ref.path for ref in stored.files.values() if ref.path.endswith(TENSORS_FILE))
    content = bytes(store.get(path))
    store.delete(path)
    if damage == "flipped":
        store.put(path, content[:-1] + bytes([content[-1] ^ 1]))
    receiver = StoreReceiver(store, tmp_path / "received")
    with pytest.raises(WeightsCorrupt, match=f"version 1.*{TENSORS_FILE}"):
        receiver.poll(None)


@pytest.mark.parametrize("change", ["missing", "unknown", "of another shape"])
def test_an_adapter_of_another_model_is_refused_and_the_weights_stay(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, change: str
) -> None:
    trainer, engine = lora_trainer(make_model(0)), TransformersEngine(make_model(0), tokenizer)
    trainer.step(batch_of_groups())
    weights = adapter_weights(trainer)
    tensors = dict(weights.tensors)
    name = next(name for name in tensors if name.endswith("q_proj.lora_B.weight"))
    match change:
        case "missing":
            del tensors[name]
        case "unknown":
            tensors["base_model.model.lm_head.lora_A.weight"] = tensors[name]
        case _:
            tensors[name] = tensors[name][:, :1]
    before = {name: tensor.clone() for name, tensor in engine.model.named_parameters()}
    with pytest.raises(WeightsMismatch, match=change):
        engine.update_weights(dataclasses.replace(weights, tensors=tensors))
    assert engine.policy_version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.named_parameters())


@pytest.mark.parametrize(
    "target_modules",
    [
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ],
)
def test_an_adapter_of_an_8b_model_is_at_most_2_percent_of_it(target_modules: list[str]) -> None:
    # Qwen3-8B.
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        add_adapters(model, rank=16, alpha=16.0, target_modules=target_modules)
    adapter = sum(4 * tensor.numel() for _, tensor in adapter_tensors(model))
    print(f"{len(target_modules)} layers of each block: {adapter:,} of {whole:,} bytes, {adapter / whole:.2%}")
    assert whole == pytest.approx(16.4e9, rel=0.01)
    assert adapter / whole <= 0.02
