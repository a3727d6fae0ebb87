"""Automations: what the Prefect server does by itself when a campaign reports a problem, or stops reporting.

    stage process ─► its task ─► event millrace.… ─► automation ─► the attempt is cancelled, the deployment paused
    flow run ─► prefect.flow-run.heartbeat … silence ─────────────► the flow run is marked Crashed

The first two are examples and start switched off: a person decides how many restarts are too many. The third starts
switched on: a controller killed together with its worker cannot report its end, and would occupy the pool for ever.
"""

from datetime import timedelta

from prefect.automations import AutomationCore, EventTrigger, Posture, ResourceSpecification
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, CancelFlowRun, ChangeFlowRunState, PauseDeployment

HEARTBEAT_SECONDS = 60
"""Time between two heartbeats of a flow run: PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the worker."""
_SILENT_HEARTBEATS = 10
"""So many that an outage of the server of some minutes does not make it mark live campaigns as crashed."""
_RESTARTS, _RESTARTS_WITHIN = 3, timedelta(minutes=10)

_HEARTBEAT = "prefect.flow-run.heartbeat"
_GONE = "no heartbeat: its controller is gone"
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Paused", "AwaitingRetry", "Scheduled")


def automations(
    *, silent: timedelta = timedelta(seconds=_SILENT_HEARTBEATS * HEARTBEAT_SECONDS)
) -> list[AutomationCore]:
    """The automations of this project. A flow run without a heartbeat for `silent` counts as crashed."""
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
            name="millrace: training collapsed",
            description="Cancel the attempt, pause its deployment: a person should look before more is trained.",
            enabled=False,
            trigger=_event_of_a_run("millrace.training.collapsed"),
            actions=stop,
        ),
        AutomationCore(
            name="millrace: a campaign fell silent",
            description="No heartbeat of a flow run: mark it Crashed, so that the next attempt gets its place.",
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
    """Creates or updates the automations by name. An existing one stays switched on or off."""
    for automation in wanted:
        there = await client.read_automations_by_name(automation.name)
        if there:
            # The client omits unset fields, and without its type the server mistakes an action for another. After
            # dumping and validating, every field counts as set.
            kept = AutomationCore.model_validate(
                {**automation.model_dump(exclude={"owner_resource"}), "enabled": there[0].enabled}
            )
            await client.update_automation(there[0].id, kept)
        else:
            await client.create_automation(automation)
