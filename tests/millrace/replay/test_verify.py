"""Verifying a run: the same bit for bit, or the very step, group and file where it parts from what is stored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import safetensors.torch
import torch
from support.replay.trained_run import (
    GENERATORS,
    LAST_STEP,
    TrainedRun,
    rewrite,
)
from support.replay.verdicts import parted
from transformers import LlamaForCausalLM

from millrace.errors import ReplayError, RunMissing
from millrace.models.start_folder import store_start_model
from millrace.replay.sources.source_run import SourceRun
from millrace.replay.verdict import StepVerdict
from millrace.replay.verify import verify
from storage import layout
from storage.checkpoints import CheckpointWriter, load_file
from storage.schema import TRAINER_LOGPROBS
from storage.stores.memory import MemoryStore
from storage.streams.stream import write_removed

THREADS = torch.get_num_threads()


def test_a_run_rolled_back_on_its_way_is_reproduced_bit_for_bit(unchanged: TrainedRun) -> None:
    passed: list[StepVerdict] = []
    verdict = verify(unchanged.store, each=passed.append)
    assert verdict.sentence == "steps 1 to 12 and 4 checkpoints are the same bit for bit"
    assert [step.step for step in passed] == list(range(1, LAST_STEP + 1))
    assert [step.logprobs_difference for step in passed] == [0.0] * LAST_STEP
    assert [checkpoint.step for checkpoint in verdict.checkpoints] == [3, 6, 9, 12]
    assert all(one.hash == one.stored_hash and one.optimizer_identical for one in verdict.checkpoints)
    assert len({one.hash for one in verdict.checkpoints}) == 4, "witness: the weights moved"
    assert verdict.rollouts == sum(len(told.samples) for told in unchanged.told.values())
    assert verdict.tokens == sum(len(one.response_tokens) for told in unchanged.told.values() for one in told.samples)
    assert (verdict.difference, verdict.inexact_step, verdict.unlike) == (None, None, {})
    values = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert (values["steps"], values["sentence"]) == (LAST_STEP, verdict.sentence)


def test_it_begins_with_any_stored_checkpoint_and_ends_where_it_is_told(unchanged: TrainedRun) -> None:
    verdict = verify(unchanged.store, from_step=6, to_step=10)
    assert verdict.sentence == "steps 7 to 10 and 1 checkpoint are the same bit for bit"
    assert [checkpoint.step for checkpoint in verdict.checkpoints] == [9]


@pytest.mark.slow
def test_another_number_of_threads_is_fine_where_the_numbers_are_the_same_and_else_the_cause(
    unchanged: TrainedRun,
) -> None:
    threads: list[int] = []
    verdict = verify(unchanged.store, to_step=3, threads=2)
    assert verdict.unlike == {"training.threads": (1, 2)}
    # Whether threads round differently is the machine's to say.
    assert verdict.difference is None or verdict.difference.causes == ("training.threads was 1 and is 2",)
    for asked, each_step in ((2, [2, 2, 2]), (None, [1, 1, 1])):
        threads.clear()
        verify(
            unchanged.store,
            to_step=3,
            threads=asked,
            tolerance=0.01,
            each=lambda step: threads.append(torch.get_num_threads()),
        )
        assert threads == each_step
    assert torch.get_num_threads() == THREADS, "as it was before"


def test_reading_leaves_the_run_as_it_is(trained: TrainedRun) -> None:
    before = {path: path.read_bytes() for path in trained.folder.rglob("*") if path.is_file()}
    verify(trained.store, from_step=9)
    assert {path: path.read_bytes() for path in trained.folder.rglob("*") if path.is_file()} == before


def test_another_start_model_is_found_at_the_first_step(
    trained: TrainedRun, make_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    replace_start(trained, make_model(1), tmp_path)
    verdict = verify(trained.store)
    step, what, sentence = parted(verdict)
    assert (step, what) == (1, "logprobs")
    count = len(trained.told[1].samples)
    assert f"differs on {count} of {count} trajectories" in sentence
    assert verdict.sentence.endswith("(cause: the start model is not the one that the run started from)")
    # From a checkpoint on, the start model's weights do not matter.
    assert verify(trained.store, from_step=9).difference is None


def replace_start(run: TrainedRun, model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder / "other")
    (run.folder / layout.START_MANIFEST).unlink()
    store_start_model(run.store, folder / "other")


def test_what_differs_between_there_and_here_is_named_as_the_cause(trained: TrainedRun) -> None:
    for path in (layout.RUN, layout.attempt(1)):
        record = json.loads((trained.folder / path).read_text())
        record["provenance"]["dependencies"]["torch"] = "1.0"
        (trained.folder / path).write_text(json.dumps(record))
    bump_logprobs(trained, 3, 0.5)
    verdict = verify(trained.store)
    assert verdict.unlike == {"dependencies.torch": ("1.0", torch.__version__)}
    assert parted(verdict)[:2] == (3, "logprobs")
    assert verdict.sentence.endswith(f"(cause: dependencies.torch was 1.0 and is {torch.__version__})")


def test_a_run_that_several_ranks_trained_is_verified_by_one_and_the_sentence_says_so(trained: TrainedRun) -> None:
    for path in (layout.RUN, layout.attempt(1)):
        record = json.loads((trained.folder / path).read_text())
        record["config"]["training"] |= {"parallel": {"data": 2, "tensor": 1}, "device": "cuda"}
        (trained.folder / path).write_text(json.dumps(record))
    bump_logprobs(trained, 3, 1e-6)
    sentence = verify(trained.store).sentence
    assert sentence.endswith("(cause: training.parallel.data was 2 and is 1; training.device was cuda and is cpu)")


def bump_logprobs(run: TrainedRun, step: int, by: float) -> None:
    """Every stored log π of the step is another."""
    bumped = 0

    def change(table: pa.Table) -> pa.Table:
        nonlocal bumped
        versions = table["policy_version"].to_pylist()
        values = [
            [value + by for value in row] if version == step else row
            for version, row in zip(versions, table["trainer_logprobs"].to_pylist(), strict=True)
        ]
        bumped += versions.count(step)
        place = table.schema.get_field_index("trainer_logprobs")
        field = table.schema.field(place)
        return table.set_column(place, field, pa.array(values, field.type))

    rewrite(run, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS, change)
    assert bumped == len(run.told[step].samples), "witness"


def test_a_tolerance_passes_what_is_near_and_tells_from_where_on_it_is_not_the_same(trained: TrainedRun) -> None:
    bump_logprobs(trained, 5, 1e-4)
    assert parted(verify(trained.store))[:2] == (5, "logprobs")
    assert parted(verify(trained.store, tolerance=1e-5))[:2] == (5, "logprobs")
    verdict = verify(trained.store, tolerance=1e-3)
    assert verdict.inexact_step == 5
    assert verdict.sentence == "steps 1 to 12 and 4 checkpoints are the same within 0.001, bit for bit up to step 4"


def test_weights_of_a_checkpoint_that_are_others_are_found_with_both_hashes(trained: TrainedRun) -> None:
    checkpoints = CheckpointWriter(trained.store)
    latest = checkpoints.latest
    assert latest is not None
    files = {name: load_file(trained.store, ref) for name, ref in latest.files.items()}
    weights = safetensors.torch.load(files["model.safetensors"])
    weights["model.norm.weight"][3] += 0.25
    files["model.safetensors"] = safetensors.torch.save(weights)
    checkpoints.commit(latest.step, files, latest.state)
    verdict = verify(trained.store)
    step, what, sentence = parted(verdict)
    assert (step, what) == (LAST_STEP, "weights")
    assert "they differ by at most 0.25, the optimizer's state by 0" in sentence
    assert verdict.sentence.endswith("(cause: unknown)")
    assert [one.step for one in verdict.checkpoints] == [3, 6, 9]
    assert verify(trained.store, tolerance=0.3).inexact_step == LAST_STEP


def test_an_optimizer_that_is_another_is_found_though_the_weights_are_the_same(trained: TrainedRun) -> None:
    checkpoints = CheckpointWriter(trained.store)
    latest = checkpoints.latest
    assert latest is not None
    files = {name: load_file(trained.store, ref) for name, ref in latest.files.items()}
    optimizer = safetensors.torch.load(files["optimizer.safetensors"])
    optimizer["exp_avg.model.norm.weight"][3] += 0.25
    files["optimizer.safetensors"] = safetensors.torch.save(optimizer)
    checkpoints.commit(latest.step, files, latest.state)
    step, what, sentence = parted(verify(trained.store))
    assert (step, what) == (LAST_STEP, "weights")
    assert "they differ by at most 0, the optimizer's state by 0.25" in sentence


def test_steps_without_stored_log_probabilities_are_compared_at_the_checkpoints_alone(trained: TrainedRun) -> None:
    assert SourceRun(trained.store).logprobs_stored(1), "witness: they were there"
    shutil.rmtree(trained.folder / layout.TRAINER_LOGPROBS / "seg")
    write_removed(trained.store, layout.TRAINER_LOGPROBS, parts=100, why="test")
    verdict = verify(trained.store)
    assert verdict.sentence == (
        "steps 1 to 12 and 4 checkpoints are the same bit for bit; "
        "the run stored no log-probabilities of 12 of these steps"
    )
    with pytest.raises(ReplayError, match="of steps 4 to 5 neither checkpoints nor log-probabilities are stored"):
        verify(trained.store, from_step=3, to_step=5, each=_never)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"from_step": 7}, "no checkpoint of version 7 is stored; those stored are of: 3, 6, 9, 12"),
        (
            {"from_step": 12},
            "there is no step after version 12 up to version 12; stored are steps 1 to 12",
        ),
        ({"from_step": 6, "to_step": 4}, "there is no step after version 6 up to version 4; stored are"),
        ({"to_step": 15}, "what step 13 trained is not stored; stored are steps 1 to 12"),
    ],
)
def test_what_is_not_stored_is_refused_in_a_sentence(
    unchanged: TrainedRun, asked: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ReplayError) as raised:
        verify(unchanged.store, **asked)
    assert str(raised.value).startswith(f"{unchanged.store.url}: {sentence}")


def test_a_run_without_checkpoints_is_refused_before_anything_is_trained(trained: TrainedRun) -> None:
    shutil.rmtree(trained.folder / "checkpoints/data")
    with pytest.raises(ReplayError, match="no checkpoint with its files: there are no weights to compare with"):
        verify(trained.store, each=_never)


def test_a_run_of_which_gc_removed_parts_is_refused_before_anything_is_trained(trained: TrainedRun) -> None:
    for generator in range(GENERATORS):
        write_removed(trained.store, layout.trajectories(generator), parts=2, why="test")
    with pytest.raises(ReplayError, match="expected a range that begins with step"):
        verify(trained.store, each=_never)
    assert verify(trained.store, from_step=9).difference is None


def test_a_model_of_another_shape_is_refused_before_anything_is_trained(
    trained: TrainedRun, make_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    replace_start(trained, make_model(0, hidden_size=32), tmp_path)
    with pytest.raises(ReplayError, match="its model has other tensors than the checkpoints of"):
        verify(trained.store, from_step=6, each=_never)


def test_a_model_of_another_vocabulary_is_refused_before_anything_is_trained(
    trained: TrainedRun, make_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    model = make_model(0)
    model.resize_token_embeddings(20)
    replace_start(trained, model, tmp_path)
    with pytest.raises(ReplayError, match=r"its model has a vocabulary of 20, but the tokens of .* are of one of 15"):
        verify(trained.store, each=_never)


def test_where_there_is_no_run_there_is_nothing_to_verify(memory_store: MemoryStore) -> None:
    with pytest.raises(RunMissing, match="no run at"):
        verify(memory_store)


def _never(step: StepVerdict) -> None:
    pytest.fail(f"step {step.step} was trained")
