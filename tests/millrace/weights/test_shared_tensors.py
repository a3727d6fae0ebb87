"""A receive buffer holds the tensors of one version where other processes can map them."""

import uuid
from pathlib import Path

import pytest
import torch

from millrace.weights.shared_tensors import ReceiveBuffer, SharedTensors, shapes_of
from storage.errors import StoreFull
from storage.stores.memory import memory_folder

SMALL = {"scale": torch.zeros(()), "embed": torch.zeros(3, 5, dtype=torch.bfloat16)}
LARGE = {"embed": torch.zeros(30, 50, dtype=torch.float64)}


def test_what_is_written_is_seen_by_any_process_that_maps_it(tmp_path: Path) -> None:
    buffer = ReceiveBuffer(tmp_path / "received")
    tensors = buffer.tensors_for(shapes_of(SMALL))
    seen = SharedTensors.from_json(buffer.shared.to_json()).map()
    for value in (1.0, 2.0):
        for tensor in tensors.values():
            tensor.fill_(value)
        assert all(torch.equal(seen[name], torch.full_like(SMALL[name], value)) for name in SMALL)


def test_equal_shapes_use_the_same_memory_and_others_in_a_file_of_their_own(tmp_path: Path) -> None:
    buffer = ReceiveBuffer(tmp_path / "received")
    first = buffer.tensors_for(shapes_of(SMALL))
    assert buffer.tensors_for(shapes_of(SMALL))["embed"].data_ptr() == first["embed"].data_ptr()
    first["embed"].fill_(4.0)
    seen = buffer.shared.map()
    second = buffer.tensors_for(shapes_of(LARGE))
    assert shapes_of(second) == shapes_of(LARGE) == buffer.shared.shapes
    second["embed"].fill_(5.0)
    assert torch.equal(buffer.shared.map()["embed"], second["embed"])
    assert torch.equal(seen["embed"], torch.full_like(seen["embed"], 4.0)), "who mapped the old file keeps it"


def test_what_a_killed_predecessor_left_is_replaced_and_its_readers_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "received"
    left = ReceiveBuffer(path)
    left.tensors_for(shapes_of(SMALL))["scale"].fill_(1.0)
    seen = left.shared.map()
    assert ReceiveBuffer(path).tensors_for(shapes_of(SMALL))["scale"] == 0.0
    assert seen["scale"] == 1.0


def test_closing_removes_the_file_and_leaves_what_was_handed_out(tmp_path: Path) -> None:
    buffer = ReceiveBuffer(tmp_path / "received")
    tensors = buffer.tensors_for(shapes_of(SMALL))
    buffer.close()
    assert list(tmp_path.iterdir()) == []
    assert tensors["embed"].fill_(1.0).sum() == 15
    with pytest.raises(ValueError):
        _ = buffer.shared
    buffer.close()


def test_tensors_that_the_memory_has_no_room_for_are_an_error_and_no_signal() -> None:
    path = memory_folder() / f"test-buffer-{uuid.uuid4().hex}"
    with pytest.raises(StoreFull):
        ReceiveBuffer(path).tensors_for([("huge", "float32", (1 << 20, 1 << 20))])
    assert not path.exists()
