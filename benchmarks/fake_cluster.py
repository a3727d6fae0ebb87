"""A trainer's step on GPUs that are not there: memory and traffic of one rank, measured and planned.

    preset, sizes of its model ─┬─► Trainer without values, rank 0 of all ranks ─► a step ─► bytes ─► measured ─┐
                                └─► planner ──────────────────────────────────────────────────────► planned  ──┴─► a row

Everything is the product's code: sharding, forward and backward pass of a full microbatch, clipping, AdamW. Tensors
are on the meta device, which has shapes and no values, and torch's fake process group has ranks that do not exist: a
step of 512 ranks takes seconds on one core. CUDA's kernels and sizes of chunks are chosen, as on a GPU.

Not measured: the CUDA context, NCCL's buffers, kernels' workspaces and fragmentation, for which the planner has a
reserve; and the intermediates of AdamW, which has none where it is fused.

    python -m benchmarks.fake_cluster [PRESET …] [--json PATH]
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers them
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import finish, make_parser, print_table
from configs.load import PRESETS, load_config
from configs.schema import RunConfig
from millrace.planning.hardware import GIB
from millrace.planning.memory import trainer_memory
from millrace.planning.models import published_config, shape_of_config
from millrace.planning.training import message_bytes, microbatch_traffic
from millrace.training import logprobs
from millrace.training.batch import Microbatch, Sample
from millrace.training.optimizer import zero_gradients
from millrace.training.packing import microbatches
from millrace.training.parallel.ranks import Ranks, local, make_mesh
from millrace.training.trainer import Trainer

WITHIN = 0.10
"""Share by which the planner may be off."""
NAMES = sorted(path.stem for path in PRESETS.glob("*gpu.yaml"))
_META = torch.device("meta")
_PROMPT, _RESPONSE = 256, 768
"""Tokens of each sample of the microbatch."""
_COLLECTIVES = {
    "_allgather_base_": "gathered",
    "_reduce_scatter_base_": "scattered",
    "allreduce_": "reduced",
    "all_reduce": "reduced",
}
"""Kinds of traffic by the names of torch's operations."""
_GATHERING = ("unshard", "wait_for_unshard", "post_backward")
"""Methods of FSDP2's groups of parameters that make whole weights, or gather and scatter them."""


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive, and those that collectives move; for the `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: Counter[str] = Counter()
        """Bytes by kind at the moment with the most."""
        self.traffic: Counter[str] = Counter()
        """Bytes of the whole tensors that collectives gather, scatter or reduce, by kind."""
        self.kind = "activations"
        """Kind of the tensors that are made from now on."""
        self._in_use: Counter[str] = Counter()
        self._storages = WeakIdKeyDictionary()
        """Each storage's kind, and the bytes that it is counted with."""
        self._patches = ExitStack()

    def hold(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        """Counts tensors that exist already."""
        for tensor in tensors:
            self._count(local(tensor).untyped_storage(), kind)

    def __enter__(self) -> "Meter":
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            """How FSDP2 frees whole weights, and gets memory for them again."""
            done = resize(storage, nbytes)
            self._count(storage, self.kind)
            return done

        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resized, create=True))
        for name in _GATHERING:
            method = self._as_gathered(getattr(FSDPParamGroup, name))
            self._patches.enter_context(patch.object(FSDPParamGroup, name, method))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            # It calls the same for this rank's part.
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                self._count(leaf.untyped_storage(), self.kind)
        if (kind := _COLLECTIVES.get(func.__name__.partition(".")[0])) is not None:
            self.traffic[kind] += max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return made

    def _as_gathered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            outer_kind, self.kind = self.kind, "gathered"
            try:
                return method(*args, **kwargs)
            finally:
                self.kind = outer_kind

        return called

    def _count(self, storage: torch.UntypedStorage, kind: str) -> None:
        counted = self._storages.get(storage)  # type: ignore[no-untyped-call]
        if counted is None:
            counted = self._storages[storage] = [kind, 0]
            finalize(storage, self._recount, counted, 0).atexit = False
        if storage.nbytes() != counted[1]:
            self._recount(counted, storage.nbytes())

    def _recount(self, counted: list[Any], nbytes: int) -> None:
        self._in_use[counted[0]] += nbytes - counted[1]
        counted[1] = nbytes
        if self._in_use.total() > self.peak.total():
            self.peak = Counter(self._in_use)


class _NoDevice:
    """torch.meta, if torch had it: streams and events of a device without work."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0


@contextmanager
def fake_ranks(*, data: int, tensor: int) -> Iterator[Ranks]:
    """Rank 0 on the meta device, for the `with` block; the others do not exist, and collectives return at once."""
    size = data * tensor
    with (
        patch.object(torch, "meta", _NoDevice(), create=True),
        # FSDP2 refuses to train parameters without values.
        patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
    ):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            mesh = make_mesh("meta", data=data, tensor=tensor)
            shares = {"data_rank": 0, "data_size": data, "tensor_rank": 0, "tensor_size": tensor}
            yield Ranks(rank=0, size=size, **shares, device=_META, mesh=mesh)
        finally:
            dist.destroy_process_group()


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Has the trainer compute tensors without values with CUDA's kernels and sizes."""
    with (
        patch.object(torch.Tensor, "is_cuda", True, create=True),
        patch.dict(logprobs.CHUNK_ELEMENTS, meta=logprobs.CHUNK_ELEMENTS["cuda"]),
    ):
        yield


def full_microbatch(tokens: int) -> Microbatch:
    """Returns a microbatch of `tokens` tokens, or a few less."""
    sample = Sample(
        prompt_tokens=np.zeros(_PROMPT, np.int32),
        response_tokens=np.zeros(_RESPONSE, np.int32),
        rollout_logprobs=np.zeros(_RESPONSE, np.float32),
        loss_mask=np.ones(_RESPONSE, np.uint8),
        temperature=1.0,
        advantage=1.0,
        staleness=0,
        max_new_tokens=_RESPONSE,
    )
    [batch] = microbatches([sample] * (tokens // (_PROMPT + _RESPONSE)), tokens, share_prefixes=False)
    return batch.to(_META)


def measure(config: RunConfig, sizes: Mapping[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Returns the peak memory of rank 0 and the traffic of a step on one microbatch, bytes by kind.

    `sizes` is the content of the model's config.json.
    """
    training, meter = config.training, Meter()
    with fake_ranks(data=training.parallel.data, tensor=training.parallel.tensor) as ranks:
        model_class: Any = AutoModelForCausalLM
        with _META:
            model = model_class.from_config(AutoConfig.for_model(**sizes), dtype=getattr(torch, config.model.dtype))
        trainer = Trainer(model, training, ranks=ranks)
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        zero_gradients(trained)
        meter.hold("parameters", list(trainer.model.parameters()))
        meter.hold("gradients", [parameter.grad for parameter in trained if parameter.grad is not None])
        # AdamW has two moments of each trained number from its first step on.
        moments = [torch.empty_like(local(parameter)) for parameter in trained for _ in range(2)]
        meter.hold("moments", moments)
        batch = full_microbatch(training.max_tokens_per_microbatch)
        with as_on_cuda(), meter:
            total = trainer.policy(batch)[0].sum()
            meter.kind = "temporaries"
            total.backward()
        torch.nn.utils.clip_grad_norm_(trained, training.max_grad_norm)
        trainer._optimizer.step()
    return meter.peak, meter.traffic


def plan(config: RunConfig, sizes: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the same as the planner has it, without its reserve."""
    shape, parallel = shape_of_config(sizes, config.name), config.training.parallel
    memory, traffic = asdict(trainer_memory(shape, config)), microbatch_traffic(shape, config)
    del memory["reserved"]
    moved: dict[str, float] = {}
    if parallel.data > 1:
        moved = {"gathered": traffic.gathered, "scattered": traffic.scattered}
    if parallel.tensor > 1:
        message = message_bytes(shape, config, config.training.max_tokens_per_microbatch)
        moved["reduced"] = traffic.reductions * message
    return memory, moved


def compare(name: str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Measures and plans a preset, changed by `settings`."""
    # Compiled layers need less; the planner has their memory uncompiled.
    config = load_config(PRESETS / f"{name}.yaml", ["training.compile=false", *settings])
    sizes = published_config(Path(config.model.path or "").name)
    began = time.process_time()
    memory, traffic = measure(config, sizes)
    seconds = time.process_time() - began
    planned_memory, planned_traffic = plan(config, sizes)
    parallel = config.training.parallel
    return {
        "preset": name,
        "ranks": parallel.data * parallel.tensor,
        "cpu_seconds": seconds,
        "memory": {"measured": dict(memory), "planned": planned_memory},
        "traffic": {"measured": dict(traffic), "planned": planned_traffic},
        "memory_ratio": sum(planned_memory.values()) / memory.total(),
        "traffic_ratios": {kind: planned_traffic[kind] / nbytes for kind, nbytes in traffic.items()},
    }


def main() -> None:
    """Compares presets, prints a table and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"some of {', '.join(NAMES)}; default: all")
    arguments = parser.parse_args()
    if unknown := set(arguments.presets) - set(NAMES):
        raise SystemExit(f"{min(unknown)}: expected some of {', '.join(NAMES)}")
    torch.set_num_threads(1)
    rows = [compare(name) for name in arguments.presets or NAMES]
    ratios = [ratio for row in rows for ratio in (row["memory_ratio"], *row["traffic_ratios"].values())]
    _print(rows)
    met = all(abs(ratio - 1) <= WITHIN for ratio in ratios)
    finish(arguments.json, {"rows": rows, "targets": {f"memory and traffic within {WITHIN:.0%}": met}})


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    states, kinds = ("parameters", "gradients", "moments"), ("gathered", "activations", "temporaries")
    moves = ("gathered", "scattered", "reduced")
    lines = []
    for row in rows:
        names = {"measured": row["preset"], "planned": f"{row['ranks']} ranks, {row['cpu_seconds']:.0f} s of CPU"}
        for source, name in names.items():
            memory, traffic = Counter(row["memory"][source]), Counter(row["traffic"][source])
            figures = [sum(memory[kind] for kind in states), *(memory[kind] for kind in kinds), memory.total()]
            figures += [traffic[kind] for kind in moves]
            lines.append([name, source, *(f"{figure / GIB:.2f}" for figure in figures)])
        ratios = [row["memory_ratio"], *(row["traffic_ratios"].get(kind) for kind in moves)]
        lines.append(
            ["", "difference", "", "", "", "", *("" if ratio is None else f"{ratio - 1:+.1%}" for ratio in ratios)]
        )
    headings = ("", "", "states", *kinds, "total", *moves)
    print_table("GiB per rank: memory at its peak by kind, and traffic of a microbatch", headings, lines)


if __name__ == "__main__":
    main()
