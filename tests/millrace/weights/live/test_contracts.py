"""vLLM's own trainer engines as Millrace drives them, with stubs for communicators: calls, their order and arguments.

A thread per trainer rank and one for the generator; calls travel through the real rendezvous.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.weights.direct import PATIENT, wait_until
from support.weights.live import LivePushes, RecordingEngine, serve

from millrace.weights.direct.layout import ShardLayout, TensorSpec

pytestmark = pytest.mark.vllm

TENSORS = {
    "model.embed.weight": torch.arange(24, dtype=torch.float32).view(6, 4),
    "model.norm.weight": torch.arange(4, dtype=torch.bfloat16),
}
NAMES, SHAPES = list(TENSORS), [[6, 4], [4]]
DTYPES = ["float32", "bfloat16"]
JOIN = ["init_weight_transfer_engine"] * 2
"""Ready to join, and joins."""


class Communicator:
    """In place of a PyNcclCommunicator."""

    comm = 4711

    def __init__(self) -> None:
        self.destroyed = False

    def destroy(self) -> None:
        self.destroyed = True


def deliver(pushes: LivePushes, engine: RecordingEngine, version: int) -> list[tuple[str, Any]]:
    """Publishes a version; returns the calls that the generator served for it."""
    num_calls = len(engine.calls)
    pushes.publish(version, TENSORS)
    held, limit = None, time.monotonic() + PATIENT
    while held is None or held.policy_version != version:
        assert time.monotonic() < limit
        held = serve(engine, pushes.receivers[0], held)
    return engine.calls[num_calls:]


def methods(calls: list[tuple[str, Any]]) -> list[str]:
    return [method for method, _ in calls]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stubs for NCCL that record vLLM's use of them."""
    from vllm.distributed.weight_transfer import nccl_engine

    seen = SimpleNamespace(endpoints=[], groups=[], sent=[])

    def open_endpoint(init_info: Any) -> Communicator:
        seen.endpoints.append(init_info)
        seen.groups.append(Communicator())
        return seen.groups[-1]

    def broadcast(iterator: Any, group: Any, src: int, post_iter_func: Any, **sizes: int) -> None:
        seen.sent.append((group, src, {item[0]: post_iter_func(item).clone() for item in iterator}))

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", open_endpoint)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    yield seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_nccl_broadcasts_whole_tensors_and_keeps_its_communicator(
    ranks: int, nccl: SimpleNamespace, tmp_path: Path
) -> None:
    engine = RecordingEngine()
    with closing(LivePushes(tmp_path, TENSORS, ranks=ranks, workers=2, transport="nccl", leads=True)) as pushes:
        first, second = deliver(pushes, engine, 1), deliver(pushes, engine, 2)
    assert methods(first) == [
        *JOIN,
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ]
    ready, init = first[0][1], first[1][1]
    assert ready["info"] is None
    assert (ready["backend"], ready["index"]) == (init["backend"], init["index"]) == ("nccl", 0)
    assert init["info"] | {"master_port": 0} == {
        "master_address": "127.0.0.1",
        "master_port": 0,
        "rank_offset": 1,
        "world_size": 3,
        "packed": True,
        "packed_buffer_size_bytes": 1 << 30,
        "packed_num_buffers": 2,
    }
    update = {"names": NAMES, "dtype_names": DTYPES, "shapes": SHAPES}
    assert [call[1]["info"] for call in (first[3], second[1])] == [update, update]
    assert methods(second) == methods(first)[2:]
    (endpoint,), (group,) = nccl.endpoints, nccl.groups
    assert (endpoint.rank, endpoint.world_size, endpoint.master_port) == (0, 3, init["info"]["master_port"])
    assert [(sent[0], sent[1]) for sent in nccl.sent] == [(group, 0), (group, 0)]
    for _, _, tensors in nccl.sent:
        assert list(tensors) == NAMES
        assert all(torch.equal(tensors[name], TENSORS[name]) for name in NAMES)


