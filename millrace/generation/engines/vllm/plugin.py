"""The plugin that vLLM loads in each of its processes, by the entry point `vllm.general_plugins`.

generator: VllmEngine.update_weights ── name of the file ──► each worker: SharedMemoryEngine ──► its model
"""

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

BACKEND = "millrace"
"""Name of the engine in vLLM's `weight_transfer_config`."""


def register() -> None:
    """Registers our weight transfer engine. vLLM may call it several times per process."""
    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "millrace.generation.engines.vllm.worker", "SharedMemoryEngine"
        )
    except ValueError:
        # Registered already: vLLM offers no check.
        return
