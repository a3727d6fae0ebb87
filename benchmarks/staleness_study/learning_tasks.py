"""What is learned in virtual time: tasks that two cores can compute, and how long their stages would take on GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.planning.simulation.costs import Costs

_CALM, _SLOW_GENERATORS, _SLOW_REWARD = "calm", "slow generators", "slow reward"
_SLOWER = 4.0
_SCORING = 24.0
"""Seconds that scoring takes where the reward is slow."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task, and how long its stages take."""

    preset: str
    settings: Mapping[str, object]
    token: float
    """Seconds per token of a response."""
    train: float
    """Seconds of an optimizer step."""
    steps_in_flight: int
    """Steps' groups that the generator has places for; less where the bound admits less."""
    target: float
    """Held-out accuracy to which adaptive control is compared with the best fixed bound."""
    phases: Sequence[str] = (_CALM,)
    """Of equally many steps."""


TASKS = {
    # Responses of three tokens. With half the preset's learning rate, at which AIPO overshoots (docs/decisions/0009).
    "tiny": Task(
        preset="configs/presets/tiny-cpu.yaml",
        settings={"training.learning_rate": 2e-4, "training.max_steps": 160, "evaluation.every": 4},
        token=8.0,
        train=6.0,
        steps_in_flight=10,
        target=0.65,
    ),
    # A long tail: 11 to 353 tokens.
    "chain": Task(
        preset="configs/presets/chain-cpu.yaml",
        settings={"training.max_steps": 60, "evaluation.every": 3},
        token=0.6,
        train=8.0,
        steps_in_flight=6,
        target=0.7,
    ),
    # `tiny` with smaller steps, and more of them. The target leaves the rule its choice: the ESS is a cost here.
    "disturbed": Task(
        preset="configs/presets/tiny-cpu.yaml",
        settings={
            "training.learning_rate": 2e-4,
            "training.groups_per_step": 16,
            "training.max_steps": 1200,
            "scoring.replicas": 16,
            "staleness.ess_target": 0.75,
            "evaluation.every": 120,
        },
        token=8.0,
        train=6.0,
        steps_in_flight=17,
        target=0.56,
        phases=(_CALM, _SLOW_GENERATORS, _CALM, _SLOW_REWARD, _CALM),
    ),
}


def costs_of(task: Task, phase: str = _CALM) -> Costs:
    """Of stages that have a GPU each."""
    token = task.token * (_SLOWER if phase == _SLOW_GENERATORS else 1.0)
    return Costs(
        decode=lambda requests, tokens: token,
        prefill=lambda tokens: 0.0,
        score=0.0,
        score_part=_SCORING if phase == _SLOW_REWARD else 0.0,
        train=lambda tokens, rollouts: task.train,
        handover=0.1,
        push=0.5,
        pause=0.2,
        checkpoint=0.0,
    )


def edges_of(task: Task, steps: int) -> list[int]:
    """The versions at which phases begin and end."""
    return [steps * k // len(task.phases) for k in range(len(task.phases) + 1)]
