"""The `transformers` engine batches continuously: requests come, end, and get new weights between any two tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engines.policies import Offer, all_of, largest_mismatch, spans
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from millrace.generation.engines.transformers import TransformersEngine
from millrace.types import NO_RESPONSE, Request, Sampling, Trajectory

MakeModel = Callable[[int], LlamaForCausalLM]
MakeEngine = Callable[..., TransformersEngine]

PROMPTS = [(1, 3), (1, 4, 5, 6, 7, 8), (1, 9, 10), (1, 11, 12, 13, 14)]
LIMIT = 24
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=LIMIT)
# Of log-probabilities in float32, from logits in float64.
TOLERANCE = 5e-6


@pytest.fixture(scope="session")
def make_policy(make_model: Callable[..., LlamaForCausalLM]) -> MakeModel:
    """`make(seed)`: a policy in float64."""
    return lambda seed: make_model(seed).double().eval()


@pytest.fixture
def make_engine(make_policy: MakeModel, tokenizer: PreTrainedTokenizerFast) -> MakeEngine:
    """`make(endless=False)`: an engine at version 0. An endless one never samples an end token."""

    def make(endless: bool = False) -> TransformersEngine:
        model = make_policy(0)
        if endless:
            forbid(model, tokenizer.eos_token_id)
        return TransformersEngine(model, tokenizer)

    return make


def forbid(model: PreTrainedModel, token: int) -> None:
    def without(module: object, inputs: object, logits_BSV: torch.Tensor) -> torch.Tensor:
        logits_BSV[..., token] = -torch.inf
        return logits_BSV

    model.lm_head.register_forward_hook(without)


def requests(number: int, first: int = 0, num_given: int = 0) -> list[Request]:
    """Requests of several prompts, with `num_given` tokens of the response already there."""
    return [
        Request(
            group_id=i,
            sample_index=0,
            prompt_tokens=PROMPTS[i % len(PROMPTS)],
            seed=i,
            response_tokens=(5,) * num_given,
        )
        for i in range(first, first + number)
    ]


def short(number: int, first: int = 0, length: int = 1) -> list[Request]:
    """Requests that end after `length` tokens at the latest."""
    return requests(number, first, num_given=LIMIT - length)


def one_token(engine: TransformersEngine) -> list[Trajectory]:
    return engine.collect(0.0)


def text(request: Request) -> tuple[int, ...]:
    return (*request.prompt_tokens, *request.response_tokens)


def mismatch(models: dict[int, PreTrainedModel], done: Sequence[Trajectory], *, kept: bool = False) -> float:
    """Largest |log μ − log π| of a token, each under the model of its version, nats."""
    sampled = [trajectory for trajectory in done if trajectory.response.tokens]
    return max((largest_mismatch(models, text(t.request), t.response, kept=kept) for t in sampled), default=0.0)


def tokens_of(done: Sequence[Trajectory]) -> dict[int, tuple[int, ...]]:
    return {trajectory.request.group_id: trajectory.response.tokens for trajectory in done}


def test_a_straggler_holds_up_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine(endless=True)
    (straggler,) = requests(1)
    engine.submit([straggler, *short(3, first=1, length=2)], SAMPLING)
    assert one_token(engine) == []
    assert sorted(tokens_of(one_token(engine))) == [1, 2, 3]
    # What comes later also ends before it.
    for step in range(10):
        engine.submit(short(2, first=10 + 2 * step), SAMPLING)
        assert sorted(tokens_of(one_token(engine))) == [10 + 2 * step, 11 + 2 * step]
    assert engine.in_flight == 1
    (last,) = all_of(engine)
    assert last.request == straggler
    assert len(last.response.tokens) == LIMIT


def test_collecting_returns_in_time_although_nothing_has_finished(make_engine: MakeEngine) -> None:
    engine = make_engine(endless=True)
    engine.submit(requests(2), SAMPLING)
    assert engine.collect(0.0) == []
    assert engine.tokens_in_flight == 2
    assert engine.collect(0.0) == []
    assert engine.tokens_in_flight == 4
    assert len(engine.collect(3600.0)) == 2
    assert engine.tokens_in_flight == 0


def test_tokens_after_an_update_in_mid_response_are_the_new_weights_own(
    make_engine: MakeEngine, make_policy: MakeModel, offer: Offer
) -> None:
    engine = make_engine()
    engine.keep_cache = False
    models: dict[int, PreTrainedModel] = {0: make_policy(0)}
    done: list[Trajectory] = []
    for version in range(1, 12):
        engine.submit(requests(4, first=4 * version), SAMPLING)
        for _ in range(version % 4):
            done += one_token(engine)
        models[version] = make_policy(version)
        engine.update_weights(offer(models[version], version))
    done += all_of(engine)
    assert len(done) == 44
    # Where no token was sampled between two updates, the first one drew nothing and is in no span.
    assert {version for t in done for version, _, _ in spans(t.response)} == set(models) - {3, 7}
    for trajectory in done:
        versions, starts = zip(*trajectory.response.version_spans, strict=True)
        assert starts[0] == 0
        assert list(versions) == sorted(set(versions))
        assert all(start < end for _, start, end in spans(trajectory.response))
    assert max(len(trajectory.response.version_spans) for trajectory in done) > 3
    assert mismatch(models, done) < TOLERANCE
    # The counter-proof: under the version before, none of it would fit.
    shifted = {version + 1: model for version, model in models.items()} | {0: models[1]}
    assert mismatch(shifted, done) > 0.1


def test_an_interrupted_response_continues_without_a_token_lost_or_twice(
    make_engine: MakeEngine, make_policy: MakeModel
) -> None:
    whole = make_engine(endless=True)
    whole.submit(requests(6), SAMPLING)
    expected = tokens_of(all_of(whole))

    engine = make_engine(endless=True)
    engine.submit(requests(6), SAMPLING)
    for _ in range(7):
        assert one_token(engine) == []
    assert engine.tokens_in_flight == 42
    engine.submit([request := replace(requests(1)[0], group_id=6)], SAMPLING)
    *parts, waiting = engine.interrupt()
    assert (waiting.request, waiting.response) == (request, NO_RESPONSE)
    assert (engine.in_flight, engine.tokens_in_flight) == (0, 0)
    assert engine.collect(0.0) == []
    assert {part.response.finish_reason for part in parts} == {"unfinished"}
    assert {part.response.version_spans for part in parts} == {((0, 0),)}
    again = [replace(part.request, response_tokens=part.response.tokens) for part in parts]
    successor = make_engine(endless=True)
    successor.submit(again, SAMPLING)
    rest = tokens_of(all_of(successor))
    # With the same seed, the same tokens.
    assert {part.request.group_id: part.response.tokens + rest[part.request.group_id] for part in parts} == expected

    model = make_policy(0)
    forbid(model, 2)
    assert mismatch({0: model}, parts) < TOLERANCE


def test_a_response_does_not_depend_on_its_neighbours(make_engine: MakeEngine) -> None:
    together, alone = make_engine(), make_engine()
    together.submit(requests(8), SAMPLING)
    expected: dict[int, tuple[int, ...]] = {}
    for request in requests(8):
        alone.submit([request], SAMPLING)
        expected |= tokens_of(all_of(alone))
    assert tokens_of(all_of(together)) == expected
    late, done = make_engine(), []
    for request in reversed(requests(8)):
        late.submit([request], SAMPLING)
        done += one_token(late)
    assert tokens_of(done + all_of(late)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": 3},
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"top_k": 2},
        {"stop": ("1", "2", "3")},
        {"stop_token_ids": (5, 6, 7)},
    ],
)
def test_requests_in_flight_may_differ_in_their_sampling(make_engine: MakeEngine, changes: dict[str, Any]) -> None:
    together, alone = make_engine(), make_engine()
    expected = {}
    for i in range(8):
        sampling = replace(SAMPLING, **changes) if i % 2 else SAMPLING
        together.submit(requests(1, first=i), sampling)
        alone.submit(requests(1, first=i), sampling)
        expected[i] = all_of(alone)[0].response
    plain = make_engine()
    plain.submit(requests(8), SAMPLING)
    without = {done.request.group_id: done.response.tokens for done in all_of(plain)}
    responses = {done.request.group_id: done.response for done in all_of(together)}
    for i, response in responses.items():
        assert (response.tokens, response.kept_tokens) == (expected[i].tokens, expected[i].kept_tokens)
    assert {i % 2 for i, response in responses.items() if response.tokens != without[i]} == {1}


def until(stop: str, tokens: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The tokens up to the one that completes the stop text."""
    for n in range(1, len(tokens) + 1):
        if stop in tokenizer.decode(list(tokens[:n]), clean_up_tokenization_spaces=False):
            return tuple(tokens[:n])
    return tuple(tokens)


