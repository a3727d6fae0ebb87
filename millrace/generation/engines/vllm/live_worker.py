"""New weights in a vLLM worker by one of vLLM's own engines, which the trainer's calls name, or from shared memory.

init: ipc, nccl, nccl_m2n, gloo; join ─► start ─► update: receive ─► hash right? ─► names of files ─► load ─► finish
                                            └───► update: a file in shared memory (`worker.py`) ───────────────┘
"""

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed import DistError
from transformers.conversion_mapping import get_model_conversion_mapping
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from millrace.errors import WeightsCorrupt
from millrace.generation.engines.vllm.reload_audit import begin_reload, check_reload
from millrace.generation.engines.vllm.worker import SharedMemoryEngine, Update, as_in_files, experts_on_a_cpu
from millrace.weights.direct.rendezvous import RendezvousClient
from millrace.weights.fingerprint import hash_parts
from millrace.weights.live.gloo import register_worker
from millrace.weights.live.handles import decode_handles

_LOOK_SECONDS, _CONNECT_SECONDS = 0.5, 30.0
"""Between two looks whether a push is aborted; most to connect in, name servers included."""


@dataclass
class LiveInit(WeightTransferInitInfo):
    """The engine to receive with."""

    backend: str
    info: dict[str, Any] | None
    """Its own init info, to join the group with; None before all members are ready."""
    index: int
    """Position of this generator among those of the push."""
    watch: dict[str, Any]
    """As in `LiveUpdate`."""


@dataclass
class LiveUpdate(WeightTransferUpdateInfo):
    """One policy version, or a part of it: in shared memory, or on its way."""

    tensors: dict[str, Any] | None = None
    """`SharedTensors` as JSON."""
    info: dict[str, Any] | None = None
    """Update info of the engine that receives."""
    hashes: dict[str, Any] | None = None
    """`Fingerprint` as JSON."""
    watch: dict[str, Any] | None = None
    """Where the trainer says that it aborts: `address` and `key`; and the `seconds` to receive the version in."""


