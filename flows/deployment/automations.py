"""Automations: reactions of the Prefect server when a campaign reports a problem, or stops reporting.

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

_SILENT = timedelta(minutes=10)
"""Ten heartbeats (PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the worker), so that a server that is away for some minutes does
not mark live campaigns as crashed."""
_HEARTBEAT = "prefect.flow-run.heartbeat"
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Paused", "AwaitingRetry", "Scheduled")


def automations() -> list[AutomationCore]:
    """The automations of this project."""
    silence = EventTrigger(
        after={_HEARTBEAT},
        expect={_HEARTBEAT, *(f"prefect.flow-run.{state}" for state in _ENDS)},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=_SILENT,
    )
    crash = ChangeFlowRunState(
        name=None, state=StateType.CRASHED, message="no heartbeat: its controller is gone", force=False
    )
    return [
        _stopping(
            "millrace: a stage keeps restarting",
            "Three restarts of stages of one run in ten minutes: cancel the attempt, pause its deployment.",
            "millrace.stage.restarted",
            threshold=3,
            within=timedelta(minutes=10),
        ),
        _stopping(
            "millrace: training collapsed",
            "Cancel the attempt, pause its deployment: a person should look before more is trained.",
            "millrace.training.collapsed",
        ),
        AutomationCore(
            name="millrace: a campaign fell silent",
            description="No heartbeat of a flow run: mark it Crashed, so that the next attempt gets its place.",
            enabled=True,
            trigger=silence,
            actions=[crash],
        ),
    ]


def _stopping(
    name: str, description: str, event: str, *, threshold: int = 1, within: timedelta = timedelta(0)
) -> AutomationCore:
    """Cancels the attempt and pauses its deployment when a run has sent `threshold` of these events."""
    actions: list[ActionTypes] = [CancelFlowRun(), PauseDeployment(source="inferred", deployment_id=None)]
    trigger = EventTrigger(
        expect={event},
        match=ResourceSpecification({"prefect.resource.id": "millrace.run.*"}),
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=threshold,
        within=within,
    )
    return AutomationCore(name=name, description=description, enabled=False, trigger=trigger, actions=actions)


async def put_automations(client: PrefectClient, automations: list[AutomationCore]) -> None:
    """Creates or updates the automations by name. An existing one stays switched on or off."""
    for automation in automations:
        existing = await client.read_automations_by_name(automation.name)
        if existing:
            # The client omits unset fields, and without its type the server mistakes an action for another. After
            # dumping and validating, every field counts as set.
            values = {**automation.model_dump(exclude={"owner_resource"}), "enabled": existing[0].enabled}
            await client.update_automation(existing[0].id, AutomationCore.model_validate(values))
        else:
            await client.create_automation(automation)
