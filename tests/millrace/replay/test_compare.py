"""Comparing losses on a stored run: the weights are those that the run had, and nothing stored is touched."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.replay.trained_run import LAST_STEP, TrainedRun
from transformers import LlamaForCausalLM

from configs.requests import Selection
from millrace.errors import InputError, ReplayError
from millrace.models.start_folder import store_start_model
from millrace.replay.compare import compare
from millrace.replay.results import Row, comparison_schema, summarize_comparison
from millrace.replay.source_run import SourceRun
from storage import layout

ALL = Selection()
LOSSES = ("aipo", "reinforce", "ppo_clip", "cispo")


def replace_start_model(run: TrainedRun, model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    (run.folder / layout.START_MANIFEST).unlink()
    store_start_model(run.store, folder)


@pytest.fixture(scope="module")
def whole(unchanged: TrainedRun) -> pa.Table:
    return compare(SourceRun(unchanged.store), list(LOSSES), selection=ALL)


@pytest.mark.slow
def test_losses_are_compared_at_the_weights_of_the_run(whole: pa.Table) -> None:
    summary = summarize_comparison(whole)
    assert summary["losses"] == list(LOSSES)
    assert summary["logprob_error"] == 0.0
    steps = [(row["step"], row["loss"]) for row in whole.select(["step", "loss"]).to_pylist()]
    assert steps == [(step, loss) for step in range(1, LAST_STEP + 1) for loss in LOSSES]
    assert whole.schema == comparison_schema(list(LOSSES))


def test_the_runs_own_loss_has_the_stored_metrics(whole: pa.Table, unchanged: TrainedRun) -> None:
    rows = [row for row in whole.to_pylist() if row["loss"] == "aipo"]
    assert [row["tokens"] for row in rows] == [
        sum(int(sample.loss_mask.sum()) for sample in unchanged.steps[step].samples) for step in range(1, LAST_STEP + 1)
    ]
    for row in rows:
        trained_step = unchanged.steps[row["step"]]
        pairs = zip(trained_step.samples, trained_step.logprobs, strict=True)
        mismatch = np.concatenate([(s.rollout_logprobs - now)[s.loss_mask.astype(bool)] for s, now in pairs])
        assert row["mismatch_kl"] == pytest.approx(mismatch.mean(), rel=1e-5)
        assert row["weight_max"] == pytest.approx(min(np.exp(-mismatch).max(), 4.0), rel=1e-5)
        staleness = [group.staleness(row["step"] - 1) for group in trained_step.groups]
        assert row["staleness_mean"] == sum(staleness) / len(staleness)


@pytest.mark.parametrize("first", [4, 5, 9])
def test_a_range_starts_from_the_checkpoint_before_it(whole: pa.Table, unchanged: TrainedRun, first: int) -> None:
    passed: list[list[Row]] = []
    selection = Selection(from_step=first, to_step=first + 1)
    part = compare(SourceRun(unchanged.store), list(LOSSES), selection=selection, each=passed.append)
    expected = [row for row in whole.to_pylist() if first <= row["step"] <= first + 1]
    assert part.to_pylist() == expected
    assert [[(row["step"], row["loss"]) for row in rows] for rows in passed] == [
        [(step, loss) for loss in LOSSES] for step in (first, first + 1)
    ]


def test_a_part_of_a_batch_is_compared_at_the_same_weights(whole: pa.Table, unchanged: TrainedRun) -> None:
    run = SourceRun(unchanged.store)
    fresh = compare(run, ["reinforce", "aipo"], selection=Selection(max_staleness=0))
    rows = fresh.to_pylist()
    assert {row["staleness_mean"] for row in rows} == {0.0}
    assert summarize_comparison(fresh)["logprob_error"] == 0.0
    assert any(row["groups"] < len(unchanged.steps[row["step"]].groups) for row in rows), "witness: some were left out"


def test_bad_input_is_refused_before_anything_is_trained(unchanged: TrainedRun) -> None:
    run = SourceRun(unchanged.store)
    with pytest.raises(InputError):
        compare(run, ["aipo", "grpo"], selection=ALL)
    with pytest.raises(ReplayError):
        compare(run, ["aipo"], selection=Selection(from_step=40))


def test_means_are_over_known_numbers_and_survive_parquet(whole: pa.Table, tmp_path: Path) -> None:
    rows = [row for row in whole.to_pylist() if row["loss"] == "cispo"]
    summary = summarize_comparison(whole)
    (mean,) = (row for row in summary["means"] if row["loss"] == "cispo")
    assert mean["grad_norm"] == pytest.approx(np.mean([row["grad_norm"] for row in rows]))
    pq.write_table(whole, tmp_path / "comparison.parquet")
    assert summarize_comparison(pq.read_table(tmp_path / "comparison.parquet")) == summary


def test_other_weights_show_in_the_log_probabilities(
    trained: TrainedRun, make_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    replace_start_model(trained, make_model(1), tmp_path / "other")

    def logprob_error(selection: Selection) -> float:
        table = compare(SourceRun(trained.store), ["aipo"], selection=selection)
        return float(summarize_comparison(table)["logprob_error"])

    assert logprob_error(Selection(to_step=1)) > 0.1
    # From a checkpoint on, the start model does not matter.
    assert logprob_error(Selection(from_step=4, to_step=4)) == 0.0