class LiveEngine(SharedMemoryEngine):
    """Receives by vLLM's engine that the trainer names. After an error a whole update has to follow."""

    init_info_cls: Any = LiveInit
    update_info_cls: Any = LiveUpdate
    _engine: WeightTransferEngine[Any, Any] | None = None
    _is_torn = False
    """Whether the last update has begun and not ended."""
    _is_live = False
    """Whether the engine that the trainer named has begun this update."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Leaves the last group and makes the engine; called again with its init info, joins the trainer's group.

        Raises RuntimeError if the trainer aborts the push, or the deadline passes, before all members have joined.
        """
        if init_info.info is not None:
            self._join(init_info.info, init_info.watch)
            return
        register_worker()
        self._abort()
        config = WeightTransferConfig(backend=init_info.backend)
        engine = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, self.model)
        # Generators are to vLLM's engines what its data-parallel ranks are: each has `world_size` workers.
        engine.parallel_config = copy.copy(self.parallel_config)
        engine.parallel_config.data_parallel_index = init_info.index
        self._engine = engine

    def _join(self, info: dict[str, Any], watch: dict[str, Any]) -> None:
        """Joins in a thread, which is left behind if the group does not form: vLLM's engines wait without a limit."""
        engine, joined = self._engine, Future[None]()
        if engine is None:
            raise RuntimeError("the push was given up")

        def join() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                engine.init_transfer_engine(engine.parse_init_info(info))
                joined.set_result(None)
            except Exception as error:  # noqa: BLE001 — raised below
                joined.set_exception(error)
            if self._engine is not engine:
                _leave(engine)

        until, is_aborted = time.monotonic() + watch["seconds"], _look_for_abort(**watch)
        threading.Thread(target=join, daemon=True).start()
        while not wait([joined], _LOOK_SECONDS).done:
            if time.monotonic() > until or is_aborted():
                self._engine = None
                raise RuntimeError("the push was aborted, or the deadline passed, while this worker joined")
        joined.result()

    def start_weight_update(self) -> None:
        """Drops the remains of a failed update."""
        if self._is_torn:
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_torn = True
        self._is_live = False

    def receive_weights(self, update_info: Any) -> None:
        """Receives and loads the weights. Raises WeightsCorrupt for tensors with other hashes than the trainer's."""
        if update_info.tensors is not None:
            super().receive_weights(Update(tensors=update_info.tensors))
            return
        try:
            self._receive(update_info)
        except BaseException:
            # The other members notice that this one is gone.
            self._abort()
            raise

    def _receive(self, update_info: Any) -> None:
        engine = self._engine
        if engine is None or update_info.info is None:
            raise RuntimeError("the update was given up")
        if not self._is_live:
            self._is_live = True
            begin_reload()
            engine.start_weight_update()
            for method in experts_on_a_cpu(self.model):
                method.moe_kernel = None
        with self._aborting(**update_info.watch), self._checked_loading(update_info.hashes):
            engine.receive_weights(engine.parse_update_info(decode_handles(update_info.info)))
        if self._engine is not engine:
            raise RuntimeError("the push was aborted, or the deadline has passed")

    def finish_weight_update(self) -> None:
        """Ends the reload; the new weights are live. Raises WeightsMismatch if a layer did not receive all of them."""
        if self._is_live:
            assert self._engine is not None
            check_reload(self.model, written=self._written_in_place())
            self._engine.finish_weight_update()
        super().finish_weight_update()
        self._is_torn = False

    def shutdown(self) -> None:
        """Leaves the group."""
        self._abort()

    def _written_in_place(self) -> set[str]:
        """Parameters that nccl_m2n writes in place."""
        return {each.name for each in getattr(self._engine, "_parameter_destinations", ()) if each.direct}

    @contextmanager
    def _aborting(self, address: str, key: str, seconds: float) -> Iterator[None]:
        """Leaves the group if the block is not done in time, or the trainer or sync_weights gives the push up."""
        until, done = time.monotonic() + seconds, threading.Event()

        def watch() -> None:
            is_aborted = None
            while not done.wait(_LOOK_SECONDS):
                # A short update needs no connection. Connecting does not outlast the deadline.
                is_aborted = is_aborted or _look_for_abort(address, key, until - time.monotonic())
                if time.monotonic() > until or is_aborted():
                    self._abort()
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @contextmanager
    def _checked_loading(self, hashes: dict[str, Any]) -> Iterator[None]:
        """In this block the model's `load_weights` takes transformers' names, and compares hashes."""
        load = self.model.load_weights

        def checked(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
            loaded: set[str] | None = load(self._as_in_files(weights, hashes))
            if self.device.type == "cuda":
                # Each pack has a stream of its own. vLLM 0.32 loads a layer that two packs divide in the second one's.
                torch.cuda.current_stream().synchronize()
            return loaded

        self.model.load_weights = checked
        try:
            yield
        finally:
            del self.model.load_weights

    def _as_in_files(
        self, weights: Iterable[tuple[str, torch.Tensor]], hashes: dict[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            boxes = hashes["boxes"].get(name, ())
            if hash_parts(tensor, boxes, hashes["method"]) != hashes["tensors"][name]:
                raise WeightsCorrupt(f"{name} arrived damaged")
            yield from as_in_files({name: tensor}, self._skeleton) if self._converts else [(name, tensor)]

    @cached_property
    def _converts(self) -> bool:
        """Whether names or shapes in files differ from transformers'."""
        return bool(get_model_conversion_mapping(self._skeleton, add_legacy=False))

    def _abort(self) -> None:
        """Leaves the group. A transfer that is under way ends."""
        engine, self._engine = self._engine, None
        _leave(engine)


def _leave(engine: WeightTransferEngine[Any, Any] | None) -> None:
    """Destroys the engine's communicator, but not the engine: vLLM's `shutdown` waits for the device."""
    group = getattr(engine, "model_update_group", None)
    if group is not None:
        group.destroy()


def _look_for_abort(address: str, key: str, seconds: float) -> Callable[[], bool]:
    """Connects within `seconds`. Returns a function that reports whether the push is aborted, or sync_weights is gone.

    It keeps the connection: TCPStore asks the name server at each new one, and waits 5 s for an answer that is lost.
    """
    if seconds <= 0:
        return lambda: True
    try:
        store = RendezvousClient(address, "worker", min(seconds, _CONNECT_SECONDS)).store
    except (OSError, DistError):
        return lambda: True

    def is_aborted() -> bool:
        try:
            aborted: bool = store.check([key])
        except DistError:
            return True
        return aborted

    return is_aborted
