"""Trainers spread over ranks are compared with one that is alone: their differences, as a report.

test ─► torchrun ─► every rank: the same steps with both, for each layout and case ─► rank 0: report.json ─► test

Started as `python -m torch.distributed.run … sharded_trainers.py REPORT DEVICE CASES…`; which layouts there are follows
from how many ranks were started.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from support.training.samples import make_sample
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.lora import add_adapters
from millrace.training.parallel.messages import exchange
from millrace.training.parallel.ranks import ALONE, Ranks
from millrace.training.parallel.sharding import base_tensors, layout
from millrace.training.trainer import Trainer

Report = dict[str, dict[str, Any]]
"""Differences and facts by "<case> <layout>"."""


@dataclass(frozen=True)
class Layout:
    """How ranks divide the work."""

    data: int
    tensor: int
    shard: int | None = None
    """Data ranks that divide the weights; None: all."""

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}{f' of {self.shard}' if self.shard else ''}"

    def join(self, device: Literal["cpu", "cuda"] = "cpu") -> Ranks:
        return Ranks.join(data=self.data, tensor=self.tensor, shard=self.shard, device=device)


LAYOUTS = {2: [Layout(2, 1), Layout(1, 2)], 4: [Layout(4, 1), Layout(2, 2), Layout(4, 1, shard=2)]}
"""By the number of all ranks."""
VOCAB = 37
MAX_TOKENS = 24
"""Of a microbatch: a rank goes through several."""
BATCHES = (7, 2, 9)
"""Samples of each step: none divides among four ranks evenly, and one is fewer than these."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its training."""

    model: Callable[[], PreTrainedModel]
    training: TrainingConfig
    dtype: torch.dtype = torch.float32
    lora: bool = False
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    shared_prompt: int = 0
    """Tokens of a prompt that all samples of a step have; 0: each has a different prompt."""
    divisible: bool = True
    """Whether tensor ranks can divide its layers."""

    with_replicas: bool = False
    """Whether it runs on layouts with replicas too."""

    def runs_on(self, layout: "Layout") -> bool:
        """Whether it runs on this layout."""
        return (self.divisible or layout.tensor == 1) and (self.with_replicas or layout.shard is None)


def tiny_llama() -> PreTrainedModel:
    """Grouped queries, tied embeddings, and a vocabulary that no number of ranks divides."""
    return _random(LlamaForCausalLM(LlamaConfig(**_shape(), tie_word_embeddings=True)))  # type: ignore[no-untyped-call]


def tiny_qwen3() -> PreTrainedModel:
    """Grouped queries with their norms, and a separate output layer."""
    return _random(Qwen3ForCausalLM(Qwen3Config(**_shape(), head_dim=8, tie_word_embeddings=False)))


def tiny_gemma2() -> PreTrainedModel:
    """Four norms per layer, windows, and capped scores and logits."""
    return _random(Gemma2ForCausalLM(Gemma2Config(**_shape(), head_dim=8, sliding_window=4)))


def tiny_gemma3() -> PreTrainedModel:
    """Four norms per layer, norms of heads, and windows."""
    return _random(Gemma3ForCausalLM(Gemma3TextConfig(**_shape(), head_dim=8, sliding_window=4)))


