"""A table of trajectories becomes a table of scores: row by row, and a reward that fails leaves no number behind."""

import copy
import json
from collections.abc import Callable

import pyarrow as pa
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from configs.scoring import ScoringConfig
from millrace.models.decoder import decoder_of
from millrace.rewards.base import Reward, Score
from millrace.rewards.factory import make_reward
from millrace.rewards.isolation.sandbox import Limits
from millrace.rewards.scorer import Scorer
from millrace.rollouts.arrow import prompt_meta, trajectory_table
from millrace.stages.score import score_table
from millrace.types import Prompt, Sampling, Trajectory
from storage.schema import SCORE
from storage.validation import validate

MakeTrajectories = Callable[..., list[Trajectory]]

FIRST_ROW_ID = 10


class LengthReward(Reward):
    """Rewards the length of the response, refuses to score one prompt, and remembers what it was shown."""

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
    with Scorer(reward) as scorer:
        return score_table(trajectories, scorer, decoder_of(tokenizer))


@pytest.fixture
def rollouts(make_trajectories: MakeTrajectories) -> list[Trajectory]:
    return make_trajectories([4, 5, 6], group_size=2)


@pytest.fixture
def trajectories(rollouts: list[Trajectory]) -> pa.Table:
    return trajectory_table(
        rollouts,
        first_row_id=FIRST_ROW_ID,
        sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4),
        incarnation=0,
        generator=0,
        epoch=0,
    )


def test_there_is_one_score_a_trajectory_under_its_row_id_and_in_its_order(
    trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast
) -> None:
    scores = scored(trajectories, LengthReward(), tokenizer)
    validate(scores, SCORE)
    assert scores["row_id"].to_pylist() == trajectories["row_id"].to_pylist() == list(range(10, 16))
    assert set(scores["verifier_version"].to_pylist()) == {"7"}
    for score, tokens in zip(scores.to_pylist(), trajectories["response_tokens"].to_pylist(), strict=True):
        if score["status"] == "ok":
            assert score["reward"] == len(tokens)
            assert json.loads(score["components"]) == {"length": len(tokens)}
            assert score["error"] is None


def test_a_reward_that_raises_leaves_its_reason_and_no_reward(
    trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = scored(trajectories, LengthReward(), tokenizer).to_pylist()
    assert [row["status"] for row in rows] == ["ok", "ok", "error", "error", "ok", "ok"]
    assert [row["reward"] for row in rows[2:4]] == [None, None]
    assert {row["error"] for row in rows[2:4]} == {"ArithmeticError: can't count"}


def test_the_first_response_without_a_score_is_reported_once(
    trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast
) -> None:
    told: list[str] = []
    with Scorer(LengthReward()) as scorer:
        scorer.on_first_failure = told.append
        for _ in range(2):
            score_table(trajectories, scorer, decoder_of(tokenizer))
    [sentence] = told
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


def _with_tokens(trajectories: pa.Table, name: str, tokens: list[int]) -> pa.Table:
    column = pa.array([tokens] * trajectories.num_rows, pa.list_(pa.int32()))
    return trajectories.set_column(trajectories.column_names.index(name), name, column)


@pytest.mark.parametrize(
    ("asked", "response", "reason", "judged"),
    [
        ("3+4=", "<think>3+4=7</think>12<|im_end|>", "stop", "<think>3+4=7</think>12"),
        ("3+4=", "3+4=7</think>", "length", "3+4=7</think>"),
        ("3+4=<think>", "3+4=7</think>12<|im_end|>", "stop", "<think>\n3+4=7</think>12"),
        ("3+4=<think>", "3+4=7", "length", "<think>\n3+4=7"),
        ("3+4=<think></think>", "12", "length", "12"),
    ],
)
def test_the_marks_of_thoughts_are_judged_and_the_end_of_a_turn_is_not(
    trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast, asked: str, response: str, reason: str, judged: str
) -> None:
    thinking, reward = _thinking(tokenizer), LengthReward()
    for name, text in (("prompt_tokens", asked), ("response_tokens", response)):
        trajectories = _with_tokens(trajectories, name, thinking(text, add_special_tokens=False)["input_ids"])
    mask = pa.array([[1] * len(trajectories["response_tokens"][0])] * trajectories.num_rows, pa.list_(pa.uint8()))
    trajectories = trajectories.set_column(trajectories.column_names.index("loss_mask"), "loss_mask", mask)
    reasons = pa.array([reason] * trajectories.num_rows)
    trajectories = trajectories.set_column(trajectories.column_names.index("finish_reason"), "finish_reason", reasons)
    scored(trajectories, reward, thinking)
    assert {response for _, response in reward.shown} == {judged}


def with_mask(trajectories: pa.Table, mask: list[int], tokens: list[int]) -> pa.Table:
    """The same rows, each with this response."""
    for name, kind, values in (("response_tokens", pa.int32(), tokens), ("loss_mask", pa.uint8(), mask)):
        column = pa.array([values] * trajectories.num_rows, pa.list_(kind))
        trajectories = trajectories.set_column(trajectories.column_names.index(name), name, column)
    return trajectories


@pytest.mark.parametrize(
    ("mask", "judged"), [([1, 1, 1, 1], "1234"), ([1, 0, 1, 1], "34"), ([0, 1, 0, 1], "4"), ([1, 1, 1, 0], "")]
)
def test_what_the_policy_said_last_is_judged_and_nothing_that_an_environment_wrote(
    trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast, mask: list[int], judged: str
) -> None:
    reward, tokens = LengthReward(), tokenizer.convert_tokens_to_ids(list("1234"))
    scored(with_mask(trajectories, mask, tokens), reward, tokenizer)
    assert {response for _, response in reward.shown} == {judged}


def test_a_rollout_that_its_environment_broke_off_is_an_error_and_not_judged(
    rollouts: list[Trajectory], trajectories: pa.Table, tokenizer: PreTrainedTokenizerFast
) -> None:
    metas = trajectories["meta"].to_pylist()
    metas[1] = prompt_meta(rollouts[1].prompt, "OSError: no tool")
    index, reward = trajectories.column_names.index("meta"), LengthReward()
    rows = scored(trajectories.set_column(index, "meta", pa.array(metas)), reward, tokenizer).to_pylist()
    assert (rows[1]["reward"], rows[1]["status"], rows[1]["error"]) == (None, "error", "environment: OSError: no tool")
    assert (rows[0]["status"], rows[4]["status"]) == ("ok", "ok")
    assert len(reward.shown) == len(rows) - 1


def test_a_part_that_is_judged_by_other_processes_keeps_its_order(
    trajectories: pa.Table, rollouts: list[Trajectory], tokenizer: PreTrainedTokenizerFast
) -> None:
    beats: list[None] = []
    with Scorer(
        make_reward(ScoringConfig(reward="tests.support.rewards.own_rewards:length")),
        Limits(workers=2),
    ) as scorer:
        scores = score_table(trajectories, scorer, decoder_of(tokenizer), each=lambda: beats.append(None))
    validate(scores, SCORE)
    assert scores["reward"].to_pylist() == [len(rollout.response.tokens) for rollout in rollouts]
    assert scores["verifier_version"].to_pylist()[0].startswith("tests.support.rewards.own_rewards:length ")
    assert beats
