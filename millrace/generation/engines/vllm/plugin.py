"""The plugin that vLLM loads in each of its processes, by the entry point `vllm.general_plugins`.

It registers our transfer of weights, and has the sampler say which tokens it could draw from.

generator: VllmEngine.update_weights ── name of the file, or the trainer's call ──► each worker: WorkerEngine
"""

from contextlib import suppress

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

BACKEND = "millrace"
"""Name of the engine in vLLM's `weight_transfer_config`."""


def register() -> None:
    """Registers both. vLLM may call it several times per process."""
    omit_impossible_tokens()
    # vLLM offers no check whether it is registered already.
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, "millrace.generation.engines.vllm.worker", "WorkerEngine")


def omit_impossible_tokens() -> None:
    """Makes vLLM's sampler omit tokens that could not be drawn, if it is asked for the whole vocabulary's logprobs.

    Rows of a batch stay equally long: as long as the one with the most tokens left.
    """
    gather = Sampler.gather_logprobs
    if getattr(gather, "omits", False):
        return

    def gather_possible(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        if num_logprobs == logprobs.shape[-1]:
            num_logprobs = int(logprobs.isfinite().sum(dim=-1).max())
        return gather(logprobs, num_logprobs, token_ids)

    gather_possible.omits = True  # type: ignore[attr-defined]
    Sampler.gather_logprobs = staticmethod(gather_possible)
