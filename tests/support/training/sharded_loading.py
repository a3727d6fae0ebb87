"""Ranks that read their slices of a model folder are compared with ranks that load it whole and divide it then.

test ─► torchrun ─► every rank: both trainers, a step with each, for each layout and case ─► rank 0: report.json ─► test

Started as `python -m torch.distributed.run … sharded_loading.py REPORT`, or with a model folder as a further argument:
then each rank loads that folder, and measures the bytes that it reads and holds.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.training.sharded_trainers import (
    LAYOUTS,
    Layout,
    samples,
    tiny_gemma2,
    tiny_gemma3,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from configs.training import TrainingConfig
from millrace.models.loading import load_model
from millrace.training.parallel.messages import exchange
from millrace.training.parallel.ranks import Ranks, local
from millrace.training.trainer import Trainer, load_trainer

SEED = 5
_TRAINING: dict[str, Any] = {"max_steps": 9, "learning_rate": 1e-2, "max_tokens_per_microbatch": 24}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model folder and its training."""

    model: Callable[[], PreTrainedModel]
    dtype: str = "float32"
    stored: torch.dtype = torch.float32
    training: Mapping[str, Any] = field(default_factory=dict)
    file_size: str = "1GB"
    """Maximum size of a weight file."""
    divisible: bool = True
    """Whether tensor ranks can divide its layers."""
    on_four: bool = False
    """Whether four ranks load it too, not only two."""

    def runs_on(self, layout: Layout) -> bool:
        """Whether ranks of this layout load it."""
        return (self.divisible or layout.tensor == 1) and (self.on_four or layout.data * layout.tensor == 2)


def tiny_mixtral() -> PreTrainedModel:
    """Three experts, fewer than there are ranks, under other names in the files."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=3)
    return MixtralForCausalLM(config)


_LORA = {"lora": {"rank": 3, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]}}
CASES = {
    "tied": Case(model=tiny_llama),
    "several files": Case(model=tiny_qwen3, file_size="20KB", on_four=True),
    "stored in bfloat16": Case(model=tiny_qwen3, stored=torch.bfloat16),
    "wider masters": Case(model=tiny_llama, dtype="bfloat16"),
    "scaled embeddings": Case(model=tiny_gemma2),
    "two rotary embeddings": Case(model=tiny_gemma3),
    "experts": Case(model=tiny_qwen3_moe, divisible=False, file_size="20KB"),
    "fewer experts than ranks": Case(model=tiny_mixtral, divisible=False, on_four=True),
    "adapters": Case(model=tiny_qwen3, dtype="bfloat16", training=_LORA, on_four=True),
    "adapters above frozen layers": Case(model=tiny_llama, training=_LORA | {"frozen_layers": 1}),
    "a reference": Case(model=tiny_qwen3, training={"kl": {"coefficient": 0.1}}),
}


def launch(ranks: int, *arguments: str) -> None:
    """Runs this file on as many gloo ranks; the folders of its cases are next to the report."""
    tests = Path(__file__).parents[2]
    path = f"{tests}:{tests.parent}:{tests}/support/campaigns/base_install"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    started = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__, *arguments]
    ran = subprocess.run([sys.executable, *started], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-9000:]


LAYER = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 12}


def write_large(folder: Path) -> None:
    """Writes a model of some 400 MB, in several files; its largest tensor has 25 MB."""
    config = LlamaConfig(**LAYER, vocab_size=8000, num_hidden_layers=12, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="150MB")


def write_folders(parent: Path) -> None:
    """Writes the model folders of all cases."""
    for name, case in CASES.items():
        case.model().to(case.stored).save_pretrained(parent / name, max_shard_size=case.file_size)
    for name, spoil in SPOILT.items():
        tiny_llama().save_pretrained(parent / name)
        spoil(parent / name)


def compare(case: Case, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Names of parameters and buffers whose parts differ on any rank, and the losses of a step with either trainer."""
    training = TrainingConfig.model_validate(_TRAINING | dict(case.training))
    torch.manual_seed(SEED)
    whole = Trainer(
        load_model(folder, case.dtype),
        training,
        seed=SEED,
        reference=load_model(folder, case.dtype) if training.kl.coefficient else None,
        ranks=ranks,
        published_dtype=torch.float32,
    )
    drawn = torch.get_rng_state()
    sliced = load_trainer(
        Trainer,
        folder,
        training,
        dtype=case.dtype,
        generation_dtype="float32",
        seed=SEED,
        ranks=ranks,
    )
    pairs = [(whole.policy, sliced.policy)]
    if whole._reference is not None and sliced._reference is not None:
        pairs.append((whole._reference, sliced._reference))
    apart = [
        name
        for expected, policy in pairs
        for kind in ("named_parameters", "named_buffers")
        for (name, tensor), (other, value) in zip(getattr(expected, kind)(), getattr(policy, kind)(), strict=True)
        if name != other or not _same(tensor, value)
    ]
    if not torch.equal(drawn, torch.get_rng_state()):
        apart.append("random numbers")
    batch = samples(7, seed=1)
    losses = [[trainer.step(batch).loss for _ in range(2)] for trainer in (whole, sliced)]
    reports = [json.loads(text) for text in exchange(json.dumps(apart), ranks.size)]
    return {"apart": sorted({name for report in reports for name in report}), "losses": losses}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.requires_grad == b.requires_grad and a.dtype == b.dtype and torch.equal(local(a), local(b))


