"""Small tokenizers of chat models: every byte is a token, and so is each mark of the family's template."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family of models marks its conversations."""

    marks: str
    """Special tokens, separated by spaces; the first begins a text, the second ends one."""
    template: str | None = None
    """File of its chat template; None for a family that the library `renderers` writes."""
    renderer: str = "template"
    """`model.renderer` of a config."""
    thought: str = ""
    """The finished thought that begins a turn, in families whose turns begin with one."""
    tools: bool = False
    """Whether conversations may have tools."""


FAMILIES = {
    "chatml": Family(
        marks="<|im_start|> <|im_end|> <tool_call> </tool_call>", template="chatml_tools.jinja", tools=True
    ),
    "gemma": Family(marks="<bos> <eos> <start_of_turn> <end_of_turn>", template="turns_of_model.jinja"),
    "mistral": Family(marks="<s> </s> [INST] [/INST]", template="inst.jinja"),
    "phi": Family(
        marks="<s> <|endoftext|> <|system|> <|user|> <|assistant|> <|end|>",
        template="role_marks.jinja",
    ),
    "granite": Family(
        marks="<|bos|> <|end_of_text|> <|start_of_role|> <|end_of_role|>", template="roles_in_marks.jinja"
    ),
    "olmo": Family(marks="<|endoftext|> <|end_of_turn|>", template="eos_ends_turns.jinja"),
    "qwen3": Family(
        marks="<|endoftext|> <|im_end|> <|im_start|> <think> </think> <tool_call> </tool_call> "
        "<tool_response> </tool_response>",
        renderer="qwen3",
        tools=True,
    ),
    "llama-3": Family(
        marks="<|begin_of_text|> <|eot_id|> <|end_of_text|> <|eom_id|> <|python_tag|> "
        "<|start_header_id|> <|end_header_id|>",
        renderer="llama-3",
        tools=True,
    ),
    "glm-4.5": Family(
        marks="[gMASK] <|endoftext|> <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> "
        "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <tool_response> </tool_response> "
        "/nothink",
        renderer="glm-4.5",
        thought="<think></think>",
        tools=True,
    ),
}


def chat_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A tokenizer with the marks of `family` and its template."""
    tokenizer = byte_tokenizer(family.marks.split())
    if family.template is not None:
        tokenizer.chat_template = (TEMPLATES / family.template).read_text(encoding="utf-8")
    return tokenizer


def byte_tokenizer(marks: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and `marks`; the first mark begins a text, the second ends one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=marks[0], eos_token=marks[1])
