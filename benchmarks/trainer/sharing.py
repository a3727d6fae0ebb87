"""Steps on groups of one prompt, with the prompt computed once and once per response, for `benchmarks.trainer`.

    one batch of groups ─┬─► training.share_prefixes: true  ─┬─► seconds per step, in turns; ratio of each round
                         └─► training.share_prefixes: false ─┴─► peak memory, each in a new process

Each peak is that of a new process, without what it held before its first step.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import median_ratio, print_line, time_rounds
from benchmarks.trainer.memory import held_bytes, peak_of
from benchmarks.trainer.steps import TrainerCase, make_model
from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer

_DEMO = TrainerCase(
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=256,
    vocab_size=15,
    dtype="float32",
    num_samples=512,
    median_response=3,
    longest_response=3,
    max_tokens=16_384,
    checkpointing=False,
)
_SMALL = replace(_DEMO, hidden_size=256, num_layers=4, num_kv_heads=2, intermediate_size=1024, vocab_size=512)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A batch of groups of equal shape."""

    model: TrainerCase
    num_groups: int
    prompt: int
    """Tokens."""
    response: int
    """Tokens of each response, or their median if lengths are spread."""
    group_size: int = 8
    spread: bool = False
    """Whether lengths are log-normal with σ = 0.9."""
    target: float = 0.97
    """Smallest ratio of unshared to shared seconds."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.prompt} + {'~' if self.spread else ''}{self.response} tokens × {self.group_size}"


CASES = (
    Groups(model=_DEMO, num_groups=64, prompt=7, response=3, target=2.3),
    Groups(model=_SMALL, num_groups=4, prompt=256, response=64, target=2.5),
    Groups(model=_SMALL, num_groups=4, prompt=128, response=128, target=1.4),
    Groups(model=_SMALL, num_groups=8, prompt=7, response=42),
    Groups(model=_SMALL, num_groups=8, prompt=16, response=64),
    Groups(model=_SMALL, num_groups=4, prompt=64, response=160, spread=True),
    Groups(model=_SMALL, num_groups=2, prompt=64, response=512),
    Groups(model=_SMALL, num_groups=32, prompt=64, response=16, group_size=1),
)
WAYS = {"shared": True, "unshared": False}


def make_groups(case: Groups) -> list[Sample]:
    """The batch, the same each time: prompts and responses at random."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(case.num_groups):
        prompt = random.integers(0, case.model.vocab_size, case.prompt).astype(np.int32)
        for _ in range(case.group_size):
            length = int(case.response * np.exp(random.normal(0, 0.9))) if case.spread else case.response
            length = max(1, min(length, 1024))
            made.append(
                Sample(
                    prompt_tokens=prompt,
                    response_tokens=random.integers(0, case.model.vocab_size, length).astype(np.int32),
                    rollout_logprobs=np.full(length, -np.log(case.model.vocab_size), dtype=np.float32),
                    loss_mask=np.ones(length, dtype=np.uint8),
                    temperature=1.0,
                    advantage=float(random.normal()),
                    staleness=0,
                    max_new_tokens=1024,
                )
            )
    return made


def measure_sharing(rounds: int, cases: Sequence[Groups] = CASES) -> list[dict[str, Any]]:
    """Per case the seconds of both ways over `rounds`, the median of their ratios, and both peaks."""
    return [_measured(case, rounds) for case in cases]


def targets_met(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Whether each case reached its target."""
    return {f"shared over unshared at {row['name']}": row["ratio"] >= row["target"] for row in rows}


def print_sharing(rows: Sequence[dict[str, Any]]) -> None:
    """A line per case."""
    for row in rows:
        seconds = {way: statistics.median(values) for way, values in row["seconds"].items()}
        peaks = {way: nbytes / 1e6 for way, nbytes in row["peak_bytes"].items()}
        print_line(
            f"{row['name']:28} shared {seconds['shared']:.3f} s, unshared {seconds['unshared']:.3f} s: "
            f"{row['ratio']:.2f} times; peak {peaks['shared']:,.0f} MB, {peaks['unshared']:,.0f} MB"
        )


def _measured(case: Groups, rounds: int) -> dict[str, Any]:
    calls = {way: _step(case, share) for way, share in WAYS.items()}
    seconds = time_rounds(calls, rounds)
    return {
        "name": case.name,
        "case": asdict(case),
        "seconds": seconds,
        "ratio": median_ratio(seconds["unshared"], seconds["shared"]),
        "target": case.target,
        "peak_bytes": {way: peak_of("benchmarks.trainer.sharing", way, json.dumps(asdict(case))) for way in WAYS},
    }


def _step(case: Groups, share: bool) -> Callable[[], object]:
    training = TrainingConfig(max_steps=1, learning_rate=1e-6, share_prefixes=share)
    device = torch.device("cpu")
    trainer = Trainer(make_model(case.model, device), training, ranks=Ranks.alone(device))
    samples = make_groups(case)
    return lambda: trainer.step(samples)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=tuple(WAYS))
    parser.add_argument("case", type=json.loads, help="fields of Groups, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    case = Groups(**arguments.case | {"model": TrainerCase(**arguments.case["model"])})
    step = _step(case, WAYS[arguments.way])
    initial_bytes = held_bytes("cpu", peak=False)
    step()
    print(json.dumps({"peak_bytes": held_bytes("cpu", peak=True) - initial_bytes}))


if __name__ == "__main__":
    _main()
