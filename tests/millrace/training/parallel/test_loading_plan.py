"""Which bytes each rank of a large trainer reads and writes: all of them once, counted over a replica.

A fake process group stands for up to 256 ranks, and weight files of a header alone for the model.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from millrace.training.checkpoints.files import blocks_to_write
from millrace.training.checkpoints.reading import plan_reads
from millrace.training.lora import base_name
from millrace.training.parallel.loading import StartModel
from millrace.training.parallel.ranks import REPLICATE, Ranks, make_mesh
from millrace.training.parallel.sharding import shard
from millrace.training.policy import PackedPolicy

Box = tuple[tuple[int, int], ...]
"""Begin and end along each dimension."""
LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=1,
    num_attention_heads=32,
    num_key_value_heads=8,
)
"""Of Llama 3.1 8B; all its 32 layers are alike."""
EXPERTS = Qwen3MoeConfig(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    moe_intermediate_size=48,
    num_experts=12,
)


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    # A trainer of another test leaves a group of one rank.
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    dist.destroy_process_group()


def write_header(folder: Path, config: PretrainedConfig, *, with_experts: bool) -> None:
    """A model folder whose weight file has no values."""
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, list[int]] = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    if with_experts:
        # As in the files on the hub: each expert separately.
        shapes = {
            f"{name.removesuffix(merged)}{expert}.{part}.weight" if merged else name: part_shape
            for name, shape in shapes.items()
            for merged, expert, part, part_shape in _experts(name, shape)
        }
    described: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        described[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def _experts(name: str, shape: list[int]) -> Iterator[tuple[str, int, str, list[int]]]:
    """(ending of the merged tensor, expert, matrix, its shape) of each stored tensor."""
    if name.endswith("gate_up_proj"):
        for expert, part in itertools.product(range(shape[0]), ("gate_proj", "up_proj")):
            yield "gate_up_proj", expert, part, [shape[1] // 2, shape[2]]
    elif name.endswith("experts.down_proj"):
        for expert in range(shape[0]):
            yield "down_proj", expert, "down_proj", shape[1:]
    else:
        yield "", 0, "", shape


def move_to(coordinate: dict[str, int], parameters: dict[str, torch.Tensor]) -> None:
    """Makes this process the rank at `coordinate` of the meshes of `parameters`."""
    for parameter in parameters.values():
        assert isinstance(parameter, DTensor)
        names = parameter.device_mesh.mesh_dim_names or ()
        parameter.device_mesh._coordinate_on_dim = tuple(coordinate[name] for name in names)


def volume(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


def disjoint(boxes: set[Box]) -> bool:
    pairs = itertools.combinations(boxes, 2)
    return not any(all(a < d and c < b for (a, b), (c, d) in zip(*pair, strict=True)) for pair in pairs)


@pytest.mark.parametrize(
    ("config", "data", "tensor", "divide"),
    [
        pytest.param(LLAMA_8B, 8, 1, None, id="llama 8x1"),
        pytest.param(LLAMA_8B, 4, 8, None, id="llama 4x8"),
        pytest.param(LLAMA_8B, 16, 1, 8, id="llama 16x1 of 8"),
        pytest.param(LLAMA_8B, 32, 8, None, id="llama 32x8", marks=pytest.mark.slow),
        pytest.param(LLAMA_8B, 32, 8, 8, id="llama 32x8 of 8", marks=pytest.mark.slow),
        pytest.param(EXPERTS, 8, 1, None, id="experts 8x1"),
        pytest.param(EXPERTS, 32, 1, 16, id="experts 32x1 of 16"),
    ],
)
def test_ranks_read_and_write_each_element_once(
    config: PretrainedConfig, data: int, tensor: int, divide: int | None, tmp_path: Path
) -> None:
    write_header(tmp_path / "model", config, with_experts=config is EXPERTS)
    dist.init_process_group("fake", rank=0, world_size=data * tensor, store=FakeStore())
    mesh = make_mesh("cpu", data=data, tensor=tensor, shard=divide)
    ranks = Ranks(
        rank=0,
        size=data * tensor,
        data_rank=0,
        data_size=data,
        tensor_rank=0,
        tensor_size=tensor,
        device=torch.device("cpu"),
        mesh=mesh,
    )
    start = StartModel(tmp_path / "model", "bfloat16", seed=0)
    policy = PackedPolicy(start.empty())
    shard(policy, ranks)
    parameters = {base_name(name): parameter for name, parameter in policy.model.named_parameters()}
    dims = mesh.mesh_dim_names or ()
    read: dict[tuple[int, str], set[Box]] = defaultdict(set)
    written: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for at in itertools.product(*(range(mesh.size(dim)) for dim in range(mesh.ndim))):
        coordinate = dict(zip(dims, at, strict=True))
        move_to(coordinate, parameters)
        for extent, item in plan_reads(parameters, start.stored):
            begins = [a + b for a, b in zip(extent.offsets, item.storage_offsets, strict=True)]
            box = tuple((begin, begin + length) for begin, length in zip(begins, item.lengths, strict=True))
            read[coordinate.get(REPLICATE, 0), item.dest_index.fqn].add(box)
        for name, block in blocks_to_write(parameters, rank=1):
            written[name].append(block.offsets)
    assert len(read) == ranks.replicas * len(parameters)
    for (_, name), boxes in read.items():
        assert sum(map(volume, boxes)) == parameters[name].numel(), name
        assert disjoint(boxes), name
    for name, offsets in written.items():
        # A block is written by one rank of one replica.
        assert len(offsets) == len(set(offsets)), name
    assert written.keys() == parameters.keys()
