"""A start for a campaign where no model can be downloaded: a tiny Llama-architecture model, warm-started on answers.

     training prompts ──► demonstrations ──► supervised steps on ──► does it answer as a ──► Hugging Face folder
                          (some slip)        "prompt answer <eos>"   demonstrator would?
                                                     ▲                      │ no
                                                     └──────────────────────┘

The demonstrations of arithmetic are like those people find: a good part of them gets the carry wrong. A policy that
has learnt to answer like its demonstrators is sure of itself and often wrong; what the right answers have in common it
then learns from rewards alone. It never sees a held-out prompt. In an environment, demonstrators who are right have
used it, and those who slip have not.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from millrace.demonstrations import carry_slip, talk
from millrace.engines.base import Engine
from millrace.engines.transformers import TransformersEngine
from millrace.environments.base import Environment
from millrace.environments.episodes import in_environment
from millrace.types import Prompt, Sampling

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHECK_EVERY = 10
"""Supervised steps between two looks at the accuracy."""
CHECK_PROMPTS = 512
"""Training prompts decoded at each look."""


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """Shape of the model that a bootstrap makes, and how long it is warmed up."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    slip_rate: float
    """Share of the demonstrations that get the carry wrong, in [0, 1]."""
    target_fluency: float
    """The warm start stops once this share of greedy answers is what a demonstrator could have said."""
    max_accuracy: float
    """It goes on while more than this share of them is right."""
    max_steps: int
    """Supervised steps after which the warm start gives up."""
    batch_size: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class Bootstrapped:
    """What a bootstrap did."""

    parameters: int
    steps: int
    fluency: float
    """Share of greedy answers that a demonstrator could have given, right or slipped, when it stopped."""
    accuracy: float
    """Share of greedy answers that are right, on training prompts, when it stopped."""
    seconds: float


def character_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a character over the characters of `texts`, in sorted order."""
    alphabet = sorted(set("".join(texts)))
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    # Ends of lines too: a dot would leave several of them together, as a token that is in no vocabulary.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def tiny_llama(shape: TinyModel, tokenizer: PreTrainedTokenizerFast, context: int) -> LlamaForCausalLM:
    """A randomly initialised float32 Llama whose vocabulary is the tokenizer's."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_heads,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def bootstrap(
    prompts: Sequence[Prompt],
    shape: TinyModel,
    folder: Path,
    *,
    seed: int,
    sampling: Sampling,
    report: Callable[[str], None],
    environment: type[Environment] | None = None,
    max_turns: int = 1,
) -> Bootstrapped:
    """Makes a tiny model and its tokenizer from `prompts`, and saves both to `folder` as an ordinary Hugging Face one.

    `report` receives a line at each look at the accuracy; `environment` is what the policy may use in at most
    `max_turns` turns. Deterministic in `seed` on one machine and thread count.
    """
    started = time.monotonic()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer, model = _fresh(prompts, shape, environment, sampling.max_new_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.learning_rate, weight_decay=0.0)
    engine = in_environment(
        lambda stop: TransformersEngine(model, tokenizer, stop=stop), environment, tokenizer, max_turns=max_turns
    )
    shown = None if environment is None else environment()
    looked_at = rng.sample(list(prompts), min(CHECK_PROMPTS, len(prompts)))
    fluency = accuracy = 0.0
    step = 0
    while step < shape.max_steps and not (fluency >= shape.target_fluency and accuracy <= shape.max_accuracy):
        step += 1
        batch = [(p, talk(p, rng, shape.slip_rate, shown)) for p in rng.choices(prompts, k=shape.batch_size)]
        loss = _supervised_loss(model.train(), tokenizer, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % CHECK_EVERY == 0:
            fluency, accuracy = _look(engine, tokenizer, looked_at, sampling.max_new_tokens)
            report(
                f"warm start step {step}: loss {loss.item():.3f}, answers like a demonstrator {fluency:.2f}, "
                f"right {accuracy:.2f}"
            )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Bootstrapped(
        parameters=sum(p.numel() for p in model.parameters()),
        steps=step,
        fluency=fluency,
        accuracy=accuracy,
        seconds=time.monotonic() - started,
    )


def _fresh(
    prompts: Sequence[Prompt], shape: TinyModel, environment: type[Environment] | None, max_new_tokens: int
) -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
    """A tokenizer of all that is asked and said, and a model that has learnt nothing yet."""
    texts = [text for prompt in prompts for text in (prompt.text, prompt.answer)]
    tokenizer = character_tokenizer(texts if environment is None else [*texts, environment.alphabet])
    longest = max(len(prompt.text) + len(prompt.answer) for prompt in prompts) + 2
    # All of a response of several turns has to fit behind its prompt.
    room = longest if environment is None else max_new_tokens
    return tokenizer, tiny_llama(shape, tokenizer, context=max(64, longest + room))


def _supervised_loss(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batch: Sequence[tuple[Prompt, Sequence[tuple[str, bool]]]],
) -> torch.Tensor:
    """Mean cross-entropy of what a policy wrote and the end token; prompt and environment carry no loss."""
    rows = []
    for prompt, pieces in batch:
        row = [(token, False) for token in tokenizer(prompt.text)["input_ids"]]
        for text, learnt in pieces:
            row += [(token, learnt) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        rows.append([*row, (tokenizer.eos_token_id, True)])
    length = max(len(row) for row in rows)
    input_ids_BT = torch.full((len(batch), length), tokenizer.pad_token_id)
    labels_BT = torch.full((len(batch), length), -100)
    for i, row in enumerate(rows):
        input_ids_BT[i, : len(row)] = torch.tensor([token for token, _ in row])
        labels_BT[i, : len(row)] = torch.tensor([token if learnt else -100 for token, learnt in row])
    logits_BTV = model(input_ids=input_ids_BT, attention_mask=input_ids_BT != tokenizer.pad_token_id).logits
    loss: torch.Tensor = torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100
    )
    return loss


def _look(
    engine: Engine, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Prompt], max_new_tokens: int
) -> tuple[float, float]:
    """(fluency, accuracy) of greedy answers."""
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=max_new_tokens)
    responses = engine.generate([tokenizer(p.text)["input_ids"] for p in prompts], greedy, seed=0, asked=prompts)
    texts = [tokenizer.decode(list(response.answer_tokens), skip_special_tokens=True) for response in responses]
    right = sum(text == prompt.answer for text, prompt in zip(texts, prompts, strict=True))
    slipped = sum(text == carry_slip(prompt) for text, prompt in zip(texts, prompts, strict=True))
    return (right + slipped) / len(prompts), right / len(prompts)
