"""The generator's loop, with an engine and a transport that do as they are told."""

import re

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


def rows(workshop: Workshop) -> list[pa.Table]:
    """The parts that its generator committed."""
    reader = StreamReader(workshop.store, layout.trajectories(0), TRAJECTORY)
    return [part.table for part in iter(reader.next, None)]


@pytest.fixture
def workshop(memory_store: MemoryStore, tokenizer: PreTrainedTokenizerFast) -> Workshop:
    return Workshop(memory_store, tokenizer)


def test_nothing_is_asked_of_the_engine_before_the_first_weights(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES)
    assert workshop.in_flight == set()


def test_as_many_groups_are_in_flight_as_a_batch_holds_and_whole_ones_make_room(workshop: Workshop) -> None:
    workshop.turn([0], new=weights(0))
    assert (workshop.in_flight, workshop.committed()) == ({1, 2}, [([0], 0)])
    workshop.turn(NOTHING_FINISHES)
    assert workshop.in_flight == {1, 2, 3}


def test_a_whole_group_is_committed_at_once_and_the_record_says_which_are_missing(workshop: Workshop) -> None:
    workshop.turn([1, 2], new=weights(0))
    assert (workshop.in_flight, workshop.committed()) == ({0}, [([1, 2], 0)])
    record = StreamReader(workshop.store, layout.trajectories(0), TRAJECTORY).next_record()
    assert record is not None
    assert (record.group_ids, record.last_group_id, record.missing_groups) == ([1, 2], 2, [0])
    workshop.turn([0])
    assert workshop.committed()[1:] == [([0], 0)]


def test_places_are_of_requests_so_that_stragglers_leave_room_for_others(workshop: Workshop) -> None:
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


