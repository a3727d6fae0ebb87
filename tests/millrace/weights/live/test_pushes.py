"""Pushes over gloo from ranks to the worker engines of two generators: bit for bit, and again after a fault."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
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
    folder: Path, ranks: int, deadline_seconds: float = PATIENT
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


def test_a_generator_that_fails_to_join_keeps_no_other_waiting_for_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.weights.live.gloo import GlooWorkerEngine

    joined, join = [], GlooWorkerEngine.init_transfer_engine

    def fail_first(engine: GlooWorkerEngine, init_info: Any) -> None:
        joined.append(engine)
        if len(joined) == 1:
            raise RuntimeError("out of memory")
        join(engine, init_info)

    monkeypatch.setattr(GlooWorkerEngine, "init_transfer_engine", fail_first)
    with two_generators(tmp_path, 2, deadline_seconds=10 * PATIENT) as (pushes, generators):
        pushes.publish(1, tensors_of(1))
        wait_until(all_hold(generators, 1), "both generators to hold version 1")
        assert len(joined) > 2
