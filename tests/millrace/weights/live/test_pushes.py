"""Pushes over gloo from ranks to the worker engines of two generators: bit for bit, and again after a fault."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.weights.direct import PATIENT, tensors_of, wait_until
from support.weights.live import LivePushes, serve

from millrace.weights.base import WeightsId
from millrace.weights.fingerprint import fingerprint

pytestmark = pytest.mark.vllm


class ServingGenerator:
    """A generator in a thread, which records the digest of each version that its worker holds."""

    def __init__(self, pushes: LivePushes, number: int) -> None:
        # It imports vLLM, which not every environment that collects this file has.
        from support.weights.live_engine import WorkerAlone

        self.engine = WorkerAlone()
        self.held: dict[int, str] = {}
        self._receiver = pushes.receivers[number]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _serve(self) -> None:
        held: WeightsId | None = None
        while not self._ended.is_set():
            newest = serve(self.engine, self._receiver, held)
            if newest is not None and newest != held:
                held = newest
                self.held[held.policy_version] = fingerprint(self.engine.received).digest


@contextmanager
def two_generators(
    folder: Path, ranks: int, deadline_seconds: float = PATIENT, transport: str = "gloo"
) -> Iterator[tuple[LivePushes, list[ServingGenerator]]]:
    with ExitStack() as stack:
        pushes = stack.enter_context(
            closing(
                LivePushes(
                    folder,
                    tensors_of(0),
                    ranks=ranks,
                    num_generators=2,
                    deadline_seconds=deadline_seconds,
                    transport=transport,
                    leads=True,
                )
            )
        )
        yield pushes, [stack.enter_context(closing(ServingGenerator(pushes, number))) for number in (0, 1)]


def all_hold(generators: list[ServingGenerator], version: int) -> Callable[[], bool]:
    return lambda: all(version in generator.held for generator in generators)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_both_generators_hold_each_version_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    with two_generators(tmp_path, ranks) as (pushes, generators):
        for version in range(1, 21):
            pushes.publish(version, tensors_of(version))
            wait_until(all_hold(generators, version), f"both generators to hold version {version}")
        for version in range(1, 21):
            digest = fingerprint(tensors_of(version)).digest
            assert {generator.held[version] for generator in generators} == {digest}


def test_a_generator_that_fails_in_a_push_keeps_no_other_from_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_generators(tmp_path, 2) as (pushes, generators):
        pushes.publish(1, tensors_of(1))
        wait_until(all_hold(generators, 1), "both generators to hold version 1")
        failing, failed = generators[1].engine.model, []
        load = type(failing).load_weights

        def fail_once(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            if model is failing and not failed:
                failed.append(next(iter(weights)))
                raise RuntimeError("out of memory")
            load(model, weights)

        monkeypatch.setattr(type(failing), "load_weights", fail_once)
        pushes.publish(2, tensors_of(2))
        wait_until(all_hold(generators, 2), "both generators to hold version 2")
        assert failed
        digest = fingerprint(tensors_of(2)).digest
        assert {generator.held[2] for generator in generators} == {digest}


@pytest.mark.parametrize("when", ["before all are ready", "while the others join"])
def test_a_communicator_that_never_comes_about_is_left_behind_at_once(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's constructor does not return if a member is missing."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, nccl_engine

    tensors, never = tensors_of(1), threading.Event()
    made: list[str] = []
    joining: list[str] = []
    make = WeightTransferEngineFactory.create_engine

    def create_engine(*arguments: Any) -> Any:
        made.append("engine")
        if when == "before all are ready" and len(made) == 1:
            raise RuntimeError("out of memory")
        return make(*arguments)

    def join(who: str) -> SimpleNamespace:
        joining.append(who)
        # The first attempt of three members.
        if when == "while the others join" and len(joining) <= 3:
            if who == "generator 1":
                raise RuntimeError("the GPU has fallen off the bus")
            never.wait()
        return SimpleNamespace(destroy=lambda: None)

    monkeypatch.setattr(WeightTransferEngineFactory, "create_engine", create_engine)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: join("trainer"))
    monkeypatch.setattr(
        nccl_engine,
        "worker_init_process_group",
        lambda info, parallel: join(f"generator {parallel.data_parallel_index}"),
    )
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", lambda iterator, **_: list(iterator))
    monkeypatch.setattr(
        nccl_engine,
        "packed_nccl_broadcast_consumer",
        lambda post_unpack_func, **_: post_unpack_func(list(tensors.items())),
    )
    try:
        # A second rank notices at once that the first one gives up before the others join.
        ranks = 2 if when == "before all are ready" else 1
        with two_generators(tmp_path, ranks, 10 * PATIENT, "nccl") as (pushes, generators):
            pushes.publish(1, tensors)
            wait_until(all_hold(generators, 1), "both generators to hold version 1")
    finally:
        never.set()
    attempts = 1 if when == "before all are ready" else 2
    assert sorted(joining) == sorted(["trainer", "generator 0", "generator 1"] * attempts)


def test_a_pack_is_in_the_model_before_the_next_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 loads a layer that is divided over two packs, which have a stream each, in the second one's stream."""
    from support.weights.live_engine import WorkerAlone

    engine, tensors, order = WorkerAlone(), tensors_of(1), list[str]()
    engine.worker.device = torch.device("cuda")
    waits = SimpleNamespace(synchronize=lambda: order.append(f"{len(engine.received)} loaded"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: waits)
    hashes = {"tensors": fingerprint(tensors).tensors, "boxes": {}, "method": "xxh3"}
    pairs = list(tensors.items())
    with engine.worker._checked_loading(hashes):
        for pack in (pairs[:2], pairs[2:]):
            engine.worker.model.load_weights(pack)
    assert order == ["2 loaded", f"{len(pairs)} loaded"]