def test_what_is_in_flight_goes_on_under_new_weights_and_its_spans_say_so(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.turn([0, 1], new=weights(1))
    part = StreamReader(workshop.store, layout.trajectories(0), TRAJECTORY).next()
    assert part is not None
    assert part.table["span_versions"].to_pylist() == [[0, 1]] * 4
    assert part.table["span_starts"].to_pylist() == [[0, 1]] * 4


def test_the_newest_version_that_records_name_never_falls(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.turn([0], new=weights(5))
    # Group 1 was whole before the update, as far as the engine knows.
    workshop.engine.requests = [(request, [0]) for request, _ in workshop.engine.requests]
    workshop.turn([1])
    assert workshop.committed() == [([0], 5), ([1], 5)]


def test_responses_in_flight_go_on_under_weights_of_another_incarnation_if_their_own_exist(
    workshop: Workshop,
) -> None:
    workshop.turn([0, 2], new=weights(0))
    workshop.turn(NOTHING_FINISHES, new=weights(0, incarnation=1))
    assert workshop.heard == ["generator 0 continues 2 unfinished responses (2 tokens)"]
    workshop.turn([1, 3])
    assert workshop.committed() == [([0, 2], 0), ([1, 3], 0)]
    part = rows(workshop)[1]
    assert part["incarnation"].to_pylist() == [1] * 4
    # One token before, one after; group 3 was admitted later.
    assert [len(tokens) for tokens in part["response_tokens"].to_pylist()] == [2, 2, 1, 1]
    assert part["span_versions"].to_pylist() == [[0]] * 4


def test_responses_of_lost_versions_are_thrown_away_and_asked_again(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(4))
    workshop.turn(NOTHING_FINISHES, new=weights(0, incarnation=1))
    assert workshop.heard == []
    assert all(request.response_tokens == () for request, _ in workshop.engine.requests)
    workshop.turn([1])
    assert workshop.committed() == [([1], 0)]
    workshop.stage.update_status(now=True)
    assert read_status(workshop.store, "generate", 0)["tokens_discarded"] == 6


def test_a_trainer_that_waits_for_the_oldest_groups_finds_each_of_them_in_flight_or_committed(
    memory_store: MemoryStore, tokenizer: PreTrainedTokenizerFast
) -> None:
    storage, staleness = StorageConfig(commit_max_ms=1e9), StalenessConfig(too_old="wait")
    config = CONFIG.model_copy(update={"storage": storage, "staleness": staleness})
    workshop = Workshop(memory_store, tokenizer, config)
    workshop.turn([0, 1], new=weights(0))
    assert (workshop.in_flight, workshop.committed()) == ({2}, [([0, 1], 0)])


def test_in_sync_mode_what_was_in_flight_begins_anew(
    memory_store: MemoryStore, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = CONFIG.model_copy(update={"pipeline": PipelineConfig(mode="sync")})
    workshop = Workshop(memory_store, tokenizer, config)
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.turn(NOTHING_FINISHES, new=weights(0, incarnation=1))
    assert all(request.response_tokens == () for request, _ in workshop.engine.requests)
    assert workshop.carry_over.store(1) == ""
    workshop.turn([0, 2])
    assert workshop.committed() == [], "the step's share is not whole"
    workshop.turn([1, 3])
    assert workshop.committed() == [([0, 1, 2, 3], 0)], "in the order of admission"


def test_in_sync_mode_nothing_is_interrupted_from_time_to_time(
    memory_store: MemoryStore, tokenizer: PreTrainedTokenizerFast
) -> None:
    storage = CONFIG.storage.model_copy(update={"commit_unfinished_seconds": 1e-9})
    config = CONFIG.model_copy(update={"pipeline": PipelineConfig(mode="sync"), "storage": storage})
    workshop = Workshop(memory_store, tokenizer, config)
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.turn([0])
    workshop.turn(NOTHING_FINISHES)
    assert workshop.in_flight == {1, 2, 3}, "no group is asked for twice"
    workshop.turn([1, 2, 3])
    assert workshop.committed() == [([0, 1, 2, 3], 0)]


def test_a_drained_generator_stores_what_is_in_flight_and_its_successor_continues_it(
    memory_store: MemoryStore, tokenizer: PreTrainedTokenizerFast
) -> None:
    first = Workshop(memory_store, tokenizer)
    first.turn([1], new=weights(0))
    first.turn(NOTHING_FINISHES, new=weights(1))
    assert first.carry_over.store(0) == "; stored 6 unfinished responses (10 tokens)"
    assert first.in_flight == set()
    second = Workshop(memory_store, tokenizer)
    second.turn(NOTHING_FINISHES, new=weights(1, incarnation=0))
    assert second.heard == ["generator 0 continues 6 unfinished responses (10 tokens)"]
    assert [(r.group_id, r.response_tokens) for r, _ in second.engine.requests] == [
        (0, (3, 3)), (0, (3, 3)), (2, (3, 3)), (2, (3, 3)), (3, (3,)), (3, (3,)),
    ]  # fmt: skip
    second.turn([0, 2, 3])
    part = rows(second)[1]
    assert part["span_versions"].to_pylist() == [[0, 1]] * 4 + [[1]] * 2
    assert part["span_starts"].to_pylist() == [[0, 1]] * 4 + [[0]] * 2
    second.stage.update_status(now=True)
    status = read_status(memory_store, "generate", 0)
    assert (status["tokens_continued"], status["tokens_discarded"]) == (10, 0)


def test_a_killed_generator_s_successor_continues_what_was_stored_last_and_counts_the_rest_as_lost(
    memory_store: MemoryStore, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = CONFIG.model_copy(
        update={"storage": CONFIG.storage.model_copy(update={"commit_unfinished_seconds": 1e-9})}
    )
    first = Workshop(memory_store, tokenizer, config)
    first.turn(NOTHING_FINISHES, new=weights(0))
    assert first.in_flight == set()
    first.turn([0])
    assert first.committed() == [([0], 0)]
    # Four responses with two tokens each were stored, and then the engine sampled nine more.
    first.stage.update_status(now=True, tokens_in_flight=17)
    second = Workshop(memory_store, tokenizer)
    second.turn(NOTHING_FINISHES, new=weights(0))
    assert second.heard == ["generator 0 continues 4 unfinished responses (8 tokens)"]
    second.stage.update_status(now=True)
    assert read_status(memory_store, "generate", 0)["tokens_discarded"] == 9


def test_a_stage_that_is_asked_to_drain_does_not_wait_for_what_is_in_flight(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.stage.draining = True
    workshop.mailbox.looks = 0
    workshop.generator.run()
    assert workshop.mailbox.looks == 0
    assert workshop.in_flight == {0, 1, 2}


def test_damaged_weights_are_reported_and_the_last_good_version_stays(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(3))
    workshop.turn([0], new=WeightsCorrupt("version 4 is damaged: w"))
    assert workshop.heard == ["generator 0 continues with version 3: version 4 is damaged: w"]
    assert workshop.committed() == [([0], 3)]


def test_an_update_is_acknowledged_with_version_digest_route_and_pause(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(3, incarnation=2))
    status = read_status(workshop.store, "generate", 0)
    assert (status["incarnation"], status["policy_version"]) == (2, 3)
    assert status["weights_digest"] == fingerprint(TENSORS).digest
    assert (status["weights_route"], status["pause_seconds"]) == ("shm", 0.25)
    assert status["acknowledged_by"] == status["process"]


@pytest.mark.parametrize(("trainer", "alarms"), [(-0.5005, 0), (-0.502, 1)])
def test_the_probe_raises_an_alarm_with_the_numbers_where_trainer_and_engine_disagree(
    workshop: Workshop, trainer: float, alarms: int
) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(7, probe=Probe(tokens=(1, 5), logprobs={3: trainer, 9: -4.0})))
    workshop.stage.update_status(now=True)
    status = read_status(workshop.store, "generate", 0)
    assert status["probe_alarms"] == alarms
    assert status["probe_difference"] == pytest.approx(abs(trainer + 0.5))
    expected = "disagree about version 7: .* 0.002 nats, more than 0.001 .token 3: -0.50000 .* -0.50200"
    assert len(workshop.heard) == alarms
    assert all(re.search(expected, line) for line in workshop.heard)


def test_an_environment_that_raises_is_reported_once_and_counted_and_its_trajectories_are_kept_with_the_reason(
    workshop: Workshop,
) -> None:
    workshop.turn([0], new=weights(0))
    assert workshop.heard == []
    workshop.engine.environment_error = "OSError: no tool"
    workshop.turn([1, 2])
    assert workshop.heard == [
        "generator 0: environment calculator raised OSError: no tool; "
        "that trajectory is an error, and later ones are counted without a message"
    ]
    workshop.stage.update_status(now=True)
    assert read_status(workshop.store, "generate", 0)["environment_errors"] == 4
    reader = StreamReader(workshop.store, layout.trajectories(0), TRAJECTORY)
    first, second = reader.next(), reader.next()
    assert first is not None
    assert second is not None
    errors = [environment_error_of(meta) for part in (first, second) for meta in part.table["meta"].to_pylist()]
    assert errors == [None] * 2 + ["OSError: no tool"] * 4


def beats(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the generator's heartbeats since the last call say it is doing."""
    said = [read_line(line) for line in capsys.readouterr().out.splitlines()]
    return [beat.doing for beat in said if isinstance(beat, Heartbeat)]


def test_while_something_is_in_flight_only_what_the_engine_samples_or_returns_is_progress(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    assert beats(capsys) != [], "it has got weights and taken up work"
    assert workshop.stage.value("advances") == 1, "and sampled the first tokens"
    workshop.engine.samples = False
    for version in range(1, 4):
        workshop.turn(NOTHING_FINISHES, new=weights(version))
    assert (workshop.engine.policy_version, beats(capsys)) == (3, [])
    assert workshop.generator.tokens_shown == workshop.engine.tokens_in_flight == 6
    # A group before this one is not whole yet: nothing can be committed, and yet the engine has returned something.
    workshop.turn([1])
    assert not workshop.stage.awaits_engine
    workshop.turn([0])
    assert "commit" in beats(capsys)


def test_the_status_record_says_at_once_that_nothing_is_in_flight_any_more(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    shown = ("requests_in_flight", "groups_in_flight", "tokens_in_flight")
    assert workshop.stage.value("requests_in_flight") > 0
    while workshop.in_flight:
        workshop.turn(range(1000))
    assert [workshop.stage.value(name) for name in shown] == [0, 0, 0]


def test_places_that_the_bound_leaves_free_beside_a_straggler_count_as_waiting(workshop: Workshop) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    assert workshop.generator.starved == 0
    for _ in range(100):
        workshop.turn(range(1, 1000))
    assert workshop.in_flight == {0}
    before = workshop.generator.starved
    workshop.turn(NOTHING_FINISHES)
    assert workshop.generator.starved > before
    assert workshop.generator.admission.starved_share(workshop.engine.in_flight) == pytest.approx(4 / 6)
    while workshop.in_flight:
        workshop.turn(range(1000))
    assert workshop.stage.value("starved_ms") == round(1000 * workshop.generator.starved)


def test_a_generator_that_waits_for_room_with_nothing_in_flight_shows_progress(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    workshop.turn(NOTHING_FINISHES)
    assert beats(capsys)[-1] == "generate"
    for _ in range(100):
        workshop.turn(range(1000))
    assert workshop.in_flight == set()
    assert beats(capsys)[-1] == "waiting for room under max_staleness"


def test_a_generator_without_room_waits_for_weights_once_the_trainer_has_newer_ones(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    for _ in range(100):
        workshop.turn(range(1000))
    write_progress(workshop.store, "train", 0, {"policy_version": 1})
    workshop.turn(NOTHING_FINISHES)
    assert beats(capsys)[-1] == "waiting for weights"


def test_a_generator_without_any_weights_waits_for_them(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    workshop.turn(NOTHING_FINISHES)
    assert beats(capsys)[-1] == "waiting for weights"
