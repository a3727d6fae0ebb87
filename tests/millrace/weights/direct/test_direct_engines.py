"""`direct` from trainers of any layout into real engines that generate meanwhile: their live weights, bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from support.engines.vllm_processes import running_vllm
from support.stages.failpoints import Failpoints
from support.weights.direct import PATIENT, Child, finder, sync_weights, trainer_rank
from support.weights.direct_policies import LLAMA_CONFIG, POLICIES, id_of
from support.weights.live_weights import EXTENSION, expected_digests
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from millrace.generation.engines.base import Engine
from millrace.generation.engines.transformers import TransformersEngine
from millrace.types import Request, Sampling
from millrace.weights.direct.receiver import DirectReceiver
from millrace.weights.fingerprint import fingerprint

VERSIONS = 20
POLICY = POLICIES["llama"]
LONG = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=40)
IN_FLIGHT = 4
LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)]
"""(data, tensor) ranks of the trainer: alone, FSDP, tensor parallel, and both."""
KINDS = ["transformers", "vllm-1", "vllm-2"]
"""vLLM with so many tensor-parallel workers."""
CELLS = [(kind, layout, generators) for kind in KINDS for layout in LAYOUTS for generators in (1, 2)]
QUICK = ("transformers", (1, 2), 2)


class LiveEngine:
    """An engine, and what it computes with."""

    def __init__(self, engine: Engine, digests: Callable[[], list[dict[str, str]]]) -> None:
        self.engine = engine
        self.digests = digests
        """By worker, of each tensor."""
        self.num_across = 0
        """Responses that ended under other weights than they began with."""
        self._asked = 0

    def generate(self) -> None:
        """Keeps responses in flight, and waits a moment for any."""
        missing = IN_FLIGHT - self.engine.in_flight
        if missing:
            prompts = range(self._asked, self._asked + missing)
            self._asked += missing
            self.engine.submit(
                [Request(group_id=n, sample_index=0, prompt_tokens=(1, 3 + n % 100), seed=n) for n in prompts], LONG
            )
        done = self.engine.collect(0.002)
        self.num_across += sum(len(one.response.version_spans) > 1 for one in done)


def model_of(version: int) -> LlamaForCausalLM:
    config = LlamaConfig(**LLAMA_CONFIG, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    tensors = POLICY.tensors(version)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    return model.eval()


def transformers_engine(tokenizer: PreTrainedTokenizerFast) -> LiveEngine:
    model = model_of(0)
    engine = TransformersEngine(model, tokenizer, stop_token_ids=[2])
    return LiveEngine(engine, lambda: [dict(fingerprint(dict(model.named_parameters())).tensors)])


def vllm_engine(folder: Path, workers: int, stack: ExitStack) -> LiveEngine:
    arguments = {"tensor_parallel_size": workers, "worker_extension_cls": EXTENSION, "kv_cache_memory_bytes": 64 << 20}
    engine = stack.enter_context(running_vllm(model_of(0), folder, **arguments))
    return LiveEngine(engine, lambda: engine._run(engine._llm.collective_rpc("live_digests")))


@pytest.fixture(scope="module")
def make_engines(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, int], list[LiveEngine]]]:
    """`make(kind, number)`: engines of a kind with nothing in flight; those of the last kind asked for are kept."""
    made: dict[str, list[LiveEngine]] = {}
    with ExitStack() as stack:

        def make(kind: str, number: int) -> list[LiveEngine]:
            if kind not in made:
                stack.close()
                made.clear()
            engines = made.setdefault(kind, [])
            while len(engines) < number:
                name, _, workers = kind.partition("-")
                folder = tmp_path_factory.mktemp("policy")
                engines.append(
                    transformers_engine(tokenizer)
                    if name == "transformers"
                    else vllm_engine(folder, int(workers), stack)
                )
            for one in engines:
                one.engine.abort()
                one.num_across = 0
            return engines[:number]

        yield make


def expected(version: int, workers: int) -> list[dict[str, str]]:
    """Of a version, by worker of vLLM; 0 workers: of an engine that has all tensors as they are."""
    tensors = POLICY.tensors(version)
    if workers == 0:
        return [dict(fingerprint(tensors).tensors)]
    return [expected_digests(tensors, worker, workers) for worker in range(workers)]


def deliver(version: int, trainer: list[Child], engines: list[LiveEngine], readers: list[DirectReceiver]) -> None:
    """Has a version offered, and returns once every engine computes with it."""
    for rank in trainer:
        rank.command(f"offer {version}")
    for rank in trainer:
        assert rank.line() == {"offered": version}
    waiting = dict(zip(readers, engines, strict=True))
    while waiting:
        for reader, one in list(waiting.items()):
            one.generate()
            weights = reader.poll(id_of(version - 1))
            if weights is None:
                continue
            assert weights.id.policy_version == version
            one.engine.update_weights(weights)
            del waiting[reader]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "generators"),
    [
        pytest.param(
            *cell,
            id="{0} {1[0]}x{1[1]} {2}".format(*cell),
            marks=[] if cell == QUICK else [pytest.mark.extended, *([pytest.mark.vllm] if "vllm" in cell[0] else [])],
        )
        for cell in CELLS
    ],
)
def test_live_weights_of_engines_are_the_trainer_s_after_each_of_twenty_versions_under_load(
    kind: str,
    layout: tuple[int, int],
    generators: int,
    make_engines: Callable[[str, int], list[LiveEngine]],
    tmp_path: Path,
) -> None:
    engines = make_engines(kind, generators)
    unarmed = Failpoints(tmp_path / "fired")
    with ExitStack() as stack:
        leading = stack.enter_context(sync_weights(tmp_path, generators, unarmed))
        trainer = [
            stack.enter_context(trainer_rank(tmp_path, rank, layout, unarmed, policy="llama"))
            for rank in range(layout[0] * layout[1])
        ]
        readers = [
            stack.enter_context(
                closing(DirectReceiver(finder(tmp_path), g, tmp_path / f"received-{g}", deadline_seconds=PATIENT))
            )
            for g in range(generators)
        ]
        for version in range(1, VERSIONS + 1):
            deliver(version, trainer, engines, readers)
            live = expected(version, int(kind.partition("-")[2] or 0))
            for one in engines:
                assert one.digests() == live, f"version {version}"
            leading.read_until_all_have(version)
        for rank in trainer:
            rank.command("measure")
        sent = sum(rank.line()["sent_bytes"] for rank in trainer) + sum(reader.wire_bytes for reader in readers)
    for one in engines:
        assert one.num_across, "new weights came while it generated"
    assert sent == VERSIONS * generators * POLICY.nbytes
