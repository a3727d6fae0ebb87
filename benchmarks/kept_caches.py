"""Compares kept and recomputed caches of responses in flight: generation speed and error of log-probabilities.

    the same requests ─┬─► without updates           tokens/s
                       ├─► updated, caches kept      ÷ without, |Δ log π| of tokens after an update in their response
                       └─► updated, recomputed       ÷ without, |Δ log π|

One engine runs all three in turn. Its policy is small and random and never ends a response. Each version is a step of
AdamW after the one before; an update comes every `--every` tokens. Δ log π is the difference between the engine's
log-probability of a token and that of the weights of its version, computed from the whole text.

    python -m benchmarks.kept_caches [--engine vllm] [--lengths 128 512 1024] [--rounds 3] [--json PATH]
"""

import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from benchmarks.harness import finish, make_parser, median_ratio, print_table, transpose
from benchmarks.sleeping.engine_alone import save_model
from benchmarks.sleeping.metered_engine import cpu_seconds
from configs.generation import GenerationConfig
from millrace.generation.engines.factory import make_engine
from millrace.models.loading import load_model, load_tokenizer
from millrace.types import Request, Sampling, Trajectory
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.shared_tensors import ReceiveBuffer, shapes_of
from storage.stores.memory import memory_folder

if TYPE_CHECKING:
    from millrace.generation.engines.transformers import TransformersEngine
    from millrace.generation.engines.vllm.engine import VllmEngine

TARGET = 0.92
_PROMPT = 16
_CLOCKS = ("wall", "cpu")
_SCORED = 16
"""Responses whose log-probabilities are compared."""


