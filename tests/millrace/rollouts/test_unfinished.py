"""Unfinished responses of a drained generator, as its successor reads them."""

from pathlib import Path

import pytest

from millrace.rollouts.unfinished import UnfinishedWriter, read_unfinished
from millrace.types import Request, Response, Trajectory
from storage import layout
from storage.errors import Fenced
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore


def trajectory(group_id: int, response: Response) -> Trajectory:
    request = Request(group_id=group_id, sample_index=1, prompt_tokens=(), seed=0, t_admitted=0.5)
    t_finished = 0.0 if response.finish_reason == "unfinished" else 2.5
    return Trajectory(request=request, response=response, t_started=1.5, t_finished=t_finished)


UNFINISHED = trajectory(
    4,
    Response(
        tokens=(3, 5, 7),
        rollout_logprobs=(-0.5, -0.25, -1.0),
        version_spans=((2, 0), (4, 1)),
        finish_reason="unfinished",
    ),
)
FINISHED = trajectory(
    6,
    Response(
        tokens=(3, 5, 7, 9, 2),
        rollout_logprobs=(-0.5, 0.0, 0.0, -1.0, 0.0),
        version_spans=((2, 0),),
        finish_reason="stop",
        environment_spans=((1, 3), (4, 5)),
        environment_error="OSError: no tool",
        kept_tokens=(4, 3, 9),
        kept_counts=(2, 0, 0, 1, 0),
        routed_experts=bytes(range(12)),
    ),
)


def test_a_successor_reads_the_last_unfinished_responses(memory_store: MemoryStore) -> None:
    assert read_unfinished(memory_store, 1) == []
    writer = UnfinishedWriter(memory_store, 1, vocab_size=16)
    writer.write([FINISHED], 0)
    writer.write([UNFINISHED, FINISHED], 3)
    UnfinishedWriter(memory_store, 1, vocab_size=16)
    assert read_unfinished(memory_store, 1) == [(3, UNFINISHED), (3, FINISHED)]
    assert read_unfinished(memory_store, 0) == []


def test_a_replaced_generator_can_not_store_responses(memory_store: MemoryStore) -> None:
    old = UnfinishedWriter(memory_store, 0, vocab_size=16)
    UnfinishedWriter(memory_store, 0, vocab_size=16).write([UNFINISHED], 0)
    with pytest.raises(Fenced):
        old.write([FINISHED], 0)
    assert read_unfinished(memory_store, 0) == [(0, UNFINISHED)]


def test_damaged_unfinished_responses_are_ignored(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    UnfinishedWriter(store, 0, vocab_size=16).write([UNFINISHED], 0)
    (file,) = (tmp_path / layout.unfinished(0) / "seg").iterdir()
    file.write_bytes(file.read_bytes()[:-9] + b"\x01" * 9)
    assert read_unfinished(store, 0) == []
