"""Tensors come out of a checkpoint's files as they went in, or not at all, with the damaged file named."""

import pytest
import safetensors.torch
import torch
from support.stores.dict_store import DictStore
from support.stores.faulty_store import Fault, FaultyStore
from support.training.rank_files import rank_files

from millrace.errors import WeightsMismatch
from millrace.training.checkpoints.files import Block, lone_files
from millrace.training.checkpoints.names import (
    MODEL,
    OPTIMIZER,
    RNG,
    WEIGHTS_FILE,
    file_name,
    kind_of,
    weights_checksum,
)
from millrace.training.checkpoints.policy_state import load_weights, policy_state, restore_policy_state
from millrace.training.checkpoints.reading import StoredFiles, StoredTensors
from storage.checkpoints import Checkpoint, CheckpointWriter
from storage.errors import StreamCorrupt

TENSORS = {"wide": torch.arange(42.0).reshape(7, 6), "bias": torch.arange(5.0).bfloat16(), "factor": torch.tensor(0.5)}


def two_files(tensors: dict[str, torch.Tensor] = TENSORS) -> dict[str, bytes]:
    """Files as two ranks write them: the first holds 4 rows of `wide`, and all else."""
    first = {
        name: Block(tensor[:4] if name == "wide" else tensor, (0,) * tensor.dim()) for name, tensor in tensors.items()
    }
    second = {"wide": Block(tensors["wide"][4:], (4, 0))}
    return rank_files(MODEL, [first, second])


