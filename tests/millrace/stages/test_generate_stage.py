"""The generator's loop, with a scripted engine and transport."""

from collections.abc import Callable

import pyarrow as pa
import pytest
from support.stages.workshop import CONFIG, TENSORS, Workshop, answer, weights
from transformers import PreTrainedTokenizerFast

from configs.operation import StalenessConfig, StorageConfig
from configs.schema import PipelineConfig
from millrace.errors import WeightsCorrupt
from millrace.rollouts.arrow import environment_error_of
from millrace.runtime.messages import Heartbeat, read_line
from millrace.weights.base import Probe
from millrace.weights.fingerprint import fingerprint
from storage import layout
from storage.progress import read_status, write_progress
from storage.schema import TRAJECTORY
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamReader

NOTHING_FINISHES: list[int] = []
STORES_AT_EACH_TURN = CONFIG.storage.model_copy(update={"commit_unfinished_seconds": 1e-9})

MakeWorkshop = Callable[..., Workshop]


def rows(workshop: Workshop) -> list[pa.Table]:
    """The parts that the generator committed."""
    reader = StreamReader(workshop.store, layout.trajectories(0), TRAJECTORY)
    return [part.table for part in iter(reader.next, None)]


@pytest.fixture
def make_workshop(memory_store: MemoryStore, tokenizer: PreTrainedTokenizerFast) -> MakeWorkshop:
    """`make(**changes)`: a generator of the run, whose config has these changes."""
    return lambda **changes: Workshop(memory_store, tokenizer, CONFIG.model_copy(update=changes))


@pytest.fixture
def workshop(make_workshop: MakeWorkshop) -> Workshop:
    return make_workshop()


def test_nothing_is_generated_before_the_first_weights(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES)
    assert workshop.in_flight == set()


def test_a_batch_of_groups_is_in_flight_and_whole_ones_are_replaced(workshop: Workshop) -> None:
    workshop.turn([0], new=weights(0))
    assert (workshop.in_flight, workshop.committed()) == ({1, 2}, [([0], 0)])
    workshop.turn(NOTHING_FINISHES)
    assert workshop.in_flight == {1, 2, 3}


def test_a_whole_group_is_committed_at_once_with_the_missing_ones_named(workshop: Workshop) -> None:
    workshop.turn([1, 2], new=weights(0))
    assert (workshop.in_flight, workshop.committed()) == ({0}, [([1, 2], 0)])
    record = StreamReader(workshop.store, layout.trajectories(0), TRAJECTORY).next_record()
    assert record is not None
    assert (record.group_ids, record.last_group_id, record.missing_groups) == ([1, 2], 2, [0])
    workshop.turn([0])
    assert workshop.committed()[1:] == [([0], 0)]


