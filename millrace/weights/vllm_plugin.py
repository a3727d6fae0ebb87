"""What vLLM loads in each of its processes, by the entry point `vllm.general_plugins`: our way of getting new weights.

generator: VllmEngine.update_weights ──"they lie in this file"──► each worker: SharedMemoryEngine ──► its model
"""

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

BACKEND = "millrace"
"""Name of the engine in vLLM's `weight_transfer_config`."""


def register() -> None:
    """Makes the engine known; vLLM may call it several times in one process."""
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "millrace.weights.vllm_worker", "SharedMemoryEngine")
    except ValueError:
        # Known already: vLLM has no way to ask.
        return
