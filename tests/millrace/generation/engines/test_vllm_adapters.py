"""LoRA adapters in vLLM: a trajectory has the version that it began with, whatever arrives while it is in flight."""

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest
import torch
from support.engines.adapted import MAX_STALENESS, RANK, TARGETS, AdaptedPolicy
from support.engines.policies import Offer, all_of, largest_mismatch
from support.engines.vllm_processes import running_vllm
from transformers import LlamaForCausalLM, PreTrainedModel

from configs.generation import VLLM_RANKS, adapter_arguments
from millrace.errors import WeightsMismatch
from millrace.types import Request, Sampling
from millrace.weights.adapter import TENSORS_FILE, Adapter
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.fingerprint import fingerprint
from millrace.weights.probe import tolerance_between
from millrace.weights.shared_tensors import ReceiveBuffer, shapes_of
from storage.stores.memory import memory_folder

if TYPE_CHECKING:
    from millrace.generation.engines.vllm.adapters import LoadedAdapters
    from millrace.generation.engines.vllm.engine import VllmEngine

pytestmark = pytest.mark.vllm

MakePolicy = Callable[[int], LlamaForCausalLM]

TOLERANCE = tolerance_between("float32", "float32")
TOKENS = [1, 5, 7, 3, 9]


@pytest.fixture
def make_weights() -> Iterator[Callable[[AdaptedPolicy], Weights]]:
    """`make(policy)`: its adapter as a receiver returns it, until the next call."""
    buffer = ReceiveBuffer(memory_folder() / f"test-{uuid.uuid4().hex}")

    def make(policy: AdaptedPolicy) -> Weights:
        tensors = buffer.tensors_for(shapes_of(policy.tensors))
        for name, tensor in policy.tensors.items():
            tensors[name].copy_(tensor)
        weights_id = WeightsId(incarnation=0, policy_version=policy.version, t_offered=0.5)
        manifest = Manifest(id=weights_id, adapter=policy.adapter, fingerprint=fingerprint(tensors))
        return Weights(manifest=manifest, tensors=tensors, shared=buffer.shared)

    yield make
    buffer.close()


@pytest.fixture(scope="module")
def engine(make_policy: MakePolicy, tmp_path_factory: pytest.TempPathFactory) -> Iterator["VllmEngine"]:
    adapters = adapter_arguments(RANK, TARGETS, MAX_STALENESS)
    with running_vllm(make_policy(0), tmp_path_factory.mktemp("policy"), adapters=adapters) as engine:
        yield engine


def requests(group: int, count: int) -> list[Request]:
    return [
        Request(group_id=group, sample_index=i, prompt_tokens=(1, 3 + i % 12, 4), seed=100 * group + i)
        for i in range(count)
    ]


def test_requests_in_flight_finish_under_the_adapter_they_began_with(
    engine: "VllmEngine", make_policy: MakePolicy, make_weights: Callable[[AdaptedPolicy], Weights], offer: Offer
) -> None:
    with pytest.raises(RuntimeError, match="no adapter is loaded"):
        engine.next_logprobs(TOKENS, 4)
    with pytest.raises(WeightsMismatch, match="the whole model"):
        engine.update_weights(offer(make_policy(0), 1))

    sampling, done, num_waits = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=50), [], 0
    models: dict[int, PreTrainedModel] = {}
    for version in range(1, 9):
        while not engine.accepts_weights:
            num_waits += 1
            done += engine.collect(1.0)
        policy = AdaptedPolicy(make_policy(0), version)
        models[version] = policy.model(make_policy(0))
        engine.update_weights(make_weights(policy))
        engine.submit(requests(version, 12), sampling)
        with torch.no_grad():
            expected = torch.log_softmax(models[version](input_ids=torch.tensor([TOKENS])).logits[0, -1], dim=-1)
        for token, logprob in engine.next_logprobs(TOKENS, 4).items():
            assert abs(expected[token].item() - logprob) < TOLERANCE, f"probe of version {version}"
    done += all_of(engine)

    assert len(done) == 8 * 12
    for trajectory in done:
        assert trajectory.response.version_spans == ((trajectory.request.group_id, 0),)
    worst = max(largest_mismatch(models, each.request.prompt_tokens, each.response) for each in done)
    print(f"8 updates, {num_waits} waits for a slot: |Δ log π| ≤ {worst:.2g}")
    assert worst < TOLERANCE
    # The counter-proof: neither the version before nor the base model would fit.
    for other in ({version: models[max(1, version - 1)] for version in models}, dict.fromkeys(models, make_policy(0))):
        late = [each for each in done if each.request.group_id > 1]
        assert max(largest_mismatch(other, each.request.prompt_tokens, each.response) for each in late) > 0.1


@pytest.mark.parametrize("damage", ["higher rank", "corrupt file", "missing files"])
def test_an_adapter_that_vllm_can_not_use_is_named(
    engine: "VllmEngine",
    make_policy: MakePolicy,
    make_weights: Callable[[AdaptedPolicy], Weights],
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    def write_damaged(adapter: Adapter, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        if damage == "corrupt file":
            for name, data in adapter.files(tensors).items():
                (folder / name).write_bytes(data[: len(data) // 2] if name == TENSORS_FILE else data)

    with monkeypatch.context() as patch:
        if damage != "higher rank":
            patch.setattr(Adapter, "write", write_damaged)
        policy = AdaptedPolicy(make_policy(0), 40, rank=9 if damage == "higher rank" else RANK)
        with pytest.raises(WeightsMismatch, match="version 40"):
            engine.update_weights(make_weights(policy))
    engine.update_weights(make_weights(AdaptedPolicy(make_policy(0), 41)))
    assert engine.policy_version == 41


class RecordedLlm:
    """Stands in for vLLM, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def add_lora(self, request: object) -> bool:
        folder = Path(request.lora_path)  # type: ignore[attr-defined]
        self.calls.append(f"add {request.lora_int_id}")  # type: ignore[attr-defined]
        assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self.calls.append(f"remove {lora_id}")
        return True


@pytest.fixture
def loaded() -> "LoadedAdapters":
    from millrace.generation.engines.vllm.adapters import LoadedAdapters

    return LoadedAdapters(RecordedLlm(), num_slots=2)  # type: ignore[arg-type]


def test_an_adapter_stays_until_its_last_request_has_ended(
    loaded: "LoadedAdapters", make_policy: MakePolicy, make_weights: Callable[[AdaptedPolicy], Weights]
) -> None:
    policies = {version: AdaptedPolicy(make_policy(0), version) for version in (1, 2, 3, 4)}

    async def run() -> None:
        await loaded.load(make_weights(policies[1]))
        with loaded.newest() as first:
            await loaded.load(make_weights(policies[2]))
            assert loaded.has_room
            with loaded.newest() as second:
                assert (loaded.version_of(first), loaded.version_of(second)) == (1, 2)
                assert not loaded.has_room
            await loaded.load(make_weights(policies[3]))
            assert Path(first.lora_path).is_dir()
            assert not Path(second.lora_path).exists()
        await loaded.load(make_weights(policies[4]))

    asyncio.run(run())
    calls: list[str] = loaded._llm.calls  # type: ignore[attr-defined]
    assert calls == ["add 1", "add 2", "remove 2", "add 3", "remove 1", "remove 3", "add 4"]
    loaded.close()


def test_ranks_are_those_of_vllms_kernels() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == VLLM_RANKS
