"""The loop of the score stage, over trajectories that a test commits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stores.dict_store import DictStore
from support.streams.rows import read_rows, trajectories_of
from transformers import PreTrainedTokenizerFast

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.models.decoder import decoder_of
from millrace.runtime.arguments import StageArguments
from millrace.runtime.stage import Stage
from millrace.stages.score import _make_scorer, _score_all
from storage import layout
from storage.schema import SCORE, TRAJECTORY
from storage.streams.stream import StreamWriter

OWN = "tests.support.rewards.own_rewards"
SOURCES = {"sums": {}, "words": {"scoring": {"reward": f"{OWN}:without_result"}}}


class HurriedStage(Stage):
    """Drains where it would wait."""

    def wait(self, until: Callable[[], bool], *, why: str) -> bool:
        return until()

    def _send(self, message: object) -> None:
        """Nobody listens."""


def score(
    tokenizer: PreTrainedTokenizerFast,
    sources: list[str],
    settings: dict[str, Any] = SOURCES,
    *,
    replica: int = 0,
    pool: str = "exact_match",
) -> list[dict[str, Any]]:
    """The scores by the scorer `replica`, the first of `pool`, of a part with the response 42 from each of `sources`.

    A step has four responses.
    """
    values = {
        "training": {"max_steps": 1, "groups_per_step": 2},
        "generation": {"group_size": 2, "groups_per_batch": 1},
        "sources": settings,
    }
    store, parsed = DictStore(), RunConfig.model_validate(values)
    tokens = tokenizer.convert_tokens_to_ids(list("42"))
    writer = StreamWriter(store, layout.trajectories(0), TRAJECTORY, "generate-0")
    writer.write(trajectories_of(sources, [tokens] * len(sources), answer="42"), tokens=2 * len(sources))
    arguments = StageArguments(run_url="dict://", attempt=0, replica=replica, handover=Path("/nowhere"))
    stage = HurriedStage(name="score", arguments=arguments, config=parsed, store=store)
    with _make_scorer(stage) as scorer:
        _score_all(stage, scorer, decoder_of(tokenizer))
    return read_rows(store, layout.annotations(f"scores/{pool}", 0, 0, 1), SCORE)


def test_the_scores_of_all_sources_are_in_one_stream(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = score(tokenizer, ["words", "sums", "words", "sums"])
    assert [row["reward"] for row in rows] == [None, 1.0, None, 1.0]
    assert rows[0]["verifier_version"].startswith(OWN)
    assert rows[1]["verifier_version"] == "2"


def test_a_source_whose_reward_always_fails_ends_the_run(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError) as raised:
        score(tokenizer, ["words", "sums"] * 4)
    assert raised.value.key == "sources.words.scoring.reward"


def test_scorers_of_a_source_score_that_alone_and_no_other_scorer_does(tokenizer: PreTrainedTokenizerFast) -> None:
    settings = {"sums": {}, "words": {"scoring": {"reward": f"{OWN}:length", "replicas": 1}}}
    sources = ["words", "sums", "words"]
    shared = score(tokenizer, sources, settings)
    own = score(tokenizer, sources, settings, replica=1, pool="exact_match@words")
    assert [(row["status"], row["reward"]) for row in shared] == [("elsewhere", None), ("ok", 1.0), ("elsewhere", None)]
    assert [(row["status"], row["reward"]) for row in own] == [("ok", 2.0), ("elsewhere", None), ("ok", 2.0)]
    assert [row["row_id"] for row in own] == [row["row_id"] for row in shared] == [0, 1, 2]
