"""A campaign that is evaluated while it trains, and that its evaluations end."""

from pathlib import Path

import pytest
from support.campaigns.campaigns import Millrace

from millrace.evaluation.results import ResultsReader, measures_by_set
from millrace.training.checkpoints.names import weights_checksum
from storage.checkpoints import stored_checkpoints

pytestmark = [pytest.mark.campaign, pytest.mark.extended]


def test_versions_are_evaluated_during_training_which_ends_when_none_is_better(
    millrace: Millrace, tmp_path: Path
) -> None:
    easy = tmp_path / "easy.jsonl"
    easy.write_text("".join(f'{{"prompt": "0{n}+00=", "answer": "0{n}"}}\n' for n in range(10)))
    settings = {
        "training.max_steps": 1000,
        # So slow that no answer changes.
        "training.learning_rate": 1e-12,
        "training.checkpoint_every": 1000,
        "evaluation.every": 2,
        "evaluation.stop_after": 2,
        "evaluation.sets.easy.source": str(easy),
        "evaluation.sets.easy.num_prompts": 6,
        "evaluation.sets.easy.samples": 2,
    }
    summary = millrace.finish("watched", **settings)
    assert (summary["state"], summary["attempt"]) == ("finished", 0)
    assert 4 <= summary["steps"] < 1000
    assert "evaluation.stop_after is 2" in summary["early_stop"]

    store = millrace.store("watched")
    checkpoints = stored_checkpoints(store)
    start, *results = ResultsReader(store).read()
    assert (start["policy_version"], start["weights_checksum"]) == (0, None)
    assert len(results) >= 2
    *during, last = [result["policy_version"] for result in results]
    assert last == summary["steps"]
    assert all(version % 2 == 0 for version in during)
    for result in results:
        assert result["weights_checksum"] == weights_checksum(checkpoints[result["policy_version"]])
    for result in (start, *results):
        sets = measures_by_set(result)
        assert {name: measures["prompts"] for name, measures in sets.items()} == {"held_out": 32, "easy": 6}
        assert sets["easy"]["pass_at"].keys() == {"1", "2"}
    assert set(range(2, last, 2)) <= checkpoints.keys(), "each version that fell due was checkpointed"
