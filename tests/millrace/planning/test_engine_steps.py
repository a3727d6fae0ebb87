"""Steps of an engine, recovered from its responses."""

import numpy as np
import pytest

from millrace.planning.fit.engine_steps import Stretches, find_stretches
from millrace.planning.fit.measured import Rollouts

_STEP, _TOKEN, _PREFILL = 0.01, 0.0001, 0.005


def _served(lengths: list[int], places: int, prompt: int = 7, commit: float = 0.0) -> tuple[Rollouts, int]:
    """Rollouts of an engine of so many places, each a group of its own, and how many steps it made.

    After a step in which some end, nothing happens for `commit` seconds.
    """
    waiting = list(enumerate(lengths))
    running: dict[int, int] = {}
    started, finished = np.zeros(len(lengths)), np.zeros(len(lengths))
    now, steps = 1000.0, 0
    while waiting or running:
        entering = waiting[: places - len(running)]
        waiting = waiting[len(entering) :]
        for number, length in entering:
            running[number], started[number] = length, now
        now += _STEP + _TOKEN * len(running) + (_PREFILL if entering else 0.0)
        steps += 1
        ended = [number for number, left in running.items() if left == 1]
        running = {number: left - 1 for number, left in running.items() if left > 1}
        finished[ended] = now
        now += commit if ended else 0.0
    rollouts = Rollouts(
        group=np.arange(len(lengths)),
        prompt_tokens=np.full(len(lengths), prompt),
        response_tokens=np.array(lengths),
        started=started,
        finished=finished,
    )
    return rollouts, steps


def _lengths(num: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(1).integers(1, 60, num)]


def _predicted(found: Stretches) -> np.ndarray:
    return _STEP * found.steps + _TOKEN * found.tokens + _PREFILL * found.passes


@pytest.mark.parametrize("commit", [0.0, 0.9 * _STEP])
def test_steps_are_recovered_one_by_one(commit: float) -> None:
    rollouts, steps = _served(_lengths(300), places=16, commit=commit)
    found = find_stretches(rollouts)
    assert found.steps.sum() == steps - min(_lengths(300)[:16])
    assert found.seconds == pytest.approx(_predicted(found) + commit)


def test_tokens_and_contexts_are_counted_by_step() -> None:
    rollouts, _ = _served([1, 3], places=2, prompt=10)
    found = find_stretches(rollouts)
    assert found.steps.tolist() == [2]
    assert found.tokens.tolist() == [2]
    # The second and the third token see 12 and 13 tokens, themselves included.
    assert found.context.tolist() == [25]


def test_prompts_count_once_per_group_when_they_come_in() -> None:
    rollouts, _ = _served([2, 4, 4, 4], places=2, prompt=10)
    rollouts.group[:] = [0, 0, 1, 1]
    found = find_stretches(rollouts)
    assert found.passes.sum() == 2
    assert found.prefilled.sum() == 10


def test_a_time_in_which_the_engine_was_empty_is_left_out() -> None:
    rollouts, _ = _served(_lengths(40), places=8)
    later, _ = _served(_lengths(40), places=8)
    both = Rollouts(
        **{
            name: np.concatenate([getattr(rollouts, name), getattr(later, name) + shift])
            for name, shift in {
                "group": 40, "prompt_tokens": 0, "response_tokens": 0, "started": 500.0, "finished": 500.0
            }.items()
        }
    )  # fmt: skip
    found = find_stretches(both)
    assert found.seconds == pytest.approx(_predicted(found))
