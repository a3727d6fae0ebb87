"""LoRA adapters in vLLM: one per policy version, loaded until the last request that began under it has ended.

    version v ─► PEFT's files in shared memory ─► add_lora ─► new requests begin under v
                                                               requests in flight finish under the adapter they have
    next version ─► adapters that no request uses any more: remove_lora, files removed

Nothing is sampled before the first adapter: the base model never stands in for a policy.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from millrace.errors import WeightsMismatch
from millrace.weights.base import Weights


@dataclass(kw_only=True)
class _Loaded:
    """A policy version in vLLM."""

    policy_version: int
    request: LoRARequest
    num_in_flight: int = 0
    """Requests that began under it and have not ended."""


class LoadedAdapters:
    """The adapters that vLLM holds, at most `num_slots`. Call its methods in vLLM's event loop."""

    def __init__(self, llm: AsyncLLM, num_slots: int) -> None:
        self._llm = llm
        self._num_slots = num_slots
        self._loaded: list[_Loaded] = []
        """Oldest first."""
        self._num_made = 0

    @property
    def has_room(self) -> bool:
        """Whether one more fits next to those in use. May be read from any thread."""
        return sum(adapter.num_in_flight > 0 for adapter in self._loaded) < self._num_slots

    @contextmanager
    def newest(self) -> Iterator[LoRARequest]:
        """Yields the adapter for a new request, and keeps it loaded meanwhile. Raises RuntimeError if there is none."""
        if not self._loaded:
            raise RuntimeError("no adapter is loaded, and the base model is not the policy")
        adapter = self._loaded[-1]
        adapter.num_in_flight += 1
        try:
            yield adapter.request
        finally:
            adapter.num_in_flight -= 1

    def version_of(self, request: LoRARequest | None) -> int:
        """The policy version of a loaded adapter, from the output of a request."""
        return next(adapter.policy_version for adapter in self._loaded if adapter.request == request)

    async def load(self, weights: Weights) -> None:
        """Loads a version; later requests begin under it. Raises WeightsMismatch if vLLM refuses it."""
        assert weights.shared is not None
        assert weights.manifest.adapter is not None
        # First the unused ones: with no slot free, vLLM would replace the one that was used longest ago.
        for unused in [adapter for adapter in self._loaded if not adapter.num_in_flight]:
            await self._llm.remove_lora(unused.request.lora_int_id)
            shutil.rmtree(unused.request.lora_path)
            self._loaded.remove(unused)
        version = weights.id.policy_version
        # vLLM reads these files again if it dropped the adapter meanwhile.
        folder = tempfile.mkdtemp(prefix=f"adapter-{version}-", dir=Path(weights.shared.path).parent)
        weights.manifest.adapter.write(Path(folder), weights.tensors)
        # The prefix cache is by name: after a roll-back, a version comes again with other weights.
        self._num_made += 1
        request = LoRARequest(f"version-{version}-{self._num_made}", self._num_made, folder)
        try:
            await self._llm.add_lora(request)
        except Exception as error:
            shutil.rmtree(folder)
            raise WeightsMismatch(f"vLLM refuses the adapter of version {version}: {error}") from error
        self._loaded.append(_Loaded(policy_version=version, request=request))

    def close(self) -> None:
        """Removes the files."""
        for adapter in self._loaded:
            shutil.rmtree(adapter.request.lora_path, ignore_errors=True)
