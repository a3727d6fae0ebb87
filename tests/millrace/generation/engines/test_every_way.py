"""Twenty versions from each kind of trainer into each kind of engine at work, by the way that a campaign takes.

1, 2, 4 ranks ──direct──► transformers                                       each token has its version's log π
              ───gloo───► vLLM, 1 or 2 workers; fp8: quantized on arrival    tensors of a fresh start
adapters      ───shm────► both
"""

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines.adapted import ADAPTER, MAX_STALENESS, RANK, TARGETS, AdaptedPolicy
from support.engines.policies import all_of, largest_mismatch
from support.engines.vllm_processes import running_vllm
from support.weights.direct import wait_until
from support.weights.live import LivePushes, serve
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from configs.generation import adapter_arguments
from millrace.generation.engines.base import Engine
from millrace.generation.engines.transformers import TransformersEngine
from millrace.types import Request, Sampling, Trajectory
from millrace.weights.base import Manifest, Weights, WeightsId, WeightsReceiver
from millrace.weights.fingerprint import fingerprint
from millrace.weights.probe import tolerance_between
from millrace.weights.shm import ShmReceiver, ShmRelay, ShmSender

MakePolicy = Callable[[int], LlamaForCausalLM]
Started = Callable[["Way", int, ExitStack], Engine]

NUM_VERSIONS = 20
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=40)
TOLERANCE = tolerance_between("float32", "float32")
TEXTS = ([1, 3], [1, 5, 7, 3, 9])
PATIENT = 240.0
FP8 = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}


@dataclass(frozen=True)
class Way:
    """Engines of a campaign, and what travels to them."""

    workers: int
    """vLLM's in each engine; 0: transformers."""
    sent: str
    """`whole` in float32, `fp8`: whole in bfloat16, or `adapter`."""
    num_engines: int

    def __str__(self) -> str:
        return f"{self.num_engines}x {f'vllm-{self.workers}' if self.workers else 'transformers'}, {self.sent}"


WAYS = [
    Way(workers, sent, num_engines)
    for workers in (0, 1, 2)
    for sent in ("whole", "fp8", "adapter")
    for num_engines in (1, 2)
    if workers or sent != "fp8"
]
PAIRWISE = ((Way(0, "whole", 2), 4), (Way(1, "fp8", 2), 2), (Way(2, "whole", 2), 1), (Way(2, "adapter", 1), 1))
"""Engines with a number of trainer ranks that are tested before a release; all others only in the storms."""


def policy(make_policy: MakePolicy, way: Way, version: int) -> tuple[dict[str, torch.Tensor], PreTrainedModel]:
    """The tensors of a version that travel, and its model in float32."""
    if way.sent == "adapter":
        adapted = AdaptedPolicy(make_policy(0), version)
        return adapted.tensors, adapted.model(make_policy(0))
    model = make_policy(version)
    sent = make_policy(version).bfloat16() if way.sent == "fp8" else model
    return {name: parameter.detach() for name, parameter in sent.named_parameters()}, model


def computed_by(engine: Engine) -> list[Any]:
    """Log-probabilities and, of vLLM's workers, checksums of the tensors that kernels use."""
    computed: list[Any] = [engine.next_logprobs(text, 8) for text in TEXTS]
    if not isinstance(engine, TransformersEngine):
        computed.append(engine._run(engine._llm.compute_weight_checksums()))  # type: ignore[attr-defined]
    return computed


