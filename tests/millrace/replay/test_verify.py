"""Verification: a run is the same bit for bit, or the step, group and file that differ are named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import safetensors.torch
import torch
from support.replay.trained_run import GENERATORS, LAST_STEP, TrainedRun, rewrite
from support.replay.verdicts import parted
from transformers import LlamaForCausalLM

from millrace.errors import ReplayError
from millrace.models.start_folder import store_start_model
from millrace.replay.results import StepVerdict
from millrace.replay.source_run import SourceRun
from millrace.replay.verify import verify
from millrace.runtime.metrics import MetricsWriter
from storage import layout
from storage.checkpoints import CheckpointWriter, load_file
from storage.schema import TRAINER_LOGPROBS
from storage.streams.stream import write_removed

THREADS = torch.get_num_threads()


def test_a_run_with_a_rollback_is_reproduced_bit_for_bit(unchanged: TrainedRun) -> None:
    files = {path: path.read_bytes() for path in unchanged.folder.rglob("*") if path.is_file()}
    passed: list[StepVerdict] = []
    verdict = verify(unchanged.store, each=passed.append)
    assert verdict.sentence == "steps 1 to 12 and 4 checkpoints are the same bit for bit"
    assert [(step.step, step.logprobs_difference) for step in passed] == [(n, 0.0) for n in range(1, LAST_STEP + 1)]
    assert [checkpoint.step for checkpoint in verdict.checkpoints] == [3, 6, 9, 12]
    assert all(stored.hash == stored.stored_hash and stored.identical for stored in verdict.checkpoints)
    assert len({stored.hash for stored in verdict.checkpoints}) == 4, "the weights moved"
    assert (verdict.difference, verdict.unlike) == (None, {})
    values = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert (values["steps"], values["sentence"]) == (LAST_STEP, verdict.sentence)
    samples = [sample for trained in unchanged.steps.values() for sample in trained.samples]
    assert sum(step.rollouts for step in passed) == len(samples)
    assert sum(step.tokens for step in passed) == sum(len(sample.response_tokens) for sample in samples)
    part = verify(unchanged.store, from_step=6, to_step=10)
    assert part.sentence == "steps 7 to 10 and 1 checkpoint are the same bit for bit"
    assert {path: path.read_bytes() for path in unchanged.folder.rglob("*") if path.is_file()} == files


def test_steps_are_trained_with_the_threads_of_their_attempt(trained: TrainedRun) -> None:
    record = json.loads((trained.folder / layout.attempt(1)).read_text())
    record["config"]["training"]["threads"] = 2
    (trained.folder / layout.attempt(1)).write_text(json.dumps(record))
    threads: list[int] = []
    verify(
        trained.store,
        from_step=3,
        to_step=9,
        tolerance=0.01,
        each=lambda step: threads.append(torch.get_num_threads()),
    )
    assert threads == [1, 1, 1, 2, 2, 2]
    assert torch.get_num_threads() == THREADS


def test_another_start_model_is_found_at_the_first_step(
    trained: TrainedRun, make_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    replace_start(trained, make_model(1), tmp_path)
    verdict = verify(trained.store)
    assert parted(verdict)[:2] == (1, "logprobs")
    assert verdict.sentence.endswith("(cause: the start model is not the one that the run started from)")
    # From a checkpoint on, the start model's weights do not matter.
    assert verify(trained.store, from_step=9).difference is None


def replace_start(run: TrainedRun, model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder / "other")
    (run.folder / layout.START_MANIFEST).unlink()
    store_start_model(run.store, folder / "other")


def test_a_different_environment_is_named_as_the_cause(trained: TrainedRun) -> None:
    for path in (layout.RUN, layout.attempt(1)):
        record = json.loads((trained.folder / path).read_text())
        record["provenance"]["dependencies"]["torch"] = "1.0"
        (trained.folder / path).write_text(json.dumps(record))
    bump_logprobs(trained, 3, 0.5)
    verdict = verify(trained.store)
    assert verdict.unlike == {"dependencies.torch": ("1.0", torch.__version__)}
    assert parted(verdict)[:2] == (3, "logprobs")
    assert verdict.sentence.endswith(f"(cause: dependencies.torch was 1.0 and is {torch.__version__})")


def test_layers_that_were_compiled_and_are_not_now_are_named_as_the_cause(trained: TrainedRun) -> None:
    metrics = MetricsWriter(trained.store, "train", 0)
    for step in (2, 3):
        metrics.log(incarnation=1, policy_version=step, compiled=step == 3)
    metrics.close()
    bump_logprobs(trained, 3, 1e-6)
    verdict = verify(trained.store)
    assert verdict.unlike == {"training.compile": (True, False)}
    assert parted(verdict)[:2] == (3, "logprobs")


def bump_logprobs(run: TrainedRun, step: int, by: float) -> None:
    """Adds `by` to every stored log π of the step."""
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
    assert bumped == len(run.steps[step].samples)


def test_a_tolerance_passes_small_differences(trained: TrainedRun) -> None:
    bump_logprobs(trained, 5, 1e-4)
    assert parted(verify(trained.store))[:2] == (5, "logprobs")
    assert parted(verify(trained.store, tolerance=1e-5))[:2] == (5, "logprobs")
    verdict = verify(trained.store, tolerance=1e-3)
    assert verdict.sentence == "steps 1 to 12 and 4 checkpoints are the same within 0.001"


def test_without_log_probabilities_only_checkpoints_are_compared(trained: TrainedRun) -> None:
    assert SourceRun(trained.store).logprobs_stored(1)
    shutil.rmtree(trained.folder / layout.TRAINER_LOGPROBS / "seg")
    write_removed(trained.store, layout.TRAINER_LOGPROBS, parts=100, why="test")
    verdict = verify(trained.store)
    assert verdict.sentence == (
        "steps 1 to 12 and 4 checkpoints are the same bit for bit; "
        "the run stored no log-probabilities of 12 of these steps"
    )
    with pytest.raises(ReplayError):
        verify(trained.store, from_step=3, to_step=5)


@pytest.mark.parametrize(
    ("file", "tensor"),
    [("model.safetensors", "model.norm.weight"), ("optimizer.safetensors", "exp_avg.model.norm.weight")],
)
def test_other_weights_or_optimizer_state_are_found(trained: TrainedRun, file: str, tensor: str) -> None:
    checkpoints = CheckpointWriter(trained.store)
    latest = checkpoints.latest
    assert latest is not None
    files = {name: load_file(trained.store, ref) for name, ref in latest.files.items()}
    tensors = safetensors.torch.load(files[file])
    tensors[tensor][3] += 0.25
    files[file] = safetensors.torch.save(tensors)
    checkpoints.commit(latest.step, files, latest.state)
    verdict = verify(trained.store)
    assert parted(verdict)[:2] == (LAST_STEP, "weights")
    assert verdict.sentence.endswith("(cause: unknown)")
    assert [checkpoint.step for checkpoint in verdict.checkpoints] == [3, 6, 9]
    assert verify(trained.store, tolerance=0.3).sentence.endswith("are the same within 0.3")


def test_a_run_of_several_ranks_is_verified_by_one(trained: TrainedRun) -> None:
    for path in (layout.RUN, layout.attempt(1)):
        record = json.loads((trained.folder / path).read_text())
        record["config"]["training"] |= {"parallel": {"data": 2, "tensor": 1}, "device": "cuda"}
        (trained.folder / path).write_text(json.dumps(record))
    bump_logprobs(trained, 3, 1e-6)
    assert verify(trained.store).unlike.keys() == {"training.parallel.data", "training.device"}


@pytest.mark.parametrize(
    "steps", [{"from_step": 7}, {"from_step": 12}, {"from_step": 6, "to_step": 4}, {"to_step": 15}]
)
def test_steps_that_are_not_stored_are_refused(unchanged: TrainedRun, steps: dict[str, int]) -> None:
    with pytest.raises(ReplayError):
        verify(unchanged.store, each=_fail, **steps)


def test_a_run_that_stored_too_little_is_refused(
    trained: TrainedRun, make_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    for generator in range(GENERATORS):
        write_removed(trained.store, layout.trajectories(generator), parts=2, why="test")
    with pytest.raises(ReplayError):
        verify(trained.store, each=_fail)
    assert verify(trained.store, from_step=9).difference is None
    resized = make_model(0)
    resized.resize_token_embeddings(20)
    for number, model in enumerate((make_model(0, hidden_size=32), resized)):
        replace_start(trained, model, tmp_path / str(number))
        with pytest.raises(ReplayError):
            verify(trained.store, from_step=9, each=_fail)
    shutil.rmtree(trained.folder / "checkpoints/data")
    with pytest.raises(ReplayError):
        verify(trained.store, from_step=9)


def _fail(step: StepVerdict) -> None:
    pytest.fail(f"step {step.step} was trained")
