"""The name and the message of a campaign's flow run."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelling, Completed, Running, Suspended
from support.campaigns.status import status_with

from flows.display.key_figures import progress_line
from flows.display.ui_reporter import FlowRunHeader

FLOW_RUN = UUID(int=7)


class FakeServer:
    """Keeps the states of one flow run. `meanwhile`: what a person makes of it just before the next change."""

    def __init__(self) -> None:
        self.name = ""
        self.states: list[State] = [Running()]
        self.meanwhile: list[State] = []

    @property
    def messages(self) -> list[str | None]:
        return [state.message for state in self.states[1:]]

    def set_flow_run_name(self, flow_run_id: UUID, name: str) -> None:
        self.name = name

    def read_flow_run_states(self, flow_run_id: UUID) -> list[State]:
        return self.states[::-1]

    def set_flow_run_state(self, flow_run_id: UUID, state: State, force: bool = False) -> None:
        self.states += self.meanwhile
        self.meanwhile = []
        assert force or state.is_running()
        # The server gives each state its time.
        self.states.append(type(state)(type=state.type, name=state.name, message=state.message))


class Page:
    """A header at a clock."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.now = 100.0
        self._header = FlowRunHeader(self.server, FLOW_RUN, clock=lambda: self.now)

    def update(self, *, after: float = 0.0, **changes: Any) -> None:
        self.now += after
        self._header.update(status_with(**{**training(7), **changes}))


def training(step: int) -> dict[str, Any]:
    return {
        "run_id": "nightly",
        "attempt": 3,
        "state": "running",
        "steps": step,
        "doing": {"train-0": "train"},
        "ready": {"train-0": True},
        "wall_seconds": 60.0,
    }


@pytest.fixture
def page() -> Page:
    return Page()


def test_the_name_has_the_number_of_the_attempt(page: Page) -> None:
    page.update()
    assert page.server.name == "nightly, attempt 3"


def test_the_message_follows_the_run_every_fifteen_seconds(page: Page) -> None:
    for step in range(31):
        page.update(after=1.0, steps=step)
    assert [str(message).partition(",")[0] for message in page.server.messages] == ["v0/4000", "v15/4000", "v30/4000"]
    page.update(after=100.0, steps=30)
    assert len(page.server.messages) == 3, "nothing has changed"


def test_a_long_attempt_writes_fewer_messages(page: Page) -> None:
    for step in range(3600):
        page.update(after=2.0, steps=step, wall_seconds=86_400.0)
    assert len(page.server.messages) == 9


@pytest.mark.parametrize("change", [Suspended, Cancelling, Completed])
def test_a_change_by_a_person_or_the_end_is_not_overwritten(page: Page, change: Callable[[], State]) -> None:
    page.server.meanwhile = [change()]
    page.update()
    assert page.server.states[-1].type == change().type
    page.update(after=60.0, steps=9)
    assert len(page.server.states) == 4, "only a running flow run gets a message"


def test_an_attempt_that_has_ended_gets_no_message(page: Page) -> None:
    page.update(state="finished")
    assert page.server.messages == []


def test_the_line_has_version_reward_and_accuracy_and_the_phase_outside_training() -> None:
    evaluation = {"policy_version": 5, "accuracy": {"held_out": 0.57}, "interval": None, "prompts": 64}
    status = status_with(**{**training(142), "max_steps": 150, "reward_mean": 0.634, "evaluations": [evaluation]})
    assert progress_line(status) == "v142/150, reward 0.63, accuracy 0.570"
    assert progress_line({**status, "reward_mean": None, "evaluations": []}) == "v142/150"
    assert progress_line({**status, "doing": {}, "ready": {}}) == "preparing the run"
