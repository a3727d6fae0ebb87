"""Weights that ranks push into a running engine over gloo: whole, checked, and made good after a fault."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support.engines.policies import all_of, largest_mismatch
from support.weights.live import LivePushes, serve
from transformers import LlamaForCausalLM, PreTrainedModel

from millrace.types import Request, Sampling
from millrace.weights.base import WeightsId
from millrace.weights.fingerprint import Fingerprint
from millrace.weights.probe import tolerance_between

if TYPE_CHECKING:
    from millrace.generation.engines.vllm.engine import VllmEngine

pytestmark = pytest.mark.vllm

MakePolicy = Callable[[int], LlamaForCausalLM]
TOLERANCE = tolerance_between("float32", "float32")
LONG = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=50)
PATIENT = 240.0


def parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def requests(first_group: int) -> list[Request]:
    return [
        Request(
            group_id=first_group + i, sample_index=0, prompt_tokens=(1, 3 + i % 12, 3 + i % 11), seed=first_group + i
        )
        for i in range(12)
    ]


def receive(engine: "VllmEngine", pushes: LivePushes, held: WeightsId | None, version: int) -> WeightsId:
    """Serves until the engine uses a version."""
    limit = time.monotonic() + PATIENT
    while held is None or held.policy_version != version:
        assert time.monotonic() < limit, f"version {version} never arrived"
        held = serve(engine, pushes.receivers[0], held)
    return held


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.extended), pytest.param(4, marks=pytest.mark.extended)]
)
def test_each_token_is_of_its_spans_version_when_ranks_push_into_the_running_engine(
    ranks: int, vllm_engine: "VllmEngine", make_policy: MakePolicy, tmp_path: Path
) -> None:
    models: dict[int, PreTrainedModel] = {0: make_policy(0)}
    held: WeightsId | None = None
    with closing(
        LivePushes(tmp_path, parameters(models[0]), ranks=ranks, deadline_seconds=PATIENT, leads=True)
    ) as pushes:
        for version in range(1, 6):
            vllm_engine.submit(requests(12 * version), LONG)
            models[version] = make_policy(version)
            pushes.publish(version, parameters(models[version]))
            held = receive(vllm_engine, pushes, held, version)
        done = all_of(vllm_engine)
        nbytes = sum(tensor.nbytes for tensor in parameters(models[0]).values())
        assert pushes.ranks[0].wire_bytes == 5 * nbytes
    assert len(done) == 5 * 12
    assert {version for trajectory in done for version, _ in trajectory.response.version_spans} >= {1, 5}
    worst = max(largest_mismatch(models, done_.request.prompt_tokens, done_.response) for done_ in done)
    assert worst < TOLERANCE


def test_a_torn_engine_samples_nothing_until_a_whole_version_arrives(
    vllm_engine: "VllmEngine", make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, damaged = make_policy(7), []

    def damage(fingerprint: Fingerprint) -> Fingerprint:
        damaged.append(list(fingerprint.tensors)[-1])
        return Fingerprint(
            tensors={**fingerprint.tensors, damaged[-1]: "0"}, boxes=fingerprint.boxes, method=fingerprint.method
        )

    with closing(LivePushes(tmp_path, parameters(model), deadline_seconds=PATIENT, leads=True)) as pushes:
        announce = pushes.relay._rendezvous.announce

        def announce_damaged(manifest, *arguments, **options):  # type: ignore[no-untyped-def]
            if not damaged:
                manifest = dataclasses.replace(manifest, fingerprint=damage(manifest.fingerprint))
            return announce(manifest, *arguments, **options)

        monkeypatch.setattr(pushes.relay._rendezvous, "announce", announce_damaged)
        vllm_engine.submit(requests(0), LONG)
        pushes.publish(7, parameters(model))
        limit = time.monotonic() + PATIENT
        while not damaged or vllm_engine.policy_version == 0:
            assert time.monotonic() < limit
            held = serve(vllm_engine, pushes.receivers[0], None)
    assert held is not None and held.policy_version == 7
    done = all_of(vllm_engine)
    models: dict[int, PreTrainedModel] = {0: make_policy(0), 7: model}
    assert max(largest_mismatch(models, each.request.prompt_tokens, each.response) for each in done) < TOLERANCE
