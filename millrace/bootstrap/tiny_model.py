"""The start model of a campaign that can download none: a tiny Llama, warm-started on demonstrations.

     training prompts ──► demonstrations ──► supervised steps on ──► does it answer as a ──► Hugging Face folder
     of each source       (some wrong)       "prompt answer <eos>"   demonstrator would?
                                                     ▲                      │ no
                                                     └──────────────────────┘

The demonstrations of sums are like people's: many get the carry wrong. A policy that has learnt to imitate them
is confident and often wrong, and learns the right answers from rewards alone. It never sees a
held-out prompt. In an environment, demonstrators who are right have used it, and those who are wrong have not.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from configs.losses import PlainConfig
from configs.recipe import Recipe
from configs.sources import naming_source
from configs.stored import DEFAULT_SOURCE
from configs.task import EnvironmentConfig, PromptsConfig
from configs.training import TrainingConfig
from millrace.bootstrap.demonstrations import could_be_demonstrated, dialogue, is_right, right_response
from millrace.chat.encoder import PromptEncoder
from millrace.errors import InputError
from millrace.generation.engines.base import Engine
from millrace.generation.engines.transformers import TransformersEngine
from millrace.generation.environments.base import Environment, environment_class
from millrace.generation.environments.episodes import EpisodeRules, Episodes
from millrace.models.modules import call_at_each_layer
from millrace.training.batch import Sample
from millrace.training.trainer import Trainer
from millrace.types import Prompt, Sampling

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHECK_EVERY = 10
"""Least number of supervised steps between two measurements of the accuracy."""
_CHECK_PROMPTS = 512
"""Most training prompts decoded per measurement."""
_CHECK_TOKENS = 2**15
"""Most tokens decoded per measurement: of long responses, fewer are decoded."""
_NO_ENVIRONMENT = EnvironmentConfig()


def character_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character of `texts`, in sorted order."""
    alphabet = sorted(set("".join(texts)))
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    # `.` would not split at newlines, and several together are not in the vocabulary.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def tiny_llama(shape: Recipe, tokenizer: PreTrainedTokenizerFast, context: int) -> LlamaForCausalLM:
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
            # By the width: with the usual 0.02, for models ten times as wide, some seeds never learned the sums.
            initializer_range=0.64 / math.sqrt(shape.hidden_size),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """The demonstrations of one source."""

    prompts: Sequence[Prompt]
    recipe: Recipe
    """How often its demonstrators err, and when enough is learned."""
    max_new_tokens: int
    environment: EnvironmentConfig = _NO_ENVIRONMENT

    def played(self) -> type[Environment] | None:
        """The class of its environment. Raises InputError if it converses."""
        environment = environment_class(self.environment.name)
        if environment is None or issubclass(environment, Environment):
            return environment
        expected = "a model with a chat template in model.path"
        raise InputError(f"{self.environment.name}, which converses", key="environment.name", expected=expected)

    def is_learned(self, imitation_rate: float, accuracy: float) -> bool:
        """Whether these rates of greedy answers end the warm start."""
        return imitation_rate >= self.recipe.target_imitation_rate and accuracy <= self.recipe.max_accuracy