@dataclass(kw_only=True)
class Contest:
    """The engine, and the versions of its policy."""

    engine: "TransformersEngine | VllmEngine"
    models: Sequence[PreTrainedModel]
    buffer: ReceiveBuffer
    slots: int
    every: int
    """Tokens between two updates."""
    model_of_version: dict[int, PreTrainedModel] = field(default_factory=dict)

    def update(self, index: int) -> None:
        """Loads one of the models as the next version."""
        version = self.engine.policy_version + 1
        self.model_of_version[version] = self.models[index]
        parameters = {name: parameter.detach() for name, parameter in self.models[index].named_parameters()}
        tensors = self.buffer.tensors_for(shapes_of(parameters))
        for name, parameter in parameters.items():
            tensors[name].copy_(parameter)
        manifest = Manifest(id=WeightsId(incarnation=0, policy_version=version, t_offered=time.time()))
        self.engine.update_weights(Weights(manifest=manifest, tensors=tensors, shared=self.buffer.shared))

    def run(self, length: int, keep_cache: bool | None) -> tuple[dict[str, float], list[Trajectory]]:
        """Generates everything. Returns tokens per second of each clock, and the responses.

        `keep_cache`: None updates nothing.
        """
        engine = self.engine
        engine.keep_cache = bool(keep_cache)
        self.update(0)
        num_tokens = len(self.models) * self.every
        numbers = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, engine.vocab_size, (num_tokens // length, _PROMPT), generator=numbers).tolist()
        requests = [
            Request(group_id=i, sample_index=0, prompt_tokens=tuple(prompt), seed=i) for i, prompt in enumerate(prompts)
        ]
        done: list[Trajectory] = []
        started, cpu_started, loaded = time.perf_counter(), cpu_seconds(), 0
        while len(done) < len(prompts):
            free = self.slots - engine.in_flight
            if free and requests:
                engine.submit(requests[:free], Sampling(temperature=1.0, top_p=1.0, max_new_tokens=length))
                del requests[:free]
            done += engine.collect(0.02)
            sampled = length * len(done) + engine.tokens_in_flight
            if keep_cache is not None and loaded + 1 < len(self.models) and sampled >= (loaded + 1) * self.every:
                loaded += 1
                self.update(loaded)
        seconds = {"wall": time.perf_counter() - started, "cpu": cpu_seconds() - cpu_started}
        return {clock: length * len(done) / value for clock, value in seconds.items()}, done

    def mismatches(self, done: Sequence[Trajectory]) -> list[float]:
        """Returns |Δ log π| of the tokens after an update in their response, nats."""
        result: list[float] = []
        for trajectory in [each for each in done if len(each.response.version_spans) > 1][:_SCORED]:
            response = trajectory.response
            text = [*trajectory.request.prompt_tokens, *response.tokens]
            starts = [start for _, start in response.version_spans[1:]]
            for version, start, end in zip(
                (version for version, _ in response.version_spans[1:]),
                starts,
                [*starts[1:], len(response.tokens)],
                strict=True,
            ):
                with torch.inference_mode():
                    logits_TV = self.model_of_version[version](input_ids=torch.tensor([text])).logits[0]
                logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
                first = len(trajectory.request.prompt_tokens) - 1
                result += [
                    abs(logprobs_TV[first + r, response.tokens[r]].item() - response.rollout_logprobs[r])
                    for r in range(start, end)
                ]
        return result


def main() -> None:
    """Measures, prints the figures and writes them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024], help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, after one to warm up")
    parser.add_argument("--slots", type=int, default=32, help="requests in flight")
    parser.add_argument("--every", type=int, default=7000, help="tokens between two updates")
    parser.add_argument("--versions", type=int, default=4, help="versions in a run")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="of the steps between two versions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as name:
        folder, context = Path(name), _PROMPT + max(arguments.lengths)
        save_model(folder, context)
        settings = {"max_model_len": context, "max_num_seqs": arguments.slots, "enforce_eager": True}
        config = GenerationConfig(engine=arguments.engine, engine_args=settings if arguments.engine == "vllm" else {})
        engine: Any = make_engine(config, folder, load_tokenizer(folder), dtype="float32")
        buffer = ReceiveBuffer(memory_folder() / f"benchmark-{uuid.uuid4().hex}")
        try:
            models = _versions(folder, arguments.versions, arguments.learning_rate)
            contest = Contest(engine=engine, models=models, buffer=buffer, slots=arguments.slots, every=arguments.every)
            lengths = {length: measure(contest, length, arguments.rounds) for length in arguments.lengths}
        finally:
            engine.close()
            buffer.close()
    headings = (
        "tokens", "tokens/s", "kept", "recomputed", "kept, CPU", "recomputed, CPU",
        "|Δ log π|, kept", "largest", "recomputed", "largest",
    )  # fmt: skip
    rows = [
        [
            str(length),
            f"{figures['wall']['tokens_per_second']['none']:,.0f}",
            *(f"{figures[clock]['ratio'][mode]:.3f}" for clock in _CLOCKS for mode in ("kept", "recomputed")),
            *(
                f"{figures['mismatch'][mode][key]:.2g}"
                for mode in ("kept", "recomputed")
                for key in ("mean", "largest")
            ),
        ]
        for length, figures in lengths.items()
    ]
    print_table("Tokens per second without updates; the share with them; nats", headings, rows)
    targets = {
        f"{length} tokens: at least {TARGET} of the speed without updates": figures["wall"]["ratio"]["kept"] >= TARGET
        for length, figures in lengths.items()
    }
    finish(arguments.json, {**vars(arguments), "json": None, "figures": lengths, "targets": targets})


def measure(contest: Contest, length: int, rounds: int) -> dict[str, Any]:
    """Returns the figures of one length: medians over rounds of tokens/s and of their ratios, and the mismatch."""
    modes: Mapping[str, bool | None] = {"none": None, "kept": True, "recomputed": False}
    mismatch: dict[str, list[float]] = {name: [] for name in modes}
    measured: list[dict[str, dict[str, float]]] = []
    for number in range(rounds + 1):
        names = list(modes)
        rates = {}
        for name in names[number % 3 :] + names[: number % 3]:
            rates[name], done = contest.run(length, modes[name])
            if number == 0:
                mismatch[name] = contest.mismatches(done)
        measured.append(rates)
    result: dict[str, Any] = {
        "mismatch": {
            name: {"tokens": len(values), "mean": fmean(values), "largest": max(values)}
            for name, values in mismatch.items()
            if values
        }
    }
    for clock in _CLOCKS:
        rates_of = transpose([{name: rate[clock] for name, rate in rates.items()} for rates in measured[1:]])
        result[clock] = {
            "tokens_per_second": {name: median(values) for name, values in rates_of.items()},
            "ratio": {name: median_ratio(rates_of[name], rates_of["none"]) for name in ("kept", "recomputed")},
            "rounds": rates_of,
        }
    return result


def _versions(folder: Path, number: int, learning_rate: float) -> list[PreTrainedModel]:
    """Returns the folder's model and its successors, each a step of AdamW on random text after the one before."""
    models = [load_model(folder, "float32")]
    numbers = torch.Generator().manual_seed(0)
    trained = deepcopy(models[0])
    optimizer = torch.optim.AdamW(trained.parameters(), lr=learning_rate, weight_decay=0.0)
    for _ in range(number - 1):
        text = torch.randint(3, trained.config.vocab_size, (16, 64), generator=numbers)
        optimizer.zero_grad()
        trained(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        models.append(deepcopy(trained))
    return models


if __name__ == "__main__":
    main()
