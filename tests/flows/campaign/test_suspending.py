"""Which states of its flow run tell a campaign that a person has suspended it."""

from prefect.states import Cancelling, Paused, Pending, Running, Scheduled, Suspended

from flows.campaign.cancellation import suspensions


def test_each_suspension_of_a_flow_run_counts_also_those_that_were_resumed_meanwhile() -> None:
    first, second = Suspended(), Suspended()
    resumed = [Scheduled(name="Resuming"), Pending(), Running()]
    assert suspensions([second, Running(), first, *resumed]) == [first, second]


def test_a_pause_that_waits_inside_the_process_is_no_suspension_and_neither_is_any_other_state() -> None:
    assert suspensions([Scheduled(), Running(), Paused(reschedule=False), Cancelling()]) == []
