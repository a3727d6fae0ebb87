"""The start of the train stage: its CUDA memory grows in place, unless the user set something else."""

import pytest
import torch

from millrace.stages.train.main import use_expandable_segments


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_are_expandable_unless_the_user_set_the_allocator(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "expandable_segments:False")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    use_expandable_segments()
    expected = "expandable_segments:" + str(name is None)
    try:
        assert torch._C._accelerator_getAllocatorSettings() == expected
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