def test_after_an_error_of_a_generator_the_next_push_makes_another_communicator(
    nccl: SimpleNamespace, tmp_path: Path
) -> None:
    engine = RecordingEngine(fails_at="update_weights")
    with closing(LivePushes(tmp_path, TENSORS, transport="nccl", leads=True)) as pushes:
        calls = deliver(pushes, engine, 1)
    served = methods(calls)
    assert served[: served.index("update_weights") + 1] == [
        *JOIN,
        "start_weight_update",
        "update_weights",
    ]
    assert served[-5:] == [
        *JOIN,
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ]
    assert len(nccl.groups) == 2
    assert nccl.groups[0].destroyed


def test_nccl_m2n_has_every_rank_reshard_its_own_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.distributed.weight_transfer import m2n_trainer
    from vllm.distributed.weight_transfer.m2n_common import REPLICATED

    import millrace.weights.live.source as source

    joined: list[tuple[dict[str, Any], int]] = []
    resharded: list[tuple[torch.Tensor, dict[str, Any]]] = []
    m2n = SimpleNamespace(
        Mesh=lambda dims, start_rank: (tuple(dims), start_rank),
        Shard=lambda dim: f"shard {dim}",
        Replicate=lambda: "replicate",
        Config=lambda max_cta: None,
        Handle=SimpleNamespace(create=lambda config: object()),
        reshard=lambda shard, buffer, comm, stream, **layouts: resharded.append((shard.clone(), layouts)),
    )
    for module in (m2n_trainer, source):
        monkeypatch.setattr(module, "import_m2n", lambda: m2n)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 5))

    def join(init_info: dict[str, Any], rank: int) -> Communicator:
        joined.append((init_info, rank))
        return Communicator()

    monkeypatch.setattr(m2n_trainer, "trainer_init", join)
    monkeypatch.setattr(
        m2n_trainer, "publish_destination_placements", lambda group, first, mine, number: [(-1, 0), REPLICATED]
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    engine = RecordingEngine()
    with closing(LivePushes(tmp_path, TENSORS, ranks=2, workers=3, transport="nccl_m2n", leads=True)) as pushes:
        assert pushes.ranks[0].route == "nccl_m2n"
        calls = deliver(pushes, engine, 1)
    assert methods(calls)[:2] == JOIN
    info = calls[1][1]["info"]
    assert (info["rank_offset"], info["world_size"]) == (2, 5)
    assert (info["src_mesh_dims"], info["dst_mesh_dims"]) == ([1, 2], [1, 3])
    assert (info["names"], info["dtype_names"], info["shapes"]) == (NAMES, DTYPES, SHAPES)
    assert info["src_placements"] == [[-1, 0], [-1, 0]]
    assert [call[1]["info"] for call in calls if call[0] == "update_weights"] == [{"names": NAMES}]
    assert sorted(rank for _, rank in joined) == [0, 1]
    assert len({init_info["master_port"] for init_info, _ in joined}) == 1
    parts = [part for tensor in TENSORS.values() for part in tensor.chunk(2)]
    assert len(resharded) == len(parts)
    assert all(any(torch.equal(part, shard) for shard, _ in resharded) for part in parts)
    layouts = [layout for shard, layout in resharded if shard.dim() == 2]
    assert all(layout["src_mesh"] == ((1, 2), 0) and layout["dst_mesh"] == ((1, 3), 2) for layout in layouts)
    assert all(layout["src_placements"] == ["replicate", "shard 0"] for layout in layouts)


def test_nccl_takes_the_place_of_nccl_m2n_where_rows_do_not_divide(
    nccl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import millrace.weights.live.source as source

    monkeypatch.setattr(source, "import_m2n", lambda: None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 5))
    tensors = {"model.odd.weight": torch.zeros(5, 2)}
    with closing(LivePushes(tmp_path, tensors, ranks=2, transport="nccl_m2n")) as pushes:
        assert pushes.ranks[0].route.startswith("nccl, because")
        assert "model.odd.weight" in pushes.ranks[0].route


def test_nccl_takes_the_place_of_nccl_m2n_where_nccl_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.weights.live import source

    monkeypatch.setattr(source, "import_m2n", lambda: None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    limit = source.m2n_limit(ShardLayout((TensorSpec("w", "bfloat16", (8, 4)),), 4))
    assert "2.29.7" in limit
    assert "2.30.5" in limit


def test_a_transport_that_fails_twice_in_a_row_gives_way_to_the_next_and_in_the_end_to_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.distributed.weight_transfer import m2n_trainer, nccl_engine

    from millrace.weights.live import source

    def fail(*_: Any) -> None:
        raise RuntimeError("unhandled system error")

    for module in (m2n_trainer, source):
        monkeypatch.setattr(module, "import_m2n", lambda: None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 5))
    monkeypatch.setattr(m2n_trainer, "trainer_init", fail)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", fail)
    engine = RecordingEngine()
    with closing(LivePushes(tmp_path, TENSORS, transport="nccl_m2n", leads=True)) as pushes:
        pushes.publish(1, TENSORS)
        limit = time.monotonic() + PATIENT
        while len(pushes.logged) < 2:
            assert time.monotonic() < limit
            serve(engine, pushes.receivers[0], None)
        pushes.publish(2, TENSORS)
        wait_until(lambda: pushes.newest is not None and pushes.newest.policy_version == 2, "version 2 to be offered")
        backends = [argument["backend"] for _, argument in engine.calls if argument["info"] is not None]
        assert pushes.receivers[0].poll(None) is None
    assert backends == ["nccl_m2n", "nccl_m2n", "nccl", "nccl"]
    assert ["by nccl from now on" in pushes.logged[0], "by the store" in pushes.logged[1]] == [True, True]


def test_ipc_sends_handles_of_its_buffer_which_lies_in_a_plain_segment_as_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

    from millrace.weights.live.handles import decode_handles

    storage = torch.storage.TypedStorage
    handle = (
        *(torch.Tensor, torch.Size([64]), (1,), 0, storage, torch.uint8),
        *(0, b"handle\xff", 64, 0, False, b"counter\x00", 0, b"event\xfe", True),
    )
    sizes: list[int] = []
    settings: list[str] = []
    configured = "expandable_segments:True,max_split_size_mb:512"

    def pack(iterator: Any, gpu_uuid: str, post_iter_func: Any, buffer_size_bytes: int) -> Iterator[PackedIpcChunk]:
        sizes.append(buffer_size_bytes)
        settings.append(torch._C._accelerator_getAllocatorSettings())
        for name, tensor in iterator:
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield PackedIpcChunk([name], [list(tensor.shape)], [dtype], [tensor.nbytes], {gpu_uuid: handle})

    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", pack)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-7"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    engine = RecordingEngine()
    torch._C._accelerator_setAllocatorSettings(configured)
    try:
        with closing(LivePushes(tmp_path, TENSORS, transport="ipc", leads=True)) as pushes:
            calls = deliver(pushes, engine, 1)
        settings.append(torch._C._accelerator_getAllocatorSettings())
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert methods(calls) == [
        *JOIN,
        "start_weight_update",
        "update_weights",
        "update_weights",
        "finish_weight_update",
    ]
    assert calls[1][1]["backend"] == "ipc"
    assert calls[1][1]["info"] == {"packed": True}
    assert sizes == [1 << 30]
    # Where the buffer is allocated, and after the push.
    assert settings == ["expandable_segments:False,max_split_size_mb:512", configured]
    for call, name in zip(calls[3:5], NAMES, strict=True):
        assert call[1]["info"]["names"] == [name]
        assert decode_handles(call[1]["info"])["ipc_handles"] == {"GPU-7": handle}


@pytest.mark.parametrize(
    ("spec", "ranks", "limit"),
    [
        (TensorSpec("w", "bfloat16", (8, 4)), (4, 1), ""),
        (TensorSpec("w", "bfloat16", (8, 4)), (2, 2), "two axes"),
        (TensorSpec("w", "bfloat16", (34, 4)), (17, 1), "16 ranks"),
        (TensorSpec("w", "bfloat16", (6, 4)), (4, 1), "unevenly"),
        (TensorSpec("w", "bfloat16", (8, 1, 1, 4)), (4, 1), "'w'"),
        (TensorSpec("w", "complex64", (8, 4)), (4, 1), "'w'"),
    ],
)
def test_nccl_takes_the_place_of_nccl_m2n_where_that_cannot_divide_the_model(
    spec: TensorSpec, ranks: tuple[int, int], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.weights.live import source

    with monkeypatch.context() as patch:
        patch.setattr(source, "import_m2n", lambda: None)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 5))
        found = source.m2n_limit(ShardLayout((spec,), *ranks))
    assert (limit in found) if limit else (found == "")
