"""The rows of the teach stage, and the log-probabilities in them: those of the trainer's forward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.streams.rows import trajectories_of
from support.training.samples import make_sample
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from configs.schema import RunConfig
from millrace.runtime.arguments import StageArguments
from millrace.runtime.stage import Stage
from millrace.stages.teach import TeacherAnnotator, samples_of_rows
from millrace.training.packing import pack
from millrace.training.policy import PackedPolicy
from millrace.training.teacher import Teacher
from storage.schema import TEACHER
from storage.stores.memory import MemoryStore
from storage.streams.record import Record
from storage.streams.stream import Part
from storage.validation import validate

RESPONSES = [[3, 4, 5], [3], [6, 12], [4, 4], [7]]


@pytest.fixture
def annotator(make_model: Callable[..., LlamaForCausalLM], memory_store: MemoryStore) -> TeacherAnnotator:
    """One of the source `sums`, with the three likeliest tokens; it knows the ids below 12."""
    taught = {"training": {"distillation": {"teacher": "expert", "top_k": 3}}}
    values = {"sources": {"sums": taught, "words": {}}, "teachers": {"expert": {"path": "start"}}}
    config = RunConfig.model_validate({**values, "training": {"max_steps": 1}})
    arguments = StageArguments(run_url="memory://x", attempt=0, replica=0, handover=Path("/nowhere"))
    stage = Stage(name="teach", arguments=arguments, config=config, store=memory_store)
    return TeacherAnnotator(stage, Teacher(make_model(2), num_ids=12, max_tokens=64), "v")


def test_each_row_is_taught_or_elsewhere_or_an_error(annotator: TeacherAnnotator) -> None:
    table = trajectories_of(["sums", "words", "sums", "sums", "words"], RESPONSES, answer="42")
    rows = annotator.submit(0, Part(record=_record(5), table=table)).collect()
    validate(rows, TEACHER)
    assert rows["status"].to_pylist() == ["ok", "elsewhere", "error", "ok", "elsewhere"]
    assert rows["row_id"].to_pylist() == [0, 1, 2, 3, 4]
    assert rows["error"][2].as_py() == "token 12 is beyond the teacher's vocabulary"
    assert [len(values) for values in rows["teacher_logprobs"].to_pylist()] == [3, 0, 0, 2, 0]
    (alone,) = annotator.teacher.teach(samples_of_rows(table)[:1], 12)
    assert np.allclose(rows["teacher_logprobs"][0].as_py(), alone.logprobs, atol=1e-6)
    assert [len(values) for values in rows["teacher_top_logprobs"].to_pylist()] == [9, 0, 0, 6, 0]
    assert rows["teacher_top_tokens"][0].as_py() == alone.top_tokens[:, :3].ravel().tolist()
    assert np.allclose(rows["teacher_top_logprobs"][0].as_py(), alone.top_logprobs[:, :3].ravel(), atol=1e-6)


def test_a_part_that_can_not_be_read_has_an_error_in_each_row(annotator: TeacherAnnotator) -> None:
    rows = annotator.unread_rows(_record(3), "flipped")
    validate(rows, TEACHER)
    assert [(row["row_id"], row["status"], row["error"]) for row in rows.to_pylist()] == [
        (row_id, "error", "flipped") for row_id in (10, 11, 12)
    ]


def _record(rows: int) -> Record:
    return Record(kind="data", seq=0, epoch=0, writer="w", prev="", nonce="", rows=rows, first_row_id=10)


SAMPLES = [
    make_sample([1, 5], [4, 7, 3], temperature=0.7),
    make_sample([1, 5], [6], temperature=0.7),
    make_sample([2], [3, 4], kept_tokens=np.array([3, 8, 4]), kept_counts=np.array([2, 1])),
]


def teacher(model: LlamaForCausalLM, num_ids: int) -> Teacher:
    return Teacher(model, num_ids=num_ids, max_tokens=64)


def test_it_computes_what_the_trainer_would(
    make_model: Callable[..., LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast
) -> None:
    policy = PackedPolicy(make_model(3))
    found = teacher(make_model(3), len(tokenizer)).teach(SAMPLES, top_k=1000)
    for sample, taught in zip(SAMPLES, found, strict=True):
        assert taught.logprobs == pytest.approx(policy(pack(sample))[0].detach().numpy(), abs=1e-6)
        assert sorted(taught.top_tokens[0]) == [*range(len(tokenizer))]
        itself = taught.top_tokens == sample.response_tokens[:, None]
        assert np.array_equal(taught.top_logprobs[itself], taught.logprobs)
    assert teacher(make_model(3), len(tokenizer)).teach([]) == []


@pytest.mark.parametrize("tied", [False, True])
def test_padding_of_the_vocabulary_has_no_share(tied: bool) -> None:
    config: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "tie_word_embeddings": tied}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=10, **config))
    padded = LlamaForCausalLM(LlamaConfig(vocab_size=16, **config))
    with torch.no_grad():
        for name, tensor in plain.state_dict().items():
            target = padded.state_dict()[name]
            target[: len(tensor)] = tensor
    found, expected = teacher(padded, 10).teach(SAMPLES), teacher(plain, 10).teach(SAMPLES)
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(found, expected, strict=True))


def test_a_token_beyond_the_tokenizers_is_unknown(make_model: Callable[..., LlamaForCausalLM]) -> None:
    of_digits = teacher(make_model(3), 8)
    assert [of_digits.unknown_id(sample) for sample in SAMPLES] == [None, None, 8]
