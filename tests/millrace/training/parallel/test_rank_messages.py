"""Samples travel from rank 0 to the others bit for bit."""

import math
from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from millrace.training.batch import Sample
from millrace.training.parallel.messages import pack, unpack

# Every bit pattern, infinities and NaNs included: a loss refuses them, messages keep them.
FLOATS = st.floats(width=64)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    prompt, response, top = draw(st.integers(1, 5)), draw(st.integers(0, 5)), draw(st.integers(0, 3))
    return Sample(
        prompt_tokens=draw(arrays(np.int32, prompt)),
        response_tokens=draw(arrays(np.int32, response)),
        rollout_logprobs=draw(arrays(np.float32, response)),
        loss_mask=draw(arrays(np.uint8, response)),
        temperature=draw(FLOATS),
        advantage=draw(FLOATS),
        staleness=draw(st.integers(0, 2**40)),
        max_new_tokens=draw(st.integers(1, 2**40)),
        source=draw(st.text()),
        is_demonstration=draw(st.booleans()),
        kept_tokens=draw(arrays(np.int32, st.integers(0, 5))),
        kept_counts=draw(arrays(np.int32, st.sampled_from([0, response]))),
        teacher_logprobs=draw(arrays(np.float32, st.sampled_from([0, response]))),
        teacher_top_tokens=draw(arrays(np.int32, response * top)),
        teacher_top_logprobs=draw(arrays(np.float32, response * top)),
    )


def same(first: object, second: object) -> bool:
    """Equal in type and to the last bit."""
    if isinstance(first, np.ndarray):
        assert isinstance(second, np.ndarray)
        return first.dtype == second.dtype and first.tobytes() == second.tobytes()
    both_nan = isinstance(first, float) and isinstance(second, float) and math.isnan(first) and math.isnan(second)
    return type(first) is type(second) and (first == second or both_nan)


@given(st.lists(samples(), min_size=1, max_size=6))
def test_samples_arrive_bit_for_bit_and_in_their_order(sent: list[Sample]) -> None:
    arrived = unpack(pack(sent))
    assert len(arrived) == len(sent)
    for sample, other in zip(sent, arrived, strict=True):
        for field in fields(Sample):
            assert same(getattr(sample, field.name), getattr(other, field.name)), field.name


def test_samples_that_arrived_are_writeable() -> None:
    sent = Sample(
        prompt_tokens=np.array([1], np.int32),
        response_tokens=np.array([2], np.int32),
        rollout_logprobs=np.array([-1.0], np.float32),
        loss_mask=np.array([1], np.uint8),
        temperature=1.0,
        advantage=0.5,
        staleness=0,
        max_new_tokens=1,
    )
    (arrived,) = unpack(pack([sent]))
    assert arrived.response_tokens.flags.writeable