def refused(folder: Path, ranks: Ranks) -> list[str]:
    """Loads `folder`. Returns the error of each rank."""
    try:
        load_trainer(
            Trainer,
            folder,
            TrainingConfig.model_validate(_TRAINING),
            dtype="float32",
            generation_dtype="float32",
            seed=SEED,
            ranks=ranks,
        )
    except Exception as error:  # noqa: BLE001 — reported
        return exchange(f"{type(error).__name__}: {error}", ranks.size)
    return exchange("", ranks.size)


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def _infinite(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = float("inf")

    _rewrite(folder, change)


def _untied(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1

    _rewrite(folder, change)


def _missing(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]

    _rewrite(folder, change)


SPOILT = {"not finite": _infinite, "not tied": _untied, "missing": _missing}
"""Damage that only one rank reads, or that no rank's slices show."""


def measure(folder: Path, ranks: Ranks) -> dict[str, int]:
    """Bytes that this rank's shard takes, and that it reads and holds at most while it loads `folder`."""
    training = TrainingConfig.model_validate(_TRAINING)
    # What imports and first calls take stays out of the measurement.
    refused(folder.parent / "tied", ranks)
    gc.collect()
    read, held = _read_bytes(), _held_bytes("VmRSS")
    trainer = load_trainer(
        Trainer,
        folder,
        training,
        dtype="float32",
        generation_dtype="float32",
        seed=SEED,
        ranks=ranks,
    )
    return {
        "shard": sum(local(parameter).nbytes for parameter in trainer.model.parameters()),
        "read": _read_bytes() - read,
        "held": _held_bytes("VmHWM") - held,
    }


def _read_bytes() -> int:
    return int(next(line.split()[1] for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line))


def _held_bytes(measure: str) -> int:
    """Memory that this process holds now, or has held at most."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith(measure))) << 10


def main(report: Path, folder: Path | None) -> None:
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    result: dict[str, Any] = {}
    if folder is not None:
        ranks = Ranks.join(data=size, tensor=1, device="cpu")
        result["measured"] = [json.loads(text) for text in exchange(json.dumps(measure(folder, ranks)), size)]
    else:
        for layout in LAYOUTS[size]:
            ranks = layout.join()
            for name, case in CASES.items():
                if case.runs_on(layout):
                    result[f"{name} {layout}"] = compare(case, report.parent / name, ranks)
        for name in SPOILT:
            result[name] = refused(report.parent / name, ranks)
    if ranks.rank == 0:
        report.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
