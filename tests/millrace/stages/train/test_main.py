"""The start of the train stage: CUDA memory grows in place, unless the user set something else, and layers compile."""

from collections.abc import Callable

import pytest
import torch
from support.stages.trainer_bench import TrainerBench
from transformers import LlamaForCausalLM

from millrace.stages.train.main import use_expandable_segments
from millrace.training.trainer import Trainer
from storage.stores.memory import MemoryStore


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


@pytest.mark.parametrize(
    ("compiles", "shares_device", "expected"), [(True, False, [[0]]), (False, False, []), (True, True, [])]
)
def test_a_trainer_compiles_once_the_generators_have_its_weights(
    memory_store: MemoryStore,
    make_model: Callable[..., LlamaForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
    compiles: bool,
    shares_device: bool,
    expected: list[list[int]],
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    bench = TrainerBench(memory_store, make_model, training={"compile": compiles, "max_steps": 1})
    placement = bench.config.placement.model_copy(update={"colocated": shares_device})
    bench.config = bench.config.model_copy(update={"placement": placement})
    for group in range(2):
        bench.commit(group, [[0], [0]])
    handed_over: list[list[int]] = []
    monkeypatch.setattr(Trainer, "warm_up", lambda _: handed_over.append([*bench.bounds]))
    assert bench.train() == 1
    # Nothing is left to train.
    assert bench.train() == 1
    assert handed_over == expected
