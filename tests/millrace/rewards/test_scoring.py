"""A table of trajectories becomes a table of scores, row by row; a reward that fails leaves an error and no number."""

import copy
import json
import time
from collections.abc import Callable

import pyarrow as pa
import pytest
from support.rewards.one_source import scorer_of
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from configs.stored import DEFAULT_SOURCE
from configs.task import ScoringConfig
from millrace.models.decoder import decoder_of
from millrace.rewards.base import Reward, Score
from millrace.rewards.factory import make_reward
from millrace.rewards.isolation.sandbox import Limits
from millrace.rewards.rows import UnscoredRows
from millrace.rollouts.arrow import prompt_meta, trajectory_table
from millrace.types import Prompt, Sampling, Trajectory
from storage.schema import SCORE
from storage.validation import validate

MakeTrajectories = Callable[..., list[Trajectory]]

FIRST_ROW_ID = 10


class LengthReward(Reward):
    """Rewards the length of the response, refuses to score one prompt, and remembers its inputs."""

    name = "length"
    version = "7"

    def __init__(self) -> None:
        self.shown: list[tuple[Prompt, str]] = []

    def score(self, prompt: Prompt, response: str) -> Score:
        self.shown.append((prompt, response))
        if prompt.prompt_id == "p5":
            raise ArithmeticError("can't count")
        return Score(reward=float(len(response)), components={"length": float(len(response))})


def scored(trajectories: pa.Table, reward: Reward, tokenizer: PreTrainedTokenizerFast) -> pa.Table:
    with scorer_of(reward) as scorer:
        return UnscoredRows.submit(trajectories, scorer, decoder_of(tokenizer)).collect()


@pytest.fixture
def rollouts(make_trajectories: MakeTrajectories) -> list[Trajectory]:
    return make_trajectories([4, 5, 6], group_size=2)


@pytest.fixture
def trajectories(rollouts: list[Trajectory]) -> pa.Table:
    return trajectory_table(
        rollouts,
        first_row_id=FIRST_ROW_ID,
        sampling={DEFAULT_SOURCE: Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4)},
        incarnation=0,
        generator=0,
        epoch=0,
    )


def test_each_trajectory_gets_a_score_under_its_row_id_or_an_error(
    trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast
) -> None:
    begun = time.time()
    scores = scored(trajectories, LengthReward(), tokenizer)
    validate(scores, SCORE)
    times = scores["t_scored"].to_pylist()
    assert times == sorted(times) and begun <= times[0] <= times[-1] <= time.time()
    assert scores["row_id"].to_pylist() == trajectories["row_id"].to_pylist() == list(range(10, 16))
    assert set(scores["verifier_version"].to_pylist()) == {"7"}
    rows = scores.to_pylist()
    assert [row["status"] for row in rows] == ["ok", "ok", "error", "error", "ok", "ok"]
    for row, tokens in zip(rows, trajectories["response_tokens"].to_pylist(), strict=True):
        if row["status"] == "ok":
            assert (row["reward"], row["error"]) == (len(tokens), None)
            assert json.loads(row["components"]) == {"length": len(tokens)}
        else:
            assert (row["reward"], row["error"]) == (None, "ArithmeticError: can't count")


def test_the_first_response_without_a_score_is_reported_once(
    trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast
) -> None:
    reports: list[str] = []
    with scorer_of(LengthReward()) as scorer:
        scorer.on_first_failure = reports.append
        for _ in range(2):
            UnscoredRows.submit(trajectories, scorer, decoder_of(tokenizer)).collect()
    [sentence] = reports
    assert "p5" in sentence and "ArithmeticError: can't count" in sentence


def test_the_verifier_sees_the_prompt_and_the_decoded_response(
    trajectories: pa.Table, rollouts: list[Trajectory], tokenizer: PreTrainedTokenizerFast
) -> None:
    reward = LengthReward()
    scored(trajectories, reward, tokenizer)
    assert reward.shown == [
        (rollout.prompt, "".join(tokenizer.convert_ids_to_tokens(list(rollout.response.tokens))))
        for rollout in rollouts
    ]


