"""The engine of a vLLM worker for live pushes, without vLLM: its model keeps the tensors that it loads."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from millrace.errors import WeightsNotReceived
from millrace.generation.engines.vllm.worker import WorkerEngine
from millrace.weights.base import Weights
from millrace.weights.live.calls import INIT, START, UPDATE


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.received[name] = tensor.clone()


class _Worker(WorkerEngine):
    _converts = False  # type: ignore[assignment]


class WorkerAlone:
    """An engine with one worker, in this process."""

    def __init__(self) -> None:
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config: Any = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace())
        self.model = _Model()
        model: Any = self.model
        self.worker = _Worker(SimpleNamespace(), config, torch.device("cpu"), model)  # type: ignore[arg-type]
        self.received = self.model.received

    def update_weights(self, weights: Weights) -> float:
        """Serves a push as `VllmEngine` does."""
        push = weights.live
        assert push is not None
        try:
            for method, argument in push.calls():
                self._perform(method, argument)
        except Exception as error:
            push.end(repr(error))
            raise WeightsNotReceived(repr(error)) from error
        return 0.0

    def _perform(self, method: str, argument: Any) -> None:
        worker = self.worker
        if method == INIT:
            worker.init_transfer_engine(worker.parse_init_info(argument))
        elif method == START:
            worker.start_weight_update()
        elif method == UPDATE:
            # Not by `update_weights`, which waits for a device that only vLLM's workers have.
            worker.receive_weights(worker.parse_update_info(argument))
        else:
            worker.finish_weight_update()
