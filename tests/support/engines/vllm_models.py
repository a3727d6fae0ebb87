"""vLLM's own model in this process, behind the engine with which a worker loads weights: no core, no cache, no kernel
of attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from support.engines.vllm_processes import ENGINE_ARGS
from transformers import PreTrainedModel

from millrace.generation.engines.vllm.startup import vllm_arguments
from millrace.weights.base import Weights

if TYPE_CHECKING:
    from millrace.generation.engines.vllm.worker import WorkerEngine


@contextmanager
def one_process_group(folder: Path) -> Iterator[None]:
    """vLLM's groups of ranks, with this process as the only one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    try:
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(1, 0, f"file://{folder / 'rendezvous'}", 0, "gloo")
            parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def worker_engine(model: PreTrainedModel, folder: Path, **engine_args: Any) -> "WorkerEngine":
    """Loads the model, whose files are put into `folder`, in its dtype. Call it in `one_process_group`."""
    # Late: only the tests marked `vllm` need it, and it takes seconds to import.
    from vllm.config import WeightTransferConfig, set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.model_loader import get_model

    from millrace.generation.engines.vllm.worker import WorkerEngine

    model.save_pretrained(folder)
    dtype = str(model.dtype).removeprefix("torch.")
    arguments = vllm_arguments(folder, dtype=dtype, engine_args={**ENGINE_ARGS, **engine_args})
    transfer = arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
    config = AsyncEngineArgs(**arguments).create_engine_config()
    # vLLM's workers on a CPU replace this function too.
    with mock.patch.object(torch.accelerator, "empty_cache"), set_current_vllm_config(config):
        vllm_model = get_model(vllm_config=config)
    return WorkerEngine(transfer, config, torch.device("cpu"), vllm_model)


def update(engine: "WorkerEngine", weights: Weights) -> None:
    """Loads a version as a worker does."""
    from vllm.config import set_current_vllm_config

    from millrace.generation.engines.vllm.worker import Update

    assert weights.shared is not None
    with set_current_vllm_config(engine.vllm_config):
        engine.start_weight_update()
        engine.receive_weights(Update(tensors=weights.shared.to_json()))
        engine.finish_weight_update()
