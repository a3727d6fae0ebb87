"""Conversations of several turns in the templates of nine families: what was sampled stays, and the rest fits."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat.tokenizers import FAMILIES, Family, chat_tokenizer
from transformers import PreTrainedTokenizerFast

from millrace.chat.base import ChatRenderer
from millrace.chat.family import FamilyRenderer
from millrace.chat.template import TemplateRenderer
from millrace.errors import ChatError
from millrace.generation.environments.calculator import CalculatorTool
from millrace.types import Message

BYTES = 256
CALL = {
    "chatml": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>',
    "qwen3": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>',
    "llama-3": '{"name": "calculator", "parameters": {"expression": "2+3"}}',
    "glm-4.5": "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>2+3</arg_value>\n</tool_call>",
}
TOKENIZERS = {name: chat_tokenizer(family) for name, family in FAMILIES.items()}


def renderer_of(name: str) -> ChatRenderer:
    family, tokenizer = FAMILIES[name], TOKENIZERS[name]
    return TemplateRenderer(tokenizer) if family.template else FamilyRenderer(family.renderer, tokenizer)


RENDERERS = {name: renderer_of(name) for name in FAMILIES}


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    result: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return result


def end_of(name: str, answer: Message) -> int:
    """The token with which the policy ends a turn that `answer` follows."""
    ends = {"glm-4.5": "<|observation|>" if answer["role"] == "tool" else "<|user|>"}
    tokenizer = TOKENIZERS[name]
    return int(tokenizer.convert_tokens_to_ids(ends[name])) if name in ends else RENDERERS[name].stop_token_ids[0]


def tools_of(family: Family) -> Sequence[Message]:
    return CalculatorTool.tools if family.tools else ()


texts = st.text(st.characters(categories=("Ll", "Lu", "Nd")), min_size=1, max_size=12)
# Any bytes: to write such a turn again would change its tokens.
turns = st.lists(st.integers(0, BYTES - 1), min_size=1, max_size=12)
answers = st.fixed_dictionaries({"role": st.sampled_from(("user", "tool")), "content": texts})


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(first=texts, rounds=st.lists(st.tuples(turns, answers), min_size=1, max_size=4))
def test_sampled_tokens_are_kept_however_many_turns_follow(
    name: str, first: str, rounds: list[tuple[list[int], dict[str, str]]]
) -> None:
    family, tokenizer, renderer = FAMILIES[name], TOKENIZERS[name], RENDERERS[name]
    tools = tools_of(family)
    tokens, starts = renderer.render([{"role": "user", "content": first}], tools)
    sampled: list[tuple[int, list[int]]] = []
    roles = ["user", "assistant"]
    for said, result in rounds:
        answer: dict[str, Any] = result if family.tools else {**result, "role": "user"}
        if answer["role"] == "tool":
            answer = {**answer, "name": "calculator"}
        turn = [*ids(tokenizer, family.thought), *said, end_of(name, answer)]
        added, at = renderer.next_turn(tokens, turn, [answer], tools)
        sampled.append((len(tokens), turn))
        starts = (*starts, *((role, len(tokens) + len(turn) + start) for role, start in at))
        tokens = (*tokens, *turn, *added)
        roles += [answer["role"], "assistant"]
        assert answer["content"].strip() in tokenizer.decode(added)
    for place, turn in sampled:
        assert list(tokens[place : place + len(turn)]) == turn
    assert [role for role, _ in starts] == roles
    assert [start for _, start in starts] == sorted(start for _, start in starts)
    assert starts[0][1] == 0
    assert starts[-1][1] <= len(tokens)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.template])
@settings(max_examples=25, deadline=None)
@given(contents=st.lists(texts.map(str.strip), min_size=3, max_size=7).filter(lambda result: len(result) % 2 == 1))
def test_appended_turns_are_what_the_template_writes_of_all_messages(name: str, contents: list[str]) -> None:
    tokenizer, renderer = TOKENIZERS[name], RENDERERS[name]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    tokens = renderer.render(messages[:1]).tokens
    for said, answer in zip(messages[1::2], messages[2::2], strict=True):
        turn = [*ids(tokenizer, said["content"]), end_of(name, answer)]
        tokens = (*tokens, *turn, *renderer.next_turn(tokens, turn, [answer]).tokens)
    assert tokens == renderer.render(messages).tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_each_message_begins_where_its_text_does(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    messages = [
        {"role": "user", "content": "ping"},
        {"role": "assistant", "content": "pong"},
        {"role": "user", "content": "again"},
    ]
    tokens, starts = RENDERERS[name].render(messages)
    pieces = [
        tokenizer.decode(tokens[start:end])
        for (_, start), end in zip(starts, [*(start for _, start in starts[1:]), len(tokens)], strict=True)
    ]
    assert "".join(pieces) == tokenizer.decode(tokens)
    for message, piece, rest in zip(messages, pieces, ("pong", "again", "pong"), strict=False):
        assert message["content"] in piece
        assert rest not in piece


@pytest.mark.parametrize("name", CALL)
def test_a_tool_call_is_read_and_a_broken_one_says_what_is_wrong(name: str) -> None:
    tokenizer, renderer, tools = TOKENIZERS[name], RENDERERS[name], CalculatorTool.tools
    previous = renderer.render([{"role": "user", "content": "2+3?"}], tools).tokens
    tool: Message = {"role": "tool", "content": "5", "name": "calculator"}
    thought = FAMILIES[name].thought
    for text, readable in ((CALL[name], True), (CALL[name].replace('"calculator"', '"calc'), name == "glm-4.5")):
        turn = renderer.parse([*ids(tokenizer, thought + text), end_of(name, tool)], previous, tools)
        if readable:
            (call,) = turn.tool_calls
            assert (call.name, call.arguments, call.problem) == ("calculator", {"expression": "2+3"}, None)
        else:
            assert all(call.problem for call in turn.tool_calls)
    assert (
        renderer.parse([*ids(tokenizer, thought + "It is 5."), end_of(name, tool)], previous, tools).content
        == "It is 5."
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_turn_s_end_is_a_token_that_the_engine_stops_at(name: str) -> None:
    for role in ("user", "tool"):
        assert end_of(name, {"role": role, "content": ""}) in RENDERERS[name].stop_token_ids
    RENDERERS[name].check_several_turns(tools_of(FAMILIES[name]))


def test_a_turn_that_ended_otherwise_gets_the_template_s_end_before_the_answer() -> None:
    tokenizer, renderer = TOKENIZERS["chatml"], RENDERERS["chatml"]
    previous = renderer.render([{"role": "user", "content": "ping"}]).tokens
    added = renderer.next_turn(previous, ids(tokenizer, "pong"), [{"role": "user", "content": "again"}]).tokens
    assert tokenizer.decode(added).startswith("<|im_end|>\n<|im_start|>user\nagain<|im_end|>")


def with_template(file: str, marks: str = "<s> <|im_end|> <|im_start|>") -> PreTrainedTokenizerFast:
    return chat_tokenizer(Family(marks=marks, template=file))


def test_a_template_that_rewrites_turns_is_refused_for_several_turns_only() -> None:
    renderer = TemplateRenderer(with_template("thoughts_forgotten.jinja"))
    assert renderer.render([{"role": "user", "content": "ping"}]).tokens
    with pytest.raises(ChatError):
        renderer.check_several_turns(())


def without_template() -> PreTrainedTokenizerFast:
    tokenizer = with_template("no_end.jinja")
    tokenizer.chat_template = None
    return tokenizer


def with_calls_alone() -> PreTrainedTokenizerFast:
    """ChatML with tool calls, and without their results."""
    tokenizer = with_template("chatml_tools.jinja")
    tokenizer.chat_template = str(tokenizer.chat_template).replace("message.role == 'tool'", "false")
    tokenizer.chat_template = tokenizer.chat_template.replace("!= 'system'", "not in ('system', 'tool')")
    return tokenizer


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: TemplateRenderer(with_template("no_end.jinja")), "without a special token"),
        (lambda: TemplateRenderer(without_template()), "model.chat_template"),
        # Tools need a template whose calls can be read.
        (lambda: RENDERERS["granite"].check_several_turns(CalculatorTool.tools), "model.renderer"),
        (lambda: TemplateRenderer(with_calls_alone()).check_several_turns(CalculatorTool.tools), "the tool answers"),
        # A template's own words.
        (lambda: RENDERERS["gemma"].render([{"role": "system", "content": "a"}]), "System role not supported"),
        (lambda: FamilyRenderer("qwen33", TOKENIZERS["qwen3"]), "expected auto, template, "),
        (lambda: FamilyRenderer("qwen3", TOKENIZERS["gemma"]), "does not fit the tokenizer"),
    ],
)
def test_what_can_not_be_written_is_refused_with_the_reason(refused: Callable[[], object], said: str) -> None:
    with pytest.raises(ChatError) as caught:
        refused()
    assert said in str(caught.value)
