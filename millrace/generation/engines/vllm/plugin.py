"""The plugin that vLLM loads in each of its processes, by the entry point `vllm.general_plugins`.

It registers our transfer of weights, and has the sampler say which tokens it could draw from (`kept_tokens`).

generator: VllmEngine.update_weights ── name of the file ──► each worker: SharedMemoryEngine ──► its model
"""

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from millrace.generation.engines.vllm.kept_tokens import leave_out_the_impossible

BACKEND = "millrace"
"""Name of the engine in vLLM's `weight_transfer_config`."""


def register() -> None:
    """What the module says. vLLM may call it several times per process."""
    leave_out_the_impossible()
    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "millrace.generation.engines.vllm.worker", "SharedMemoryEngine"
        )
    except ValueError:
        # Registered already: vLLM offers no check.
        return
