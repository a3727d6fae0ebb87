"""Real policies in an environment, by every engine: what they were told to have sampled is what a trainer finds."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines.policies import all_of, largest_mismatch, offering
from support.engines.scripted_engine import Counting
from support.engines.vllm_processes import HIDDEN_SIZE, running_vllm
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from configs.stored import DEFAULT_SOURCE
from configs.task import PromptsConfig
from millrace.chat.encoder import PromptEncoder
from millrace.generation.engines.base import Engine
from millrace.generation.engines.transformers import TransformersEngine
from millrace.generation.environments.episodes import EpisodeRules, Episodes
from millrace.types import Prompt, Request, Response, Sampling, Trajectory
from millrace.weights.base import Weights
from millrace.weights.probe import tolerance_between

TOLERANCE = tolerance_between("float32", "float32")
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=30)
MAX_TURNS = 6
# Some end with what could be the beginning of a stop text.
PROMPTS = [[1, 3 + i % 12, 3 + i * i % 11] for i in range(48)]

MakeModel = Callable[..., LlamaForCausalLM]
Offer = Callable[[int], Weights]


@pytest.fixture(scope="module")
def models(make_model: MakeModel) -> dict[int, PreTrainedModel]:
    """The policy of each version."""
    return {version: make_model(version, hidden_size=HIDDEN_SIZE) for version in range(4)}


@pytest.fixture
def offer(models: dict[int, PreTrainedModel]) -> Iterator[Offer]:
    """`offer(policy_version)`: its parameters in shared memory, until the next call."""
    with offering() as offer:
        yield lambda version: offer(models[version], version)


@pytest.fixture(
    scope="module", params=["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.extended])]
)
def started(
    request: pytest.FixtureRequest,
    make_model: MakeModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """One that recomputes caches after an update."""
    model = make_model(0, hidden_size=HIDDEN_SIZE)
    if request.param == "transformers":
        yield TransformersEngine(model, tokenizer, keep_cache=False)
        return
    folder: Path = tmp_path_factory.mktemp("policy")
    tokenizer.save_pretrained(folder)
    with running_vllm(model, folder, reads_text=True) as engine:
        engine.keep_cache = False
        yield engine


@pytest.fixture
def engine(started: Engine, offer: Offer) -> Engine:
    """At version 0, and nothing in flight."""
    started.abort()
    started.update_weights(offer(0))
    return started


@pytest.fixture
def episodes(engine: Engine, tokenizer: PreTrainedTokenizerFast) -> Episodes:
    encoder = PromptEncoder(tokenizer, PromptsConfig())
    rules = EpisodeRules(encoder=encoder, environment=Counting, max_turns=MAX_TURNS)
    return Episodes(engine, {DEFAULT_SOURCE: rules})


def prompts() -> list[Prompt]:
    return [Prompt(prompt_id=str(i), text="", answer="", source="test") for i in range(len(PROMPTS))]


def requests() -> list[Request]:
    return [
        Request(group_id=i, sample_index=0, prompt_tokens=tuple(tokens), seed=i, prompt=prompt)
        for i, (tokens, prompt) in enumerate(zip(PROMPTS, prompts(), strict=True))
    ]


def turns(tokenizer: PreTrainedTokenizerFast, response: Response) -> list[str]:
    """The text of each turn of the policy."""
    starts = [0, *(end for _, end in response.environment_spans)]
    ends = [*(start for start, _ in response.environment_spans), len(response.tokens)]
    return [tokenizer.decode(response.tokens[start:end]) for start, end in zip(starts, ends, strict=True)]


def ends_of_turns(text: str) -> list[int]:
    """Where in the text a turn could have ended, one character a token."""
    return sorted(i + len(stop) for stop in Counting.stop for i in range(len(text)) if text.startswith(stop, i))


def test_a_response_ends_behind_the_first_stop_text_that_it_writes_itself(
    engine: Engine, tokenizer: PreTrainedTokenizerFast
) -> None:
    responses = engine.generate(PROMPTS, replace(SAMPLING, stop=Counting.stop), seed=3)
    ended = set()
    for response in responses:
        text = tokenizer.decode([token for token in response.tokens if token > 2])
        plain = all(token > 2 for token in response.tokens)
        result = ends_of_turns(text) if plain else []
        if result:
            assert result[0] == len(text)
            assert response.finish_reason == "stop"
            ended.add(text[-1])
        elif response.tokens[-1] == tokenizer.eos_token_id:
            assert response.finish_reason == "stop"
    assert ended == {"=", "2"}, "both stop texts"


def test_log_probabilities_of_all_turns_are_the_policys_over_the_whole_text(
    episodes: Episodes, models: dict[int, PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    episodes.submit(requests(), SAMPLING)
    done = all_of(episodes)
    most = max(len(trajectory.response.environment_spans) for trajectory in done)
    assert most >= 3, "answers in a response"
    worst = max(largest_mismatch(models, trajectory.request.prompt_tokens, trajectory.response) for trajectory in done)
    print(f"{len(done)} responses with up to {most} answers: |Δ log π| ≤ {worst:.2g}")
    assert worst < TOLERANCE
    for trajectory in done:
        response = trajectory.response
        assert len(response.tokens) <= SAMPLING.max_new_tokens
        assert response.version_spans == ((0, 0),)
        for number, (start, end) in enumerate(response.environment_spans, start=1):
            assert tokenizer.decode(response.tokens[start:end]) == f"{number}+"
            assert set(response.rollout_logprobs[start:end]) == {0.0}
        for turn in turns(tokenizer, response)[:-1]:
            assert turn.endswith((*Counting.stop, "<eos>"))


@pytest.mark.slow
def test_new_weights_between_and_within_turns_give_each_token_its_version(
    episodes: Episodes, models: dict[int, PreTrainedModel], offer: Offer
) -> None:
    episodes.submit(requests(), SAMPLING)
    done: list[Trajectory] = []
    for version in (1, 2, 3):
        done += episodes.collect(1.0)
        episodes.update_weights(offer(version))
    done += all_of(episodes)
    assert len(done) == len(PROMPTS)
    several = [trajectory for trajectory in done if len(trajectory.response.version_spans) > 1]
    assert len(several) > 5
    assert max(len(trajectory.response.version_spans) for trajectory in done) >= 3
    for trajectory in done:
        versions, starts = zip(*trajectory.response.version_spans, strict=True)
        assert starts[0] == 0
        assert list(versions) == sorted(set(versions))
        assert list(starts) == sorted(set(starts))
    worst = max(largest_mismatch(models, trajectory.request.prompt_tokens, trajectory.response) for trajectory in done)
    assert worst < TOLERANCE
    # The counter-proof: under the first version alone, the rest would not fit.
    first = dict.fromkeys(models, models[0])
    assert max(largest_mismatch(first, s.request.prompt_tokens, s.response) for s in several) > 100 * TOLERANCE
