"""Several campaigns in a row, as one flow: each starts from the model that the one before promoted.

    sft ─► promoted model ─► distill ─► promoted model ─► rl          a run each, under the name in its config

A link without steps left passes the chain on, so the next attempt of a chain continues where the last one ended.
"""

from typing import Any, cast

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import BaseModel, ConfigDict, Field

from configs.load import SUPERVISED
from configs.schema import RunConfig
from flows.campaign.flow import OPTIONS, campaign
from flows.campaign.from_preset import Preset, preset_config
from flows.campaign.prepare import run_store
from flows.campaign.user_errors import fails_with_one_line
from millrace.errors import InputError


class Link(BaseModel):
    """A campaign of a chain."""

    model_config = ConfigDict(extra="forbid")

    preset: Preset
    """The config to begin with, a file of configs/presets."""
    sft: bool = False
    """Whether it learns demonstrations, as `millrace sft` does."""
    settings: list[str] = Field(default_factory=list)
    """Changes to it, one `section.key=value` per entry, as with `millrace run --set`. `model.path` is that of the run
    before unless it is set here."""


def _flow_run_name() -> str:
    return " → ".join(Link.model_validate(link).preset for link in runtime.flow_run.parameters["links"])


@flow(**{**OPTIONS, "name": "chain", "flow_run_name": _flow_run_name})
@fails_with_one_line
def chain(links: list[Link], accept_changed_inputs: bool = False) -> State[Any]:
    """One attempt of each campaign, until one has steps left. Returns the state of the last one that ran.

    Args:
        links: The campaigns in their order.
        accept_changed_inputs: As in `campaign`.

    Raises ConfigError for a wrong setting and InputError for two runs of one name, before anything runs, and the errors
    of `campaign`. A run that promotes nothing ends the chain with an InputError.
    """
    state: State[Any] = Completed()
    for config in link_configs(links):
        # Prefect unpacks this state only where it runs the flow itself.
        state = cast("State[Any]", campaign.fn(config, config.name, "latest", accept_changed_inputs))
        if not state.is_completed() or cast("dict[str, Any]", state.data)["state"] != "finished":
            break
    return state


def link_configs(links: list[Link]) -> list[RunConfig]:
    """The config of each campaign. Raises ConfigError for a wrong setting and InputError for two runs of one name."""
    configs: list[RunConfig] = []
    for link in links:
        before = run_store(configs[-1], configs[-1].name).url if configs else None
        settings = [*(SUPERVISED if link.sft else ()), *link.settings]
        config = preset_config(link.preset, {"model.path": before}, settings)
        if any(config.name == other.name for other in configs):
            raise InputError(f'"{config.name}" twice', key="name", expected="another name for each run of the chain")
        configs.append(config)
    return configs