def _thinking(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A copy of `tokenizer` that has the marks of a chat model as special tokens."""
    thinking = copy.deepcopy(tokenizer)
    thinking.add_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in ("<think>", "</think>", "<|im_end|>")],
        special_tokens=True,
    )
    return thinking


def with_columns(trajectories: pa.Table, **values: object) -> pa.Table:
    """The same rows, with one value for all of them in each of these columns."""
    for name, value in values.items():
        index = trajectories.column_names.index(name)
        column = pa.array([value] * trajectories.num_rows, trajectories.schema.field(name).type)
        trajectories = trajectories.set_column(index, name, column)
    return trajectories


@pytest.mark.parametrize(
    ("prompt", "response", "reason", "text"),
    [
        ("3+4=", "<think>3+4=7</think>12<|im_end|>", "stop", "<think>3+4=7</think>12"),
        ("3+4=", "3+4=7</think>", "length", "3+4=7</think>"),
        ("3+4=<think>", "3+4=7</think>12<|im_end|>", "stop", "<think>\n3+4=7</think>12"),
        ("3+4=<think>", "3+4=7", "length", "<think>\n3+4=7"),
        ("3+4=<think></think>", "12", "length", "12"),
    ],
)
def test_marks_of_thoughts_are_scored_and_the_end_of_a_turn_is_not(
    trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast, prompt: str, response: str, reason: str, text: str
) -> None:
    thinking, reward = _thinking(tokenizer), LengthReward()
    prompt_tokens, tokens = (thinking(part, add_special_tokens=False)["input_ids"] for part in (prompt, response))
    trajectories = with_columns(
        trajectories,
        prompt_tokens=prompt_tokens,
        response_tokens=tokens,
        loss_mask=[1] * len(tokens),
        finish_reason=reason,
    )
    scored(trajectories, reward, thinking)
    assert {response for _, response in reward.shown} == {text}


@pytest.mark.parametrize(
    ("mask", "text"), [([1, 1, 1, 1], "1234"), ([1, 0, 1, 1], "34"), ([0, 1, 0, 1], "4"), ([1, 1, 1, 0], "")]
)
def test_only_the_last_text_of_the_policy_is_scored(
    trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast, mask: list[int], text: str
) -> None:
    reward, tokens = LengthReward(), tokenizer.convert_tokens_to_ids(list("1234"))
    scored(with_columns(trajectories, response_tokens=tokens, loss_mask=mask), reward, tokenizer)
    assert {response for _, response in reward.shown} == {text}


def test_a_rollout_with_an_environment_error_is_not_scored(
    rollouts: list[Trajectory], trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast
) -> None:
    metas = trajectories["meta"].to_pylist()
    metas[1] = prompt_meta(rollouts[1].prompt, "OSError: no tool")
    index, reward = trajectories.column_names.index("meta"), LengthReward()
    rows = scored(trajectories.set_column(index, "meta", pa.array(metas)), reward, tokenizer).to_pylist()
    assert (rows[1]["reward"], rows[1]["status"], rows[1]["error"]) == (None, "error", "environment: OSError: no tool")
    assert (rows[0]["status"], rows[4]["status"]) == ("ok", "ok")
    assert len(reward.shown) == len(rows) - 1


def test_scores_from_other_processes_keep_their_order(
    trajectories: pa.Table, rollouts: list[Trajectory], tokenizer: PreTrainedTokenizerFast
) -> None:
    beats: list[None] = []
    with scorer_of(
        make_reward(ScoringConfig(reward="tests.support.rewards.own_rewards:length")),
        Limits(workers=2),
    ) as scorer:
        scores = UnscoredRows.submit(trajectories, scorer, decoder_of(tokenizer), lambda: beats.append(None)).collect()
    validate(scores, SCORE)
    assert scores["reward"].to_pylist() == [len(rollout.response.tokens) for rollout in rollouts]
    assert scores["verifier_version"].to_pylist()[0].startswith("tests.support.rewards.own_rewards:length ")
    assert beats