def bootstrap(
    lessons: Mapping[str, Lesson],
    shape: Recipe,
    folder: Path,
    *,
    seed: int,
    report: Callable[[int, str], None],
    on_progress: Callable[[], None] = lambda: None,
) -> str:
    """Makes a tiny model and its tokenizer from `lessons`, by source, saved to `folder` as a Hugging Face folder.

    Returns its size and accuracy, as text. `report` receives the step and a line at each measurement of the accuracy;
    `on_progress` is called at each layer. Deterministic in `seed`, on one machine with one thread count. Raises
    InputError, which names the source, for an environment that text can't play.
    """
    started = time.monotonic()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    played: dict[str, type[Environment] | None] = {}
    for name, lesson in lessons.items():
        with naming_source(name):
            played[name] = lesson.played()
    tokenizer, model = _fresh([(lesson, played[name]) for name, lesson in lessons.items()], shape)
    trainer = _trainer(model, shape)
    trainer.on_progress = on_progress
    call_at_each_layer(model, on_progress)
    encoder = PromptEncoder(tokenizer, PromptsConfig())
    rules = {
        name: EpisodeRules(encoder=encoder, environment=played[name], max_turns=lesson.environment.max_turns)
        for name, lesson in lessons.items()
    }
    engine = Episodes(TransformersEngine(model, tokenizer), rules)
    partners = {name: None if environment is None else environment() for name, environment in played.items()}
    checked = {name: _measured_by(lesson, rng) for name, lesson in lessons.items()}
    # A measurement samples token after token; the longer the responses, the more supervised steps it costs.
    check_every = max(CHECK_EVERY, *(lesson.max_new_tokens // 4 for lesson in lessons.values()))
    # Imitation rate and accuracy.
    rates = dict.fromkeys(lessons, (0.0, 0.0))
    step = 0
    while step < shape.max_steps and not all(lesson.is_learned(*rates[name]) for name, lesson in lessons.items()):
        step += 1
        batch = _demonstrated(lessons, rates, partners, rng)
        loss = trainer.step([_sample(tokenizer, *each, group) for group, each in enumerate(batch)]).loss
        if step % check_every == 0:
            model.load_state_dict(trainer.model.state_dict())
            for name, lesson in lessons.items():
                rates[name] = _measure(engine, tokenizer, name, checked[name], lesson.max_new_tokens)
            progress = f"loss {loss:.3f}, {_progress(lessons, rates)}"
            report(step, f"warm start step {step} of at most {shape.max_steps}: {progress}")
    model.load_state_dict(trainer.model.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size, seconds = sum(parameter.numel() for parameter in model.parameters()), time.monotonic() - started
    accuracies = ", ".join(f"{_of(name)}{accuracy:.0%}" for name, (_, accuracy) in rates.items())
    return (
        f"{size:,} parameters, made in {seconds:.0f} s and {step} supervised steps: greedy accuracy {accuracies} on "
        "training prompts"
    )


def _trainer(model: LlamaForCausalLM, shape: Recipe) -> Trainer:
    """A trainer of a copy of the model: it replaces the attention, and the engine needs the model's."""
    training = TrainingConfig(
        max_steps=max(1, shape.max_steps), loss=PlainConfig(name="cross_entropy"), learning_rate=shape.learning_rate
    )
    return Trainer(deepcopy(model), training)


def _demonstrated(
    lessons: Mapping[str, Lesson],
    rates: Mapping[str, tuple[float, float]],
    partners: Mapping[str, Environment | None],
    rng: random.Random,
) -> list[tuple[Prompt, list[tuple[str, bool]]]]:
    """The prompts of a step with their demonstrations. A lesson that is learned leaves most of them to the others."""
    shares = {name: 0.25 if lesson.is_learned(*rates[name]) else 1.0 for name, lesson in lessons.items()}
    total = sum(shares.values())
    return [
        (prompt, dialogue(prompt, rng, lesson.recipe.error_rate, partners[name]))
        for name, lesson in lessons.items()
        for prompt in rng.choices(lesson.prompts, k=math.ceil(lesson.recipe.batch_size * shares[name] / total))
    ]


def _progress(lessons: Mapping[str, Lesson], rates: Mapping[str, tuple[float, float]]) -> str:
    """The imitation rate and accuracy of each lesson, as text."""
    return "; ".join(
        f"{_of(name)}answers like a demonstrator {rates[name][0]:.2f} of "
        f"{lesson.recipe.target_imitation_rate:.2f}, right {rates[name][1]:.2f}"
        for name, lesson in lessons.items()
    )


def _of(source: str) -> str:
    return "" if source == DEFAULT_SOURCE else f"{source} "


def _measured_by(lesson: Lesson, rng: random.Random) -> list[Prompt]:
    """The prompts by which it is measured how much of a lesson is learned."""
    most = min(_CHECK_PROMPTS, max(1, _CHECK_TOKENS // lesson.max_new_tokens), len(lesson.prompts))
    return rng.sample(list(lesson.prompts), most)


def _fresh(
    lessons: Sequence[tuple[Lesson, type[Environment] | None]], shape: Recipe
) -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
    """A tokenizer with the characters of all prompts and answers, and an untrained model in float32."""
    texts, context = [], 64
    for lesson, environment in lessons:
        own = [(prompt.text, right_response(prompt)) for prompt in lesson.prompts]
        texts += [text for pair in own for text in pair] + ([] if environment is None else [environment.alphabet])
        longest = max(len(prompt) + len(response) for prompt, response in own) + 2
        # A whole response of several turns has to fit behind its prompt.
        context = max(context, longest + (longest if environment is None else lesson.max_new_tokens))
    tokenizer = character_tokenizer(texts)
    return tokenizer, tiny_llama(shape, tokenizer, context=context)


def _sample(
    tokenizer: PreTrainedTokenizerFast, prompt: Prompt, pieces: Sequence[tuple[str, bool]], group: int
) -> Sample:
    """A demonstration as the trainer takes it. Text of the environment has no loss."""
    tokens: list[int] = []
    loss_mask: list[int] = []
    for text, by_policy in pieces:
        added = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += added
        loss_mask += [int(by_policy)] * len(added)
    tokens.append(tokenizer.eos_token_id)
    loss_mask.append(1)
    return Sample(
        prompt_tokens=np.array(tokenizer(prompt.text)["input_ids"], dtype=np.int32),
        response_tokens=np.array(tokens, dtype=np.int32),
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        loss_mask=np.array(loss_mask, dtype=np.uint8),
        temperature=1.0,
        advantage=0.0,
        staleness=0,
        max_new_tokens=len(tokens),
        group=group,
        is_demonstration=True,
    )


def _measure(
    engine: Engine, tokenizer: PreTrainedTokenizerFast, source: str, prompts: Sequence[Prompt], max_new_tokens: int
) -> tuple[float, float]:
    """(imitation rate, accuracy) of greedy answers."""
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=max_new_tokens)
    texts = [tokenizer(prompt.text)["input_ids"] for prompt in prompts]
    responses = engine.generate(texts, greedy, seed=0, prompts=prompts, source=source)
    answers = [str(tokenizer.decode(list(response.answer_tokens), skip_special_tokens=True)) for response in responses]
    answered = list(zip(prompts, answers, strict=True))
    imitated = sum(could_be_demonstrated(prompt, text) for prompt, text in answered)
    return imitated / len(prompts), sum(is_right(prompt, text) for prompt, text in answered) / len(prompts)
