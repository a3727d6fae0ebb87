"""A step on demonstrated chats, packed, against transformers' own cross-entropy on padded rows.

conversations ─┬─► encoder: the assistant's tokens alone ─► Trainer.step: packed           ─► loss, gradient
               └─► the template's tokens, label −100 outside of the assistant's turns, padded ─► model(labels=…).loss

The latter is the loss of TRL's SFTTrainer with `assistant_only_loss`, which passes these labels to transformers.
"""

from typing import Any

import numpy as np
import pytest
import torch
from support.chat.tokenizers import FAMILIES, chat_tokenizer
from support.training.samples import make_sample
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from configs.task import PromptsConfig
from configs.training import TrainingConfig
from millrace.chat.encoder import PromptEncoder
from millrace.chat.template import TemplateRenderer
from millrace.training.batch import Sample
from millrace.training.trainer import Trainer
from millrace.types import Demonstration, Prompt

ENDS = "<|im_end|>"
BEGINS = "<|im_start|>assistant\n"
CHATS = [
    [("user", "ping"), ("assistant", "pong")],
    [("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4"), ("user", "twice?"), ("assistant", "8, I think")],
    [("user", "say nothing at all, please"), ("assistant", "."), ("user", "?"), ("assistant", "!")],
]


@pytest.fixture(scope="module")
def chat() -> PreTrainedTokenizerFast:
    return chat_tokenizer(FAMILIES["chatml"])


def model(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(shape)  # type: ignore[no-untyped-call, no-any-return]


def messages(chat: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in chat]


def samples(tokenizer: PreTrainedTokenizerFast) -> list[Sample]:
    encoder = PromptEncoder(tokenizer, PromptsConfig(chat=True), renderer=TemplateRenderer(tokenizer))
    made = []
    for number, chat in enumerate(CHATS):
        first = [role for role, _ in chat].index("assistant")
        prompt = Prompt(
            prompt_id=str(number),
            text="",
            answer="",
            source="test",
            messages=tuple(messages(chat[:first])),
            demonstration=Demonstration(messages=tuple(messages(chat[first:]))),
        )
        response = encoder.demonstrate(prompt)
        made.append(
            make_sample(
                np.array(encoder.encode(prompt).tokens),
                np.array(response.tokens),
                rollout_logprobs=np.array(response.rollout_logprobs),
                loss_mask=np.array(response.loss_mask),
                advantage=0.0,
            )
        )
    return made


def labelled(tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """The chats as text, cut into turns by their marks: independent of the encoder."""
    rows = []
    for chat in CHATS:
        ids: list[int] = []
        labels: list[int] = []
        text = tokenizer.apply_chat_template(messages(chat), tokenize=False)
        for piece in str(text).split(BEGINS):
            learned, end, rest = piece.partition(ENDS) if ids else ("", "", piece)
            for part, is_learned in ((learned + end, True), (rest, False)):
                tokens = tokenizer(part, add_special_tokens=False)["input_ids"]
                ids += tokens
                labels += tokens if is_learned else [-100] * len(tokens)
            marks = tokenizer(BEGINS, add_special_tokens=False)["input_ids"]
            ids += marks
            labels += [-100] * len(marks)
        # The marks behind the last turn are of no other.
        rows.append((ids[: -len(marks)], labels[: -len(marks)]))
    longest = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
    }


@pytest.mark.parametrize("max_tokens", [1000, 60])
def test_loss_and_gradient_are_those_of_transformers(chat: PreTrainedTokenizerFast, max_tokens: int) -> None:
    reference = model(len(chat))
    expected = reference(**labelled(chat)).loss
    expected.backward()
    values = {"max_steps": 1, "loss": "cross_entropy", "max_grad_norm": 1e9, "max_tokens_per_microbatch": max_tokens}
    trainer = Trainer(model(len(chat)), TrainingConfig.model_validate(values))
    report = trainer.step(samples(chat))
    assert report.tokens == int((labelled(chat)["labels"] != -100).sum())
    assert report.loss == pytest.approx(expected.item(), rel=1e-5)
    # That of a policy that samples nothing but the demonstration.
    assert report.mismatch_kl == pytest.approx(expected.item(), rel=1e-5)
    gradients = dict(trainer.model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        gradient = gradients[name].grad
        assert gradient is not None
        assert (gradient - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