def test_requests_of_other_groups_fill_the_slots_beside_stragglers(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    stragglers = [workshop.engine.requests[0], workshop.engine.requests[2]]
    for request, versions in workshop.engine.requests:
        if request.sample_index == 1:
            workshop.generator.admission.groups.add(answer(request, versions))
    workshop.engine.requests = [entry for entry in workshop.engine.requests if entry[0].sample_index == 0]
    workshop.turn(NOTHING_FINISHES)
    # Six places: three stragglers, a whole group more, and the first of the next.
    assert [(r.group_id, r.sample_index) for r, _ in workshop.engine.requests[3:]] == [(3, 0), (3, 1), (4, 0)]
    assert stragglers[0] in workshop.engine.requests
    workshop.turn([0])
    assert workshop.committed() == [([0], 0)]
    workshop.turn(NOTHING_FINISHES)
    assert [(r.group_id, r.sample_index) for r, _ in workshop.engine.requests[5:]] == [(4, 1)]


def test_responses_in_flight_continue_under_new_weights(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.turn([0, 1], new=weights(1))
    part = StreamReader(workshop.store, layout.trajectories(0), TRAJECTORY).next()
    assert part is not None
    assert part.table["span_versions"].to_pylist() == [[0, 1]] * 4
    assert part.table["span_starts"].to_pylist() == [[0, 1]] * 4


def test_the_newest_version_of_records_never_decreases(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.turn([0], new=weights(5))
    # Group 1 was whole before the update, as far as the engine knows.
    workshop.engine.requests = [(request, [0]) for request, _ in workshop.engine.requests]
    workshop.turn([1])
    assert workshop.committed() == [([0], 5), ([1], 5)]


def test_responses_of_surviving_versions_continue_after_a_rollback(workshop: Workshop) -> None:
    workshop.turn([0, 2], new=weights(0))
    workshop.turn(NOTHING_FINISHES, new=weights(0, incarnation=1))
    assert len(workshop.heard) == 1
    workshop.turn([1, 3])
    assert workshop.committed() == [([0, 2], 0), ([1, 3], 0)]
    part = rows(workshop)[1]
    assert part["incarnation"].to_pylist() == [1] * 4
    # One token before, one after; group 3 was admitted later.
    assert [len(tokens) for tokens in part["response_tokens"].to_pylist()] == [2, 2, 1, 1]
    assert part["span_versions"].to_pylist() == [[0]] * 4


def test_responses_of_lost_versions_are_discarded_and_requested_again(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(4))
    workshop.turn(NOTHING_FINISHES, new=weights(0, incarnation=1))
    assert all(request.response_tokens == () for request, _ in workshop.engine.requests)
    workshop.turn([1])
    assert workshop.committed() == [([1], 0)]
    workshop.stage.update_status(now=True)
    assert read_status(workshop.store, "generate", 0)["tokens_discarded"] == 6


def test_if_the_trainer_waits_for_old_groups_whole_ones_are_committed_at_once(make_workshop: MakeWorkshop) -> None:
    workshop = make_workshop(storage=StorageConfig(commit_max_ms=1e9), staleness=StalenessConfig(too_old="wait"))
    workshop.turn([0, 1], new=weights(0))
    assert (workshop.in_flight, workshop.committed()) == ({2}, [([0, 1], 0)])


def test_in_sync_mode_groups_in_flight_are_restarted_and_committed_together(make_workshop: MakeWorkshop) -> None:
    workshop = make_workshop(pipeline=PipelineConfig(mode="sync"), storage=STORES_AT_EACH_TURN)
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.turn(NOTHING_FINISHES, new=weights(0, incarnation=1))
    assert all(request.response_tokens == () for request, _ in workshop.engine.requests)
    assert workshop.carry_over.store(1) == []
    workshop.turn([0, 2])
    assert workshop.committed() == [], "the step's share is not whole"
    workshop.turn(NOTHING_FINISHES)
    assert workshop.in_flight == {1, 3}, "no group is interrupted or requested twice"
    workshop.turn([1, 3])
    assert workshop.committed() == [([0, 1, 2, 3], 0)], "in the order of admission"


def test_the_successor_of_a_drained_generator_continues_its_responses(make_workshop: MakeWorkshop) -> None:
    first = make_workshop()
    first.turn([1], new=weights(0))
    first.turn(NOTHING_FINISHES, new=weights(1))
    first.carry_over.store(0)
    assert first.in_flight == set()
    second = make_workshop()
    second.turn(NOTHING_FINISHES, new=weights(1, incarnation=0))
    assert [(r.group_id, r.response_tokens) for r, _ in second.engine.requests] == [
        (0, (3, 3)), (0, (3, 3)), (2, (3, 3)), (2, (3, 3)), (3, (3,)), (3, (3,)),
    ]  # fmt: skip
    second.turn([0, 2, 3])
    part = rows(second)[1]
    assert part["span_versions"].to_pylist() == [[0, 1]] * 4 + [[1]] * 2
    assert part["span_starts"].to_pylist() == [[0, 1]] * 4 + [[0]] * 2
    second.stage.update_status(now=True)
    status = read_status(second.store, "generate", 0)
    assert (status["tokens_continued"], status["tokens_discarded"]) == (10, 0)


def test_the_successor_of_a_killed_generator_continues_stored_responses(make_workshop: MakeWorkshop) -> None:
    first = make_workshop(storage=STORES_AT_EACH_TURN)
    first.turn(NOTHING_FINISHES, new=weights(0))
    assert first.in_flight == set()
    first.turn([0])
    assert first.committed() == [([0], 0)]
    # Four responses with two tokens each were stored, and then the engine sampled nine more.
    first.stage.update_status(now=True, tokens_in_flight=17)
    second = make_workshop()
    second.turn(NOTHING_FINISHES, new=weights(0))
    assert [len(request.response_tokens) for request, _ in second.engine.requests[:4]] == [2] * 4
    second.stage.update_status(now=True)
    status = read_status(second.store, "generate", 0)
    assert (status["tokens_continued"], status["tokens_discarded"]) == (8, 9)


def test_a_draining_stage_does_not_wait_for_responses_in_flight(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.stage.draining = True
    workshop.mailbox.looks = 0
    workshop.generator.run()
    assert workshop.mailbox.looks == 0
    assert workshop.in_flight == {0, 1, 2}


def test_damaged_weights_are_reported_and_the_last_good_version_is_kept(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(3))
    workshop.turn([0], new=WeightsCorrupt("version 4 is damaged: w"))
    assert len(workshop.heard) == 1
    assert workshop.heard[0].endswith("version 4 is damaged: w")
    assert workshop.committed() == [([0], 3)]


def test_an_update_is_acknowledged_with_version_digest_route_and_pause(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(3, incarnation=2))
    status = read_status(workshop.store, "generate", 0)
    assert (status["incarnation"], status["policy_version"]) == (2, 3)
    assert status["weights_digest"] == fingerprint(TENSORS).digest
    assert (status["weights_route"], status["pause_seconds"]) == ("shm", 0.25)
    assert status["acknowledged_by"] == status["process"]


@pytest.mark.parametrize(("trainer", "alarms"), [(-0.5005, 0), (-0.502, 1)])
def test_the_probe_raises_an_alarm_if_trainer_and_engine_disagree(
    workshop: Workshop, trainer: float, alarms: int
) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(7, probe=Probe(tokens=(1, 5), logprobs={3: trainer, 9: -4.0})))
    workshop.stage.update_status(now=True)
    status = read_status(workshop.store, "generate", 0)
    assert status["probe_alarms"] == len(workshop.heard) == alarms
    assert status["probe_difference"] == pytest.approx(abs(trainer + 0.5))
    assert all("version 7" in line and "token 3: -0.50000" in line for line in workshop.heard)


def test_an_environments_error_is_reported_once_and_stored_with_each_trajectory(workshop: Workshop) -> None:
    workshop.turn([0], new=weights(0))
    workshop.engine.environment_error = "OSError: no tool"
    workshop.turn([1, 2])
    (line,) = workshop.heard
    assert "calculator raised OSError: no tool" in line
    workshop.stage.update_status(now=True)
    assert read_status(workshop.store, "generate", 0)["environment_errors"] == 4
    errors = [environment_error_of(meta) for part in rows(workshop) for meta in part["meta"].to_pylist()]
    assert errors == [None] * 2 + ["OSError: no tool"] * 4


def beats(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The activities in the generator's heartbeats since the last call."""
    lines = [read_line(line) for line in capsys.readouterr().out.splitlines()]
    return [line.doing for line in lines if isinstance(line, Heartbeat)]


def test_only_sampled_or_returned_tokens_are_progress(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    assert beats(capsys) != [], "it has received weights and begun to work"
    assert workshop.stage.value("advances") == 1, "and sampled the first tokens"
    workshop.engine.samples = False
    for version in range(1, 4):
        workshop.turn(NOTHING_FINISHES, new=weights(version))
    assert (workshop.engine.policy_version, beats(capsys)) == (3, [])
    assert workshop.generator.tokens_shown == workshop.engine.tokens_in_flight == 6
    # An earlier group is not whole yet: nothing can be committed, although the engine returned responses.
    workshop.turn([1])
    assert not workshop.stage.awaits_engine
    workshop.turn([0])
    assert "commit" in beats(capsys)


def test_the_status_record_shows_at_once_that_nothing_is_in_flight(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    shown = ("requests_in_flight", "groups_in_flight", "tokens_in_flight")
    assert workshop.stage.value("requests_in_flight") > 0
    while workshop.in_flight:
        workshop.turn(range(1000))
    assert [workshop.stage.value(name) for name in shown] == [0, 0, 0]


def test_slots_that_the_bound_leaves_free_count_as_waiting(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    assert workshop.generator.starved == 0
    for _ in range(100):
        workshop.turn(range(1, 1000))
    assert workshop.in_flight == {0}
    starved = workshop.generator.starved
    workshop.turn(NOTHING_FINISHES)
    assert workshop.generator.starved > starved
    assert workshop.generator.admission.starved_share(workshop.engine.in_flight) == pytest.approx(4 / 6)
    while workshop.in_flight:
        workshop.turn(range(1000))
    assert workshop.stage.value("starved_ms") == round(1000 * workshop.generator.starved)


def test_a_heartbeat_says_whether_the_generator_waits_for_weights_or_room(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.turn(NOTHING_FINISHES)
    assert beats(capsys)[-1] == "waiting for weights"
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.turn(NOTHING_FINISHES)
    assert beats(capsys)[-1] == "generate"
    for _ in range(100):
        workshop.turn(range(1000))
    assert workshop.in_flight == set()
    assert beats(capsys)[-1] == "waiting for room under max_staleness"
    write_progress(workshop.store, "train", 0, {"policy_version": 1})
    workshop.turn(NOTHING_FINISHES)
    assert beats(capsys)[-1] == "waiting for weights"