def tiny_qwen3_moe() -> PreTrainedModel:
    """Four experts in each layer; a token uses two."""
    config = Qwen3MoeConfig(**_shape(), head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
    return _random(Qwen3MoeForCausalLM(config))


_COMMON: dict[str, Any] = {
    "max_steps": 9,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "max_grad_norm": 1e9,
    "max_tokens_per_microbatch": MAX_TOKENS,
}
"""Gradients are never clipped."""
AIPO = TrainingConfig.model_validate(_COMMON)
_ROOMY = TrainingConfig.model_validate(_COMMON | {"max_tokens_per_microbatch": 90})
"""For several samples with a prompt of 30 tokens."""
GSPO = TrainingConfig.model_validate(
    {
        **_COMMON,
        "loss": {"name": "gspo", "clip_low": 0.9, "clip_high": 2.0},
        "aggregation": "sequence_mean",
        "kl": {"coefficient": 0.1},
        "activation_checkpointing": True,
    }
)
UPDATES = TrainingConfig.model_validate(
    {
        **_COMMON,
        "loss": "decoupled_ppo",
        "kl": {"coefficient": 0.1},
        "entropy_coefficient": 0.01,
        "minibatches": 2,
        "epochs": 2,
        "schedule": {"warmup_steps": 2, "ess_scaling": True},
        "frozen_layers": 1,
        # A larger one keeps AdamW from taking rounding as seriously as a gradient.
        "adamw": {"epsilon": 1e-4},
    }
)
_LLAMA = Case(model=tiny_llama, training=AIPO)
_QWEN3 = Case(model=tiny_qwen3, training=GSPO)
_LORA = Case(model=tiny_qwen3, training=AIPO, lora=True)
CASES = {
    "llama aipo": _LLAMA,
    "llama aipo float64": replace(_LLAMA, dtype=torch.float64, with_replicas=True),
    "llama aipo bfloat16": replace(_LLAMA, compute_dtype="bfloat16", with_replicas=True),
    "qwen3 gspo": _QWEN3,
    "qwen3 gspo float64": replace(_QWEN3, dtype=torch.float64),
    "qwen3 lora": _LORA,
    "qwen3 updates": Case(model=tiny_qwen3, training=UPDATES),
    "qwen3 updates float64": Case(model=tiny_qwen3, training=UPDATES, dtype=torch.float64),
    "qwen3 updates lora": Case(
        model=tiny_qwen3, training=UPDATES.model_copy(update={"frozen_layers": 0}), lora=True, with_replicas=True
    ),
    "gemma2 aipo": Case(model=tiny_gemma2, training=AIPO),
    "gemma3 aipo": Case(model=tiny_gemma3, training=AIPO),
    "qwen3_moe aipo": Case(model=tiny_qwen3_moe, training=AIPO, divisible=False),
    "gemma3 one prompt": Case(model=tiny_gemma3, training=_ROOMY, shared_prompt=30),
    "qwen3 lora one prompt": replace(_LORA, training=_ROOMY, shared_prompt=30),
}


def launch(
    ranks: int, report: Path, device: Literal["cpu", "cuda"] = "cpu", cases: Collection[str] = tuple(CASES)
) -> Report:
    """Runs the cases on as many processes, over gloo on CPUs or over NCCL on GPUs. Returns the report."""
    tests = Path(__file__).parents[2]
    path = f"{tests}:{tests.parent}:{tests}/support/campaigns/base_install"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    arguments = ["--standalone", f"--nproc-per-node={ranks}", __file__, str(report), device, *cases]
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    differences: Report = json.loads(report.read_text())
    return differences


def make_trainer(case: Case, ranks: Ranks, compute_dtype: Literal["float32", "bfloat16"] | None) -> Trainer:
    """Every call makes a trainer with the same weights."""
    model = case.model().to(case.dtype)
    if case.lora:
        _adapt(model)
    return Trainer(
        model,
        case.training.model_copy(update={"compute_dtype": compute_dtype}),
        reference=case.model().to(case.dtype) if case.training.kl.coefficient else None,
        ranks=ranks,
    )


def samples(count: int, seed: int, shared_prompt: int = 0) -> list[Sample]:
    """Rollouts of any lengths by a policy that is not far from a random one; some of truncated sampling.

    All have a prompt of `shared_prompt` tokens, or each its own.
    """
    random = np.random.default_rng(seed)
    shared = random.integers(0, VOCAB, shared_prompt).astype(np.int32)

    def one(number: int) -> Sample:
        prompt, response = random.integers(1, 8), random.integers(1, 16)
        tokens = random.integers(0, VOCAB, response).astype(np.int32)
        # Each of them from its own first half of the vocabulary, or from its own second half.
        kept = [np.arange(VOCAB)[np.arange(VOCAB) * 2 // VOCAB == token * 2 // VOCAB] for token in tokens]
        if response % 2:
            kept = [np.zeros(0)]
        return make_sample(
            shared if shared_prompt else random.integers(0, VOCAB, prompt),
            tokens,
            rollout_logprobs=random.normal(-np.log(VOCAB), 0.5, response),
            loss_mask=random.random(response) < 0.9,
            temperature=float(random.uniform(0.7, 1.3)),
            # Every third one has none, so that the ranks skip its backward pass together.
            advantage=0.0 if number % 3 == 2 else float(random.normal()),
            kept_tokens=np.concatenate(kept).astype(np.int32),
            kept_counts=np.array([len(ids) for ids in kept if len(ids)], np.int32),
            group=number // 2,
        )

    return [one(number) for number in range(count)]


def disagreement(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Trains alone and spread: how much the two differ, and facts about the spread one."""
    # Alone it computes in the type of the weights, without sharing prompts.
    by_itself = replace(case, training=case.training.model_copy(update={"share_prefixes": False}))
    alone, spread = make_trainer(by_itself, ALONE, None), make_trainer(case, ranks, case.compute_dtype)
    start = dict(base_tensors(spread.model, whole=True))
    result: dict[str, Any] = {
        "start": _apart(dict(base_tensors(alone.model, whole=True)), start),
        "loss": 0.0,
        "report": 0.0,
    }
    for number, count in enumerate(BATCHES):
        batch = samples(count, seed=number, shared_prompt=case.shared_prompt)
        expected, report = alone.step(batch), spread.step(batch)
        if number == 0:
            result["gradient"] = _apart(dict(_gradients(alone)), dict(_gradients(spread)))
            result["grad_norm"] = abs(report.grad_norm / expected.grad_norm - 1)
            result["gradient_dtype"] = sorted({str(gradient.dtype) for _, gradient in _gradients(spread)})
        values = report.measured()
        result["loss"] = max(result["loss"], abs(report.loss - expected.loss))
        result["report"] = max([result["report"], *(abs(v - values[name]) for name, v in expected.measured().items())])
    end = dict(base_tensors(spread.model, whole=True))
    tokens = [1, 2, 3]
    next_logprobs, expected_next = spread.next_logprobs(tokens, 5), alone.next_logprobs(tokens, 5)
    trained = [parameter for parameter in spread.model.parameters() if parameter.requires_grad]
    return result | {
        "weights": _apart(dict(base_tensors(alone.model, whole=True)), end),
        "adapter": _apart(alone.adapter(), spread.adapter()) if case.lora else 0.0,
        "next_logprobs": max(abs(next_logprobs.get(token, 0.0) - value) for token, value in expected_next.items()),
        "moved": sorted(name for name, tensor in end.items() if not torch.equal(tensor, start[name])),
        "weights_dtype": sorted({str(parameter.dtype) for parameter in spread.model.parameters()}),
        "elements_held": sum(_local(parameter).numel() for parameter in spread.model.parameters()),
        "elements": sum(parameter.numel() for parameter in spread.model.parameters()),
        "with_optimizer_state": len(spread._optimizer.state),
        "trained": len(trained),
        "shards_apart": _shards_apart(spread, end),
        "misplaced_blocks": [name for name, block in spread.model.named_parameters() if not _in_its_place(block)],
    }


def _shape() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }


def _random(model: PreTrainedModel) -> PreTrainedModel:
    """Draws large weights, so that logits differ clearly."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms too: their gradient is one that ranks could forget to add up.
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    return model


def _adapt(model: PreTrainedModel) -> None:
    """Adds adapters to layers of every kind. They are not zero, else half of them had no gradient."""
    torch.manual_seed(1)
    add_adapters(model, rank=4, alpha=8.0, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)


def _gradients(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            yield name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _apart(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
    """The largest relative distance of any tensor, in L2 norms; not a number where an expected one is 0."""
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    apart = [(expected[name] - tensor.cpu()).norm() / expected[name].norm() for name, tensor in found.items()]
    return torch.stack(apart).max().item()


def _shards_apart(trainer: Trainer, whole: Mapping[str, torch.Tensor]) -> float:
    """The largest difference, on any rank, of its shards from its boxes of the whole; inf without a box."""
    boxes = layout(trainer.model, trainer.ranks, torch.float32).boxes(trainer.ranks.rank)
    shards = {name: shard for name, shard in base_tensors(trainer.model, whole=False) if shard.numel()}
    apart = 0.0 if shards.keys() == boxes.keys() else float("inf")
    for name in shards.keys() & boxes.keys():
        box = whole[name][tuple(slice(begin, end) for begin, end in boxes[name])]
        same = box.shape == shards[name].shape
        apart = max(apart, float((box - shards[name]).abs().max()) if same else float("inf"))
    if trainer.ranks.size == 1:
        return apart
    return max(map(float, exchange(str(apart), trainer.ranks.size)))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _in_its_place(parameter: torch.Tensor) -> bool:
    """Whether what this rank holds is the block of the whole that DTensor says it is: checkpoints rely on it."""
    assert isinstance(parameter, DTensor)
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    whole = parameter.full_tensor()
    block = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))]
    return torch.equal(block, parameter.to_local())


def main() -> None:
    torch.set_num_threads(1)
    report: Report = {}
    for spread in LAYOUTS[int(os.environ["WORLD_SIZE"])]:
        ranks = spread.join("cuda" if sys.argv[2] == "cuda" else "cpu")
        for name, case in ((name, CASES[name]) for name in sys.argv[3:] if CASES[name].runs_on(spread)):
            report[f"{name} {spread}"] = disagreement(case, ranks)
        report[f"flag {spread}"] = {
            "of the last rank": ranks.any(ranks.rank == ranks.size - 1),
            "of none": ranks.any(False),
        }
    if ranks.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(report))
    ranks.leave()


if __name__ == "__main__":
    main()
