"""New weights in a vLLM worker by one of vLLM's own engines, which the trainer's calls name, or from shared memory.

init: ipc, nccl, nccl_m2n, gloo; join ─► start ─► update: receive ─► hash right? ─► names of files ─► load ─► finish
                                            └───► update: map the file ─────────────► names of files ─► load ───┘

The generator's process verifies every byte before it names a file, and does not change the file until this is done.
Every rank of a tensor-parallel group maps the same pages and copies only its own share.
"""

import copy
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from millrace.errors import WeightsCorrupt
from millrace.generation.engines.vllm import reload
from millrace.models.loading import empty_model
from millrace.weights.direct.rendezvous import RendezvousClient
from millrace.weights.fingerprint import hash_parts
from millrace.weights.live.gloo import destroy_group
from millrace.weights.live.handles import decode_handles
from millrace.weights.shared_tensors import SharedTensors

_LOOK_SECONDS, _CONNECT_SECONDS = 0.5, 30.0
"""Between two looks whether a push is aborted; most to connect in, name servers included."""


@dataclass
class Init(WeightTransferInitInfo):
    """The engine to receive with."""

    backend: str
    info: dict[str, Any] | None
    """Its own init info, to join the group with; None before all members are ready."""
    index: int
    """Position of this generator among those of the push."""
    watch: dict[str, Any]
    """As in `Update`."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """One policy version, or a part of it: in shared memory, or on its way."""

    tensors: dict[str, Any] | None = None
    """`SharedTensors` as JSON."""
    info: dict[str, Any] | None = None
    """Update info of the engine that receives."""
    hashes: dict[str, Any] | None = None
    """`Fingerprint` as JSON."""
    watch: dict[str, Any] | None = None
    """Where the trainer says that it aborts: `address` and `key`; and the `seconds` to receive the version in."""


class WorkerEngine(WeightTransferEngine[Init, Update]):
    """Loads from shared memory, or receives by vLLM's engine that the trainer names.

    After an error a whole update has to follow.
    """

    init_info_cls = Init
    update_info_cls = Update
    _engine: WeightTransferEngine[Any, Any] | None = None
    _is_torn = False
    """Whether the last update has begun and not ended."""
    _is_live = False
    """Whether the engine that the trainer named has begun this update."""

    def init_transfer_engine(self, init_info: Init) -> None:
        """Leaves the last group and makes the engine; called again with its init info, joins the trainer's group.

        Raises RuntimeError if the trainer aborts the push, or the deadline passes, before all members have joined.
        """
        if init_info.info is not None:
            self._join(init_info.info, _Watch(**init_info.watch))
            return
        self.shutdown()
        config = WeightTransferConfig(backend=init_info.backend)
        engine = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, self.model)
        # Generators are to vLLM's engines what its data-parallel ranks are: each has `world_size` workers.
        engine.parallel_config = copy.copy(self.parallel_config)
        engine.parallel_config.data_parallel_index = init_info.index
        self._engine = engine

    def _join(self, info: dict[str, Any], watch: "_Watch") -> None:
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
                destroy_group(engine)

        threading.Thread(target=join, daemon=True).start()
        while not wait([joined], _LOOK_SECONDS).done:
            if watch.is_over():
                self._engine = None
                raise RuntimeError("the push was aborted, or the deadline passed, while this worker joined")
        joined.result()

    def start_weight_update(self) -> None:
        """Drops the remains of a failed update."""
        if self._is_torn:
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_torn = True
        self._is_live = False

    def receive_weights(self, update_info: Update) -> None:
        """Receives and loads the weights.

        Raises WeightsCorrupt for tensors with other hashes than the trainer's, and WeightsMismatch if a layer did not
        receive all weights of a file in shared memory.
        """
        if update_info.tensors is not None:
            tensors = SharedTensors.from_json(update_info.tensors).map()
            reload.begin(self.model, partial(initialize_layerwise_reload, self.model))
            self.model.load_weights(self._as_in_files(tensors))
            reload.check(self.model)
            return
        try:
            self._receive(update_info)
        except BaseException:
            # The other members notice that this one is gone.
            self.shutdown()
            raise

    def _receive(self, update_info: Any) -> None:
        engine = self._engine
        if engine is None or update_info.info is None:
            raise RuntimeError("the update was given up")
        if not self._is_live:
            self._is_live = True
            reload.begin(self.model, engine.start_weight_update)
        with self._aborting(_Watch(**update_info.watch)), self._checked_loading(update_info.hashes):
            engine.receive_weights(engine.parse_update_info(decode_handles(update_info.info)))
        if self._engine is not engine:
            raise RuntimeError("the push was aborted, or the deadline has passed")

    def finish_weight_update(self) -> None:
        """Ends the reload; the new weights are live. Raises WeightsMismatch if a layer did not receive all of them."""
        if self._is_live:
            assert self._engine is not None
            reload.check(self.model, written=self._written_in_place())
            self._engine.finish_weight_update()
        reload.finish(self.model, self.model_config)
        self._is_torn = False

    def _written_in_place(self) -> set[str]:
        """Parameters that nccl_m2n writes in place."""
        return {each.name for each in getattr(self._engine, "_parameter_destinations", ()) if each.direct}

    @contextmanager
    def _aborting(self, watched: "_Watch") -> Iterator[None]:
        """Leaves the group if the block is not done in time, or the trainer or sync_weights gives the push up."""
        done = threading.Event()

        def watch() -> None:
            # A short update needs no connection.
            while not done.wait(_LOOK_SECONDS):
                if watched.is_over():
                    self.shutdown()
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
            loaded: set[str] | None = load(self._checked(weights, hashes))
            if self.device.type == "cuda":
                # Each pack has its own stream. vLLM 0.32 loads a layer that two packs divide in the second one's.
                torch.cuda.current_stream().synchronize()
            return loaded

        self.model.load_weights = checked
        try:
            yield
        finally:
            del self.model.load_weights

    def _checked(
        self, weights: Iterable[tuple[str, torch.Tensor]], hashes: dict[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            boxes = hashes["boxes"].get(name, ())
            if hash_parts(tensor, boxes, hashes["method"]) != hashes["tensors"][name]:
                raise WeightsCorrupt(f"{name} arrived damaged")
            yield from self._as_in_files({name: tensor})

    def _as_in_files(self, tensors: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        return reload.as_in_files(tensors, self._skeleton) if self._converts else tensors.items()

    @cached_property
    def _converts(self) -> bool:
        """Whether names or shapes in files differ from transformers'."""
        # `add_legacy`: renames of very old files, which every model has.
        return bool(get_model_conversion_mapping(self._skeleton, add_legacy=False))

    @cached_property
    def _skeleton(self) -> PreTrainedModel:
        """transformers' model without values, which knows the names of parameters and of files."""
        return empty_model(Path(self.model_config.model))

    def shutdown(self) -> None:
        """Leaves the group. A transfer that is under way ends."""
        engine, self._engine = self._engine, None
        destroy_group(engine)


class _Watch:
    """Watches whether a push continues; `key` is set in the rendezvous at `address` if it is aborted."""

    def __init__(self, address: str, key: str, seconds: float) -> None:
        self._address, self._key = address, key
        self._until = time.monotonic() + seconds
        self._store: Store | None = None

    def is_over(self) -> bool:
        """Whether `seconds` have passed, the push is aborted, or sync_weights is gone.

        Connecting, at the first call, does not outlast the deadline. The connection is kept: TCPStore asks the name
        server at each new one, and waits 5 s for an answer that is lost.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            return True
        try:
            if self._store is None:
                self._store = RendezvousClient(self._address, "worker", min(left, _CONNECT_SECONDS)).store
            aborted: bool = self._store.check([self._key])
        except (OSError, DistError):
            return True
        return aborted