def test_a_stop_text_ends_its_own_row_only_and_must_be_in_the_new_tokens(
    make_engine: MakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    plain = make_engine(endless=True)
    plain.submit(requests(12), SAMPLING)
    longer = tokens_of(all_of(plain))
    # Two digits that follow each other in the middle of the first response.
    at = next(r for r in range(5, LIMIT - 2) if min(longer[0][r : r + 2]) > tokenizer.eos_token_id)
    stop = tokenizer.decode(list(longer[0][at : at + 2]), clean_up_tokenization_spaces=False)
    engine = make_engine(endless=True)
    stopping = replace(SAMPLING, stop=(stop,))
    engine.submit(requests(12), stopping)
    done = all_of(engine)
    expected = {group: until(stop, tokens, tokenizer) for group, tokens in longer.items()}
    assert tokens_of(done) == expected
    assert {LIMIT} < {len(tokens) for tokens in expected.values()}
    for trajectory in done:
        said = tokenizer.decode(list(trajectory.response.tokens), clean_up_tokenization_spaces=False)
        assert trajectory.response.finish_reason == ("stop" if stop in said else "length")

    # Its first half was given. The second half alone is no stop text.
    (request,) = requests(1)
    engine.submit([replace(request, response_tokens=longer[0][: at + 1])], stopping)
    (continued,) = all_of(engine)
    assert continued.response.tokens == until(stop, longer[0][at + 1 :], tokenizer)
    assert len(continued.response.tokens) > 1


@pytest.mark.parametrize("tokens", [[4], [1, 4, 5], [1, *range(3, 12)] * 3])
def test_next_logprobs_come_through_the_caches_while_others_are_in_flight(
    make_engine: MakeEngine, make_policy: MakeModel, tokens: list[int]
) -> None:
    engine, model = make_engine(endless=True), make_policy(0)
    forbid(model, 2)
    engine.submit(requests(3), SAMPLING)
    one_token(engine)
    expected_V = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0, -1], dim=-1)
    for token, logprob in engine.next_logprobs(tokens, most=4).items():
        assert logprob == pytest.approx(expected_V[token].item(), abs=TOLERANCE)
    assert mismatch({0: model}, all_of(engine)) < TOLERANCE


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4), st.integers(1, LIMIT)),
        st.tuples(st.just("collect"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("update"), st.just(0), st.just(0)),
        st.tuples(st.just("interrupt"), st.just(0), st.just(0)),
        st.tuples(st.just("abort"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


# `offer` writes each version over the last one, which the engine has copied.
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS, keep_cache=st.booleans())
def test_in_a_storm_each_request_comes_back_once_with_its_versions_tokens(
    make_policy: MakeModel,
    tokenizer: PreTrainedTokenizerFast,
    offer: Offer,
    events: list[tuple[str, int, int]],
    keep_cache: bool,
) -> None:
    engine = TransformersEngine(make_policy(0), tokenizer, keep_cache=keep_cache)
    models: dict[int, PreTrainedModel] = {0: make_policy(0)}
    waiting: dict[int, Request] = {}
    done: list[Trajectory] = []
    submitted = 0

    def come_back(trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            assert waiting.pop(trajectory.request.group_id) == trajectory.request
            assert len(trajectory.response.tokens) <= LIMIT - len(trajectory.request.response_tokens)
        done.extend(trajectories)

    for event, number, length in [*events, ("collect", 10 * LIMIT, 0)]:
        if event == "submit":
            new = short(number, first=submitted, length=length)
            waiting |= {request.group_id: request for request in new}
            submitted += number
            engine.submit(new, SAMPLING)
        elif event == "collect":
            for _ in range(number):
                come_back(one_token(engine))
        elif event == "update":
            version = len(models)
            models[version] = make_policy(version)
            engine.update_weights(offer(models[version], version))
        elif event == "interrupt":
            reported = engine.tokens_in_flight
            parts = engine.interrupt()
            assert reported == sum(len(part.response.tokens) for part in parts)
            come_back(parts)
        else:
            engine.abort()
            waiting.clear()
        assert engine.in_flight == len(waiting)
    assert not waiting
    assert mismatch(models, done, kept=keep_cache) < TOLERANCE
