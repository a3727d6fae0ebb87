"""Prompts: the split leaks nothing, the order skips and repeats nothing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import RunConfig
from configs.task import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.dataset import PromptOrder, PromptSet, load_all_prompts, load_prompts
from millrace.types import Prompt


def load(**options: Any) -> PromptSet:
    return load_prompts(PromptsConfig(**{"num_eval": 512, **options}))


def write_jsonl(path: Path, records: Sequence[object]) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def questions(num: int, start: int = 0) -> list[dict[str, object]]:
    return [{"prompt": f"question {n}", "answer": f"answer {n}"} for n in range(start, start + num)]


def numbered_prompts(num: int) -> list[Prompt]:
    return [Prompt(prompt_id=str(n), text=f"question {n}", answer="a", source="test") for n in range(num)]


# --- arithmetic


def test_arithmetic_prompts_are_zero_padded_sums() -> None:
    prompts = {prompt.prompt_id: prompt for half in (load().train, load().eval) for prompt in half}
    assert prompts["arith-05+07"] == Prompt(prompt_id="arith-05+07", text="05+07=", answer="12", source="arithmetic")
    assert prompts["arith-00+03"].answer == "03"


# With 511, the mirror of a held-out sum is neither held out nor trained on.
@pytest.mark.parametrize("num_eval", [512, 511])
def test_arithmetic_holds_out_as_many_prompts_as_asked(num_eval: int) -> None:
    prompts = load(num_eval=num_eval)
    assert (len(prompts.eval), len(prompts.train)) == (num_eval, 5050 - 512)


@given(digits=st.integers(1, 2), num_eval=st.integers(1, 15))
def test_no_sum_is_trained_on_whose_mirror_is_held_out(digits: int, num_eval: int) -> None:
    prompts = load(digits=digits, num_eval=num_eval)
    held_out = {prompt.prompt_id.removeprefix("arith-") for prompt in prompts.eval}
    mirrored = {"+".join(reversed(pair.split("+"))) for pair in held_out}
    trained = {prompt.prompt_id.removeprefix("arith-") for prompt in prompts.train}
    assert len(held_out) == num_eval
    assert trained
    assert not trained & (held_out | mirrored)


@given(num_eval=st.integers(1, 15))
def test_holding_out_more_prompts_keeps_the_ones_held_out_before(num_eval: int) -> None:
    smaller, larger = load(digits=1, num_eval=num_eval), load(digits=1, num_eval=num_eval + 5)
    assert larger.eval[:num_eval] == smaller.eval


def test_the_split_is_the_one_that_stored_runs_were_made_with() -> None:
    assert [prompt.prompt_id for prompt in load().eval[:4]] == [
        "arith-32+58",
        "arith-58+32",
        "arith-16+26",
        "arith-26+16",
    ]


def test_a_question_that_stands_there_twice_is_held_out_once(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "prompts.jsonl", [*questions(10)] * 4)
    prompts = load(source=source, num_eval=4)
    assert len({prompt.text for prompt in prompts.eval}) == 4
    assert len(prompts.train) == 4 * 6
    assert not {prompt.text for prompt in prompts.eval} & {prompt.text for prompt in prompts.train}


# --- order


@given(num_prompts=st.integers(1, 20), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 50), shuffle=st.booleans())
def test_every_epoch_asks_every_prompt_once(num_prompts: int, seed: int, epoch: int, shuffle: bool) -> None:
    prompts = numbered_prompts(num_prompts)
    order = PromptOrder(prompts, seed=seed, shuffle=shuffle)
    visited = [order.prompt_at(n) for n in range(epoch * num_prompts, (epoch + 1) * num_prompts)]
    assert sorted(visited, key=lambda prompt: int(prompt.prompt_id)) == prompts


@given(
    num_prompts=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    visits=st.lists(st.integers(0, 100), min_size=1, max_size=30),
)
def test_a_group_has_the_same_prompt_whatever_was_asked_before(num_prompts: int, seed: int, visits: list[int]) -> None:
    prompts = numbered_prompts(num_prompts)
    ascending = PromptOrder(prompts, seed=seed, shuffle=True)
    expected = [ascending.prompt_at(n) for n in range(101)]
    jumping = PromptOrder(prompts, seed=seed, shuffle=True)
    assert [jumping.prompt_at(n) for n in visits] == [expected[n] for n in visits]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    prompts = numbered_prompts(50)

    def prompts_of(seed: int, epoch: int) -> list[Prompt]:
        order = PromptOrder(prompts, seed=seed, shuffle=True)
        return [order.prompt_at(epoch * 50 + n) for n in range(50)]

    orders = [prompts_of(0, 0), prompts_of(0, 1), prompts_of(1, 0), prompts_of(1, 1), prompts]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_without_shuffling_prompts_keep_their_order() -> None:
    prompts = numbered_prompts(3)
    order = PromptOrder(prompts, seed=0, shuffle=False)
    assert [order.prompt_at(n).prompt_id for n in range(7)] == ["0", "1", "2", "0", "1", "2", "0"]
    with pytest.raises(ValueError):
        order.prompt_at(-1)


# --- halves


@given(texts=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30), num_eval=st.integers(1, 4))
def test_no_text_of_a_file_is_both_trained_on_and_held_out(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], num_eval: int
) -> None:
    # Eight texts that no draw leaves out, so that holding out four prompts always leaves some to train on.
    records = [{"prompt": text, "answer": "x"} for text in [*"abcdefgh", *texts]]
    source = write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)
    prompts = load(source=source, num_eval=num_eval)
    trained = {prompt.text for prompt in prompts.train}
    assert len(prompts.eval) == num_eval
    assert trained
    assert not trained & {prompt.text for prompt in prompts.eval}


def test_a_prompt_of_the_evaluation_file_is_left_out_of_training(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "train.jsonl", questions(5))
    eval_source = write_jsonl(tmp_path / "eval.jsonl", questions(5, start=3))
    prompts = load(source=source, eval_source=eval_source)
    assert [prompt.text for prompt in prompts.train] == ["question 0", "question 1", "question 2"]
    assert len(prompts.eval) == 5
    fewer = load(source=source, eval_source=eval_source, num_eval=2)
    assert [prompt.text for prompt in fewer.eval] == ["question 3", "question 4"]
    assert fewer.train == prompts.train


def test_too_few_prompts_to_train_on_are_refused(tmp_path: Path) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", questions(3))
    for options in ({"source": few, "num_eval": 3}, {"source": few, "eval_source": few}):
        with pytest.raises(PromptsError) as caught:
            load(**options)
        assert caught.value.file == few
    with pytest.raises(PromptsError):
        load(digits=1, num_eval=55)


def sources(tmp_path: Path, numbers: dict[str, range], **sections: Any) -> dict[str, RunConfig]:
    """A mixture whose sources ask for `n + 1` of their numbers; `b` as messages."""
    for name, wanted in numbers.items():
        texts = [f"{n}+1?" for n in wanted]
        asked = [[{"role": "user", "content": text}] if name == "b" else text for text in texts]
        lines = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in asked]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    mixed = {name: {"prompts": {"source": str(tmp_path / f"{name}.jsonl"), "num_eval": 4}} for name in "ab"}
    values = {"training": {"max_steps": 1}, "sources": mixed, "model": {"path": "m"}, **sections}
    return RunConfig.model_validate(values).by_source()


def test_no_source_trains_on_what_another_holds_out_or_a_set_measures(tmp_path: Path) -> None:
    sets = {"sets": {"hard": {"source": str(tmp_path / "c.jsonl"), "num_prompts": 3}}}
    numbers = {"a": range(30), "b": range(20, 50), "c": range(10, 50)}
    prompts = load_all_prompts(sources(tmp_path, numbers, evaluation=sets))
    assert [prompt.text for prompt in prompts["a"].sets["hard"]] == ["10+1?", "11+1?", "12+1?"]
    assert prompts["a"].asked.eval == (*prompts["a"].eval, *prompts["a"].sets["hard"])
    trained = {name: {prompt.text for prompt in each.train} for name, each in prompts.items()}
    held_out = {name: {prompt.text for prompt in each.asked.eval} for name, each in prompts.items()}
    shared = {f"{n}+1?" for n in range(20, 30)}
    assert shared & (held_out["a"] | held_out["b"])
    assert not (trained["a"] | trained["b"]) & (held_out["a"] | held_out["b"])
    assert shared & trained["a"] & trained["b"]


def test_a_source_of_which_nothing_is_left_is_named(tmp_path: Path) -> None:
    sets = {"sets": {"all": {"source": str(tmp_path / "c.jsonl")}}}
    numbers = {"a": range(10), "b": range(20, 40), "c": range(10)}
    with pytest.raises(PromptsError) as caught:
        load_all_prompts(sources(tmp_path, numbers, evaluation=sets))
    assert (caught.value.file, caught.value.read[:5]) == ("source a", "all 6")


def test_an_unknown_source_is_named_with_its_set(tmp_path: Path) -> None:
    sets = {"sets": {"hard": {"source": "nobody/nothing-of-this-name"}}}
    numbers = {"a": range(10), "b": range(20, 40)}
    with pytest.raises(PromptsError) as caught:
        load_all_prompts(sources(tmp_path, numbers, evaluation=sets))
    assert caught.value.key == "sources.a.evaluation.sets.hard.source"