@pytest.fixture
def started(make_policy: MakePolicy, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Started:
    """`started(way, seed, stack)`: an engine with the policy of that seed, until the stack is closed."""
    numbers = itertools.count()

    def start(way: Way, seed: int, stack: ExitStack) -> Engine:
        model = make_policy(seed)
        if not way.workers:
            return TransformersEngine(model.eval(), tokenizer, keep_cache=False)
        options: dict[str, Any] = FP8 if way.sent == "fp8" else {}
        if way.sent == "adapter":
            options = {"adapters": adapter_arguments(RANK, TARGETS, MAX_STALENESS)}
        (folder := tmp_path / f"policy-{next(numbers)}").mkdir()
        engine = stack.enter_context(
            running_vllm(model, folder, max_model_len=64, tensor_parallel_size=way.workers, **options)
        )
        engine.keep_cache = False
        return engine

    return start


class AdapterPushes:
    """A trainer and sync_weights on the host of the generators, for adapters."""

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], num_generators: int) -> None:
        path = folder / "weights"
        self._sender, self._relay = ShmSender(path, tensors, num_generators), ShmRelay(path)
        self.receivers = [ShmReceiver(path, number) for number in range(num_generators)]

    def publish(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        weights_id = WeightsId(incarnation=0, policy_version=version, t_offered=version + 0.5)
        self._sender.publish(Weights(manifest=Manifest(id=weights_id, adapter=ADAPTER), tensors=tensors))
        taken: list[Weights] = []

        def poll() -> bool:
            taken.extend(filter(None, [self._relay.poll(None)]))
            return bool(taken)

        wait_until(poll, f"version {version} to be handed over")
        assert taken[0].fingerprint == fingerprint(tensors)
        self._relay.publish(taken[0])

    def close(self) -> None:
        for end in (*self.receivers, self._relay, self._sender):
            end.close()


def work(engine: Engine, receiver: WeightsReceiver, last: int, needs_adapter: bool) -> list[Trajectory]:
    """Generates without a break, and takes each version that comes, until it has the last one."""
    done: list[Trajectory] = []
    held: WeightsId | None = None
    submitted, number = held, 0
    while engine.policy_version != last:
        # Some under each version. Without its first adapter, vLLM computes nothing.
        if (engine.in_flight < 8 or held != submitted) and (held is not None or not needs_adapter):
            submitted = held
            texts = {i: (1, 3 + i % 12, 3 + i % 11) for i in range(number, number + 4)}
            number += len(texts)
            requests = [Request(group_id=i, sample_index=0, prompt_tokens=text, seed=i) for i, text in texts.items()]
            engine.submit(requests, SAMPLING)
        if engine.accepts_weights:
            held = serve(engine, receiver, held)
        done += engine.collect(0.01)
    return done + all_of(engine)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("way", "all_ranks"),
    [
        *(pytest.param(way, (ranks,), marks=pytest.mark.extended, id=f"{way}, {ranks}") for way, ranks in PAIRWISE),
        # An adapter leaves the trainer from rank 0, whole.
        *(
            pytest.param(way, (1,) if way.sent == "adapter" else (1, 2, 4), marks=pytest.mark.faults, id=f"{way}, all")
            for way in WAYS
        ),
    ],
)
def test_engines_at_work_compute_with_each_version_as_one_started_with_it(
    way: Way, all_ranks: tuple[int, ...], started: Started, make_policy: MakePolicy, tmp_path: Path
) -> None:
    expected: list[Any] = []
    if way.workers and way.sent != "adapter":
        with ExitStack() as stack:
            expected = computed_by(started(way, NUM_VERSIONS, stack))
    with ExitStack() as stack:
        engines = [started(way, 0, stack) for _ in range(way.num_engines)]
        for ranks in all_ranks:
            push_to(engines, way, ranks, make_policy, tmp_path / f"{ranks}-ranks")
            for engine in engines:
                assert not expected or computed_by(engine) == expected


def push_to(engines: list[Engine], way: Way, ranks: int, make_policy: MakePolicy, folder: Path) -> None:
    """Pushes all versions from the ranks of a trainer, and checks the responses made meanwhile."""
    folder.mkdir()
    first = engines[0].policy_version
    versions = range(first + 1, first + 1 + NUM_VERSIONS)
    sent = {version: policy(make_policy, way, version - first) for version in versions}
    like = sent[versions[0]][0]
    pushes: LivePushes | AdapterPushes
    if way.sent == "adapter":
        pushes = AdapterPushes(folder, like, len(engines))
    else:
        pushes = LivePushes(
            folder,
            like,
            ranks=ranks,
            workers=max(1, way.workers),
            num_generators=len(engines),
            deadline_seconds=PATIENT,
            transport="gloo" if way.workers else "direct",
            leads=True,
        )
    with closing(pushes), ThreadPoolExecutor(len(engines)) as threads:
        working = [
            threads.submit(work, engine, receiver, versions[-1], way.sent == "adapter")
            for engine, receiver in zip(engines, pushes.receivers, strict=True)
        ]

        def all_have(version: int) -> bool:
            ended = [each.result() for each in working if each.done()]
            return len(ended) == len(working) or all(engine.policy_version == version for engine in engines)

        for version in versions:
            pushes.publish(version, sent[version][0])
            wait_until(lambda version=version: all_have(version), f"all to have version {version}", seconds=PATIENT)
        done = [trajectory for each in working for trajectory in each.result()]
        if isinstance(pushes, LivePushes) and way.workers:
            nbytes = sum(tensor.nbytes for tensor in like.values())
            assert pushes.ranks[0].wire_bytes == NUM_VERSIONS * nbytes, "once, for however many engines"
    used = {version for trajectory in done for version, _ in trajectory.response.version_spans}
    assert len(used) > NUM_VERSIONS / 2, "it was under load"
    if way.sent != "fp8":
        models = {version: model for version, (_, model) in sent.items()}
        models[first] = make_policy(NUM_VERSIONS if first else 0)
        worst = max(largest_mismatch(models, each.request.prompt_tokens, each.response) for each in done[-64:])
        assert worst < TOLERANCE
