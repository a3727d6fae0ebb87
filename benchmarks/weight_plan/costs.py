"""What a push costs by its plan: bytes, balance, memory, time."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from millrace.planning.costs.model_shape import ModelShape, tensor_dims
from millrace.planning.costs.weight_sync import most_copies, push_seconds

from benchmarks.weight_plan.simulation import simulated_span
from millrace.weights.transfer.generator_layouts import vllm_layout
from millrace.weights.transfer.plan import TransferPlan, plan_transfer
from millrace.weights.transfer.trainer_layouts import fsdp_layout

_MOST_SIMULATED_RANKS = 128
_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a trainer and its generators."""

    model: ModelShape
    trainer_ranks: int
    trainer_tensor: int
    """Tensor ranks of the trainer; the others are data ranks."""
    generators: int
    workers: int
    """Of each generator: its tensor parallel size."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """What the machines can do, by assumption."""

    nvlink: float
    """GB/s of a GPU in one direction."""
    network: float
    """GB/s of a GPU between hosts, in one direction."""
    message_us: float
    """What each message costs besides its bytes, microseconds."""
    copy_us: float
    """What it costs to copy one region into a bucket or out of it, microseconds; the other bucket travels meanwhile."""

    def seconds(self, plan: TransferPlan, rate: float) -> float:
        """How long a push takes at `rate` GB/s."""
        return push_seconds(plan, rate * _GB, message_us=self.message_us, copy_us=self.copy_us)


def cost(case: Case, links: Links, *, bucket_bytes: int, dtype: str) -> dict[str, Any]:
    """One row: seconds and GB unless a name has another unit. Raises InputError for a layout that can't be."""
    tensors = case.model.tensors(dtype)
    source = fsdp_layout(
        tensors,
        data=case.trainer_ranks // case.trainer_tensor,
        tensor=case.trainer_tensor,
        tensor_dims=tensor_dims(tensors),
    )
    generator = vllm_layout(tensors, tensor=case.workers, num_heads=case.model.heads, num_kv_heads=case.model.kv_heads)
    begin = time.perf_counter()
    plan = plan_transfer(source, [generator] * case.generators, bucket_bytes=bucket_bytes)
    sent, received, digest = plan.sent, plan.received, plan.digest
    planned = time.perf_counter() - begin
    row = {
        **asdict(case),
        "model": case.model.name,
        "model_gb": sum(spec.itemsize * int(np.prod(spec.shape)) for spec in tensors) / _GB,
        "digest": digest,
        "planning": planned,
        "chains": len(plan.families[0].chains),
        "trainer_sends_gb": int(sent[: source.size].max()) / _GB,
        "worker_receives_gb": int(received.max()) / _GB,
        "worker_sends_gb": int(sent[source.size :].max()) / _GB,
        "sent_balance": plan.sent_balance,
        "received_balance": plan.received_balance,
        "trainer_extra_gb": (max(source.nbytes(rank) for rank in range(source.size)) + 2 * bucket_bytes) / _GB,
        "worker_extra_gb": (int(received.max()) + 2 * bucket_bytes) / _GB,
        "copies": most_copies(plan),
        "over_network": links.seconds(plan, links.network),
        "over_nvlink": links.seconds(plan, links.nvlink),
    }
    if plan.size <= _MOST_SIMULATED_RANKS:
        row["simulated_over_span"] = simulated_span(plan) / plan.span
    return row
