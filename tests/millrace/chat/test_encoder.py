"""Plain prompts as tokens: the tokenizer's beginning stands there once, and nothing ends the prompt."""

import pytest
from support.chat.tokenizers import byte_tokenizer
from tokenizers.processors import TemplateProcessing

from configs.task import PromptsConfig
from millrace.chat.encoder import PromptEncoder
from millrace.types import Prompt


@pytest.mark.parametrize("added", ["<s> $A </s>", "<s> $A", "$A </s>", "$A"])
@pytest.mark.parametrize("template", [None, "<s>{prompt}", "<s>{prompt}</s><mark>"])
def test_what_the_tokenizer_appends_is_left_out_and_a_beginning_is_not_doubled(
    added: str, template: str | None
) -> None:
    tokenizer = byte_tokenizer(["<s>", "</s>", "<mark>"])
    ids = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=added, special_tokens=ids)
    encoder = PromptEncoder(tokenizer, PromptsConfig(template=template))
    tokens = encoder.encode(Prompt(prompt_id="p", text="2+3=", answer="5", source="test")).tokens
    text = "2+3=" if template is None else template.replace("{prompt}", "2+3=")
    begins = "<s>" if added.startswith("<s>") and template is None else ""
    assert tokenizer.decode(tokens) == f"{begins}{text}"
