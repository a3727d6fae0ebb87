"""What the Prefect server does by itself when a campaign says that something is wrong.

    stage process ─► its task ─► event millrace.… ─► automation ─► the attempt is cancelled, the deployment paused
    flow run ─► prefect.flow-run.heartbeat … silence ─────────────► the flow run is marked Crashed

The first two are examples, put there switched off: how many restarts are too many is for a person to say. The third is
switched on: a controller that was killed together with its worker can't tell anybody, and would keep its place in the
pool for ever.
"""

from datetime import timedelta

from prefect.automations import AutomationCore, EventTrigger, Posture, ResourceSpecification
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, CancelFlowRun, ChangeFlowRunState, PauseDeployment

HEARTBEAT_SECONDS = 60
"""How often a flow run is to say that it is alive: PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the worker."""
_SILENT_HEARTBEATS = 10
"""Fewer would do, but a server that was away for some minutes must not take living campaigns for dead."""
_RESTARTS, _RESTARTS_WITHIN = 3, timedelta(minutes=10)

_HEARTBEAT = "prefect.flow-run.heartbeat"
_GONE = "no sign of life: its controller is gone"
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Paused", "AwaitingRetry", "Scheduled")


def automations(
    *, silent: timedelta = timedelta(seconds=_SILENT_HEARTBEATS * HEARTBEAT_SECONDS)
) -> list[AutomationCore]:
    """The automations of this project; a flow run that says nothing for `silent` counts as crashed."""
    stop: list[ActionTypes] = [CancelFlowRun(), PauseDeployment(source="inferred", deployment_id=None)]
    return [
        AutomationCore(
            name="millrace: a stage keeps restarting",
            description="Three restarts of stages of one run in ten minutes: cancel the attempt, pause its deployment.",
            enabled=False,
            trigger=_event_of_a_run("millrace.stage.restarted", threshold=_RESTARTS, within=_RESTARTS_WITHIN),
            actions=stop,
        ),
        AutomationCore(
            name="millrace: the reward collapsed",
            description="Cancel the attempt, pause its deployment: a person should look before more is trained.",
            enabled=False,
            trigger=_event_of_a_run("millrace.reward.collapsed"),
            actions=stop,
        ),
        AutomationCore(
            name="millrace: a campaign fell silent",
            description="No sign of life of a flow run: mark it Crashed, so that the next attempt gets its place.",
            enabled=True,
            trigger=EventTrigger(
                after={_HEARTBEAT},
                expect={_HEARTBEAT, *(f"prefect.flow-run.{state}" for state in _ENDS)},
                match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=silent,
            ),
            actions=[ChangeFlowRunState(name=None, state=StateType.CRASHED, message=_GONE, force=False)],
        ),
    ]


def _event_of_a_run(event: str, *, threshold: int = 1, within: timedelta = timedelta(0)) -> EventTrigger:
    return EventTrigger(
        expect={event},
        match=ResourceSpecification({"prefect.resource.id": "millrace.run.*"}),
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=threshold,
        within=within,
    )


async def put_automations(client: PrefectClient, wanted: list[AutomationCore]) -> None:
    """Creates them, or brings those of the same name up to date; switched on or off stays as a person left it."""
    for automation in wanted:
        there = await client.read_automations_by_name(automation.name)
        if there:
            # Dumped and read again, every field counts as set. The client leaves out those that do not, and the server
            # takes an action that comes without its type for another one.
            kept = AutomationCore.model_validate(
                {**automation.model_dump(exclude={"owner_resource"}), "enabled": there[0].enabled}
            )
            await client.update_automation(there[0].id, kept)
        else:
            await client.create_automation(automation)