class CountingStore(DictStore):
    """Records the paths that were read whole."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        if length is None:
            self.read.append(path)
        return super().get(path, start, length)


def committed(store: DictStore, files: dict[str, bytes]) -> Checkpoint:
    return CheckpointWriter(store).commit(3, files, {})


def test_files_are_named_by_rank_where_there_are_several() -> None:
    assert file_name(MODEL, 0, 1) == WEIGHTS_FILE == "model.safetensors"
    names = [file_name(OPTIMIZER, rank, 3) for rank in range(3)]
    assert names == [f"optimizer-{rank}-of-3.safetensors" for rank in range(3)]
    assert {kind_of(name) for name in names} == {OPTIMIZER}
    assert [kind_of(file_name(kind, 0, 1)) for kind in (MODEL, OPTIMIZER, RNG)] == [MODEL, OPTIMIZER, RNG]


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"é": torch.ones(2, 3), "a": torch.zeros(()), "empty": torch.empty(0, 4)},
        {dtype: torch.arange(3).to(getattr(torch, dtype)) for dtype in ("bool", "uint8", "int8", "int16", "int32")},
        {dtype: torch.arange(5).to(getattr(torch, dtype)) for dtype in ("int64", "float64", "float16", "bfloat16")},
        {
            "b": torch.ones(3),
            "a": torch.ones(3),
            "z": torch.ones(1, dtype=torch.int64),
            "of columns": torch.ones(2, 3).T,
        },
    ],
)
def test_the_files_of_one_rank_are_to_the_byte_those_of_the_safetensors_library(
    tensors: dict[str, torch.Tensor],
) -> None:
    files = lone_files({MODEL: tensors, OPTIMIZER: tensors})
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert files == {
        "model.safetensors": safetensors.torch.save(plain, metadata={"format": "pt"}),
        "optimizer.safetensors": safetensors.torch.save(plain),
    }


def test_tensors_in_several_files_come_back_whole() -> None:
    store = DictStore()
    tensors = StoredTensors(StoredFiles(store, committed(store, two_files())), MODEL)
    assert tensors.shapes == {name: tensor.shape for name, tensor in TENSORS.items()}
    whole = tensors.read_whole()
    assert all(
        torch.equal(whole[name], tensor) and whole[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )
    assert load_weights(store, committed(store, two_files()), {}).keys() == TENSORS.keys()


def test_only_files_with_what_is_asked_for_are_read_whole() -> None:
    store = CountingStore()
    checkpoint = committed(store, two_files())
    store.read.clear()
    StoredTensors(StoredFiles(store, checkpoint), MODEL).read({"bias": torch.empty(5)})
    assert store.read == [checkpoint.files["model-0-of-2.safetensors"].path]


@pytest.mark.parametrize("like", [{"wide": torch.empty(7, 5)}, {"other": torch.empty(2)}])
def test_another_model_is_refused(like: dict[str, torch.Tensor]) -> None:
    with pytest.raises(WeightsMismatch) as refused:
        StoredTensors(two_files(), MODEL).read(like)
    assert next(iter(like)) in str(refused.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_at_any_place_of_a_file_names_that_file(rank: int) -> None:
    name = file_name(MODEL, rank, 2)
    length = len(two_files()[name])
    for place in range(length):
        store = DictStore()
        checkpoint = committed(store, two_files())
        path = checkpoint.files[name].path
        data = bytearray(store.objects[path])
        data[place] ^= 1
        store.objects[path] = bytes(data)
        with pytest.raises(StreamCorrupt) as caught:
            StoredTensors(StoredFiles(store, checkpoint), MODEL).read(TENSORS)
        assert caught.value.file == path, place


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("read", range(4))
def test_a_bit_that_flips_on_the_way_from_the_store_costs_nothing(read: int, seed: int) -> None:
    inner = DictStore()
    checkpoint = committed(inner, two_files())
    store = FaultyStore(inner, seed, bit_flip=Fault(calls=frozenset({read}), paths="*/model-0-of-2.safetensors"))
    whole = StoredTensors(StoredFiles(store, checkpoint), MODEL).read_whole()
    assert store.fired == {"bit_flip": 1}
    assert all(torch.equal(whole[name], tensor) for name, tensor in TENSORS.items())


def test_a_file_that_is_missing_or_cut_off_is_named() -> None:
    for left in (None, b"", b"\x01"):
        store = DictStore()
        checkpoint = committed(store, two_files())
        path = checkpoint.files["model-1-of-2.safetensors"].path
        if left is None:
            del store.objects[path]
        else:
            store.objects[path] = left
        with pytest.raises(StreamCorrupt) as caught:
            StoredTensors(StoredFiles(store, checkpoint), MODEL).read_whole()
        assert caught.value.file == path


def test_a_checkpoint_without_the_file_of_a_rank_is_refused() -> None:
    files = two_files()
    whole = StoredTensors(files, MODEL).read_whole()
    del files["model-0-of-2.safetensors"]
    with pytest.raises(StreamCorrupt, match="wide"):
        StoredTensors(files, MODEL).read({"wide": whole["wide"]})


class Small(torch.nn.Module):
    """Two layers and their optimizer, some steps from the start."""

    def __init__(self, seed: int, steps: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.layers(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()

    def files(self) -> dict[str, bytes]:
        return lone_files(policy_state(dict(self.named_parameters()), self.optimizer))

    def restore(self, files: dict[str, bytes]) -> None:
        restore_policy_state(dict(self.named_parameters()), self.optimizer, files)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_restored_trainer_goes_on_as_the_one_that_was_saved(steps: int) -> None:
    saved, restored = Small(0, steps), Small(1, 2)
    files = saved.files()
    saved.step()
    restored.restore(files)
    assert restored.files() == files
    restored.step()
    assert restored.files() == saved.files()


def test_a_trainer_that_can_not_be_restored_stays_as_it_was() -> None:
    other = Small(1, 2).files()
    small = Small(0, 2)
    before = small.files()
    damaged = other | {"optimizer.safetensors": other["optimizer.safetensors"][:-1]}
    with pytest.raises(StreamCorrupt) as caught:
        small.restore(damaged)
    assert caught.value.file == "optimizer.safetensors"
    assert small.files() == before


def test_adapters_are_added_to_the_start_model_they_stand_beside() -> None:
    torch.manual_seed(0)
    start = {"q.weight": torch.randn(4, 3), "q.bias": torch.randn(4)}
    down, up = torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.randn(4, 2))
    parameters = {"q.lora_A.default.weight": down, "q.lora_B.default.weight": up}
    store = DictStore()
    state = policy_state(parameters, torch.optim.AdamW(parameters.values()), lora_scaling=0.25)
    loaded = {name: tensor.clone() for name, tensor in start.items()}
    weights = load_weights(store, committed(store, lone_files(state)), loaded)
    assert torch.equal(weights["q.weight"], start["q.weight"] + up @ down * 0.25)
    assert torch.equal(weights["q.bias"], start["q.bias"])
    # In place: memory never holds the model twice.
    assert all(weights[name] is loaded[name] for name in start)


def test_the_checksum_of_weights_identifies_them_for_any_number_of_ranks() -> None:
    store = DictStore()
    alone = committed(store, {WEIGHTS_FILE: b"weights", "optimizer.safetensors": b"a"})
    assert weights_checksum(alone) == alone.files[WEIGHTS_FILE].checksum
    two = weights_checksum(committed(store, {"model-0-of-2.safetensors": b"w", "model-1-of-2.safetensors": b"v"}))
    assert two == weights_checksum(
        committed(store, {"model-1-of-2.safetensors": b"v", "model-0-of-2.safetensors": b"w", "rng.safetensors": b""})
    )
    assert two != weights_checksum(
        committed(store, {"model-0-of-2.safetensors": b"v", "model-1-of-2.safetensors": b"w"})
    )
