"""The trainer's end of a push into running engines: vLLM's trainer engine, made once and again after each error.

    send ─► same members as in the last push, and no error since? ──no──► new group of the ranks, `trainer_init`
                                    └────────────────yes───────────────► `send_weights`
         ─► out of time: communicators are aborted, which ends the transfers; the next push makes new ones

vLLM's engines wait without a limit, so each push has a thread, which is left behind if even an abort does not end it.
"""

import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore
from vllm.device_allocator.alloc_conf import EXPANDABLE_SEGMENTS, with_conf_flag
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

from millrace.weights.direct.exchange import PushGroup
from millrace.weights.direct.layout import ShardLayout
from millrace.weights.direct.rendezvous import Push, RendezvousClient
from millrace.weights.live.calls import GeneratorsClient
from millrace.weights.live.gloo import GlooTrainerInitInfo, destroy_group
from millrace.weights.live.source import ShardSource, SnapshotSource, m2n_limit

_ABORT_SECONDS = 5.0
"""Time for aborted transfers to end."""


class LiveSender:
    """Rank `rank` of the trainer, which sends its `snapshot` by vLLM's engine `transport` from `device`.

    Each generator has `workers` workers. `transports`: those that a push may use, best first. nccl is next after
    nccl_m2n, and takes its place if that can't send this model from here (`limit` says why).
    """

    def __init__(
        self,
        transport: str,
        layout: ShardLayout,
        rank: int,
        snapshot: Mapping[str, torch.Tensor],
        *,
        device: torch.device,
        workers: int,
    ) -> None:
        self.limit = m2n_limit(layout) if transport == "nccl_m2n" else ""
        self.transports = ("nccl_m2n", "nccl")[bool(self.limit) :] if transport == "nccl_m2n" else (transport,)
        self._layout, self._rank, self._workers = layout, rank, workers
        self._snapshot, self._device = snapshot, device
        # Besides the trainer's own, so that neither waits for the other's kernels.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._engine: TrainerWeightTransferEngine[Any] | None = None
        self._source: SnapshotSource | ShardSource | None = None
        # Of the engine.
        self._transport = ""
        self._members: dict[str, str] = {}
        # Of the push.
        self._calls: GeneratorsClient | None = None

    def send(self, client: RendezvousClient, push: Push, members: Mapping[str, str], until: float) -> int:
        """Sends this rank's part of a push to the generators among `members`; returns the bytes.

        Raises RuntimeError if it fails, or is not done by `until` (time.monotonic).
        """
        results: queue.Queue[int | str] = queue.Queue()
        # A connection for vLLM's thread, which makes the calls.
        connection = client.again(until - time.monotonic())
        calls = GeneratorsClient(connection, push, list(members)[self._layout.size :], until, results.put)

        def run() -> None:
            try:
                results.put(self._send(calls, members))
            except Exception as error:  # noqa: BLE001 — raised below
                results.put(str(error) or repr(error))

        thread = threading.Thread(target=run, name="push", daemon=True)
        thread.start()
        try:
            result = results.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            result = "the deadline passed while weights were on their way"
        if isinstance(result, int):
            return result
        calls.abort(result)
        self.close()
        thread.join(_ABORT_SECONDS)
        raise RuntimeError(result)

    def _send(self, calls: GeneratorsClient, members: Mapping[str, str]) -> int:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if self._members != members or self._transport != calls.push.transport:
            self.close()
        self._transport, self._calls = calls.push.transport, calls
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._engine is None:
                source = self._open_source(calls)
                if self._rank == 0:
                    # NCCL waits without a limit for a member that is not there.
                    calls.init_weight_transfer_engine(None)
                engine = WeightTransferTrainerFactory.trainer_init(self._init_info(calls), client=calls, source=source)
                if calls is not self._calls:
                    destroy_group(engine)
                    raise RuntimeError("the push was aborted")
                self._engine, self._source, self._members = engine, source, dict(members)
            assert self._source is not None
            self._engine.client = calls
            self._source.nbytes, self._source.until = 0, calls.until
            with _plain_segments() if self._transport == "ipc" else nullcontext():
                self._engine.send_weights()
            return self._source.nbytes

    def _open_source(self, calls: GeneratorsClient) -> SnapshotSource | ShardSource:
        if self._transport == "nccl_m2n":
            return ShardSource(self._layout, self._snapshot, self._device)
        group = None
        if self._layout.size > 1:
            group = PushGroup(
                PrefixStore(f"{calls.push.number}/ranks", calls.client.store),
                calls.client.host,
                self._device,
                rank=self._rank,
                size=self._layout.size,
                seconds=calls.until - time.monotonic(),
            )
        return SnapshotSource(self._layout, self._rank, self._snapshot, self._device, group)

    def _init_info(self, calls: GeneratorsClient) -> TrainerInitInfo:
        rank, receivers = self._rank, len(calls.generators) * self._workers
        client, seconds = calls.client, calls.until - time.monotonic()
        match self._transport:
            case "ipc":
                # vLLM refuses a tensor that is larger than the buffer.
                largest = max(tensor.nbytes for tensor in self._snapshot.values())
                size = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest)
                return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=size)
            case "gloo":
                return GlooTrainerInitInfo(
                    rank=rank, master_address=client.host, world_size=1 + receivers, seconds=seconds
                )
            case "nccl":
                return NCCLTrainerInitInfo(
                    rank=rank,
                    master_address=client.host,
                    master_port=_free_port(client.host),
                    world_size=1 + receivers,
                )
        if rank == 0:
            client.set(calls.push, "master", [client.host, _free_port(client.host)])
        host, port = client.get(calls.push, "master", seconds) or (None, None)
        return M2NTrainerInitInfo(
            rank=rank,
            master_address=host,
            master_port=port,
            world_size=self._layout.size + receivers,
            num_trainer_ranks=self._layout.size,
            dst_mesh_dims=(len(calls.generators), self._workers),
        )

    def close(self) -> None:
        """Aborts communicators; a thread that waits for a transfer then gets an error. The next push makes new ones."""
        source, engine = self._source, self._engine
        self._source = self._engine = self._calls = None
        self._members = {}
        if source is not None:
            source.cancelled = True
        destroy_group(engine)
        if isinstance(source, SnapshotSource) and source.group is not None:
            source.group.destroy()


@contextmanager
def _plain_segments() -> Iterator[None]:
    """In this block, this process's CUDA memory comes in segments of a fixed size, such as vLLM's buffer for IPC.

    Another process maps an expandable segment by `pidfd_getfd`, which Docker, Kubernetes and Ubuntu refuse by default.
    """
    # torch resets settings that a string leaves out.
    settings = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(with_conf_flag(settings, EXPANDABLE_SEGMENTS, enabled=False))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
