"""Campaigns with a short form: a preset, the settings that people change first, and any other one by its key.

preset ─► changed by the form's fields ─► changed by `advanced` ─► RunConfig ─► the campaign
"""

import inspect
import json
from collections import defaultdict
from collections.abc import Callable
from functools import reduce
from operator import getitem
from typing import Any, Literal, TypeVar, get_args

from prefect import flow, runtime
from prefect.client.schemas.objects import State

from configs.load import PRESETS, SUPERVISED, load_config
from configs.schema import RunConfig
from flows.campaign.flow import OPTIONS, campaign
from flows.campaign.prepare import Resume
from flows.campaign.user_errors import fails_with_one_line

Preset = Literal[
    "tiny-cpu",
    "calculator-cpu",
    "distill-cpu",
    "chain-cpu",
    "gsm8k-cpu",
    "mixture-cpu",
    "reasoning-gym-cpu",
    "smollm2-cpu",
    "tiny-vllm-cpu",
    "qwen3-1.7b-1gpu",
    "mixture-gpu",
    "qwen3-8b-8gpu",
    "qwen3-30b-a3b-16gpu",
    "llama-70b-64gpu",
    "llama-405b-1024gpu",
]
"""The files of configs/presets, the default first."""
PRESET_NAMES: tuple[Preset, ...] = get_args(Preset)


F = TypeVar("F", bound=Callable[..., Any])
_FIELDS = {
    "teacher": (None, "The model to learn from, teachers.teacher.path: a folder, or the folder or URL of a stored run, "
    "whose promoted checkpoint then teaches."),
    "preset": (None, "The config to begin with, a file of configs/presets. Fields left at None keep its values."),
    "name": ("name", "The run's name, and its folder under storage.root."),
    "max_steps": ("training.max_steps", "The run's last optimizer step."),
    "duration_minutes": ("budget.duration_minutes", "Time for this attempt; the next one continues."),
    "model": ("model.path", "Folder of the model to train, or the folder or URL of a stored run."),
    "prompts": ("prompts.source", "The questions. For `sft` the demonstrations: a file of conversations, or the folder "
    "or URL of a stored run."),
    "where": ("prompts.where", "Which rollouts of a stored run are learned, such as `reward >= 1`."),
    "reward": ("scoring.reward", "The score of a response."),
    "reward_coefficient": ("training.distillation.reward_coefficient", "Factor of the advantage by rewards next to the "
    "teacher's."),
    "learning_rate": ("training.learning_rate", "Learning rate of the optimizer."),
    "max_new_tokens": ("generation.max_new_tokens", "Length of the longest demonstration, tokens."),
    "max_staleness": ("staleness.max_staleness", "How many versions behind the trainer a trajectory may be."),
    "resume": (None, "latest: the run continues if it exists, and starts otherwise. never: it must not exist yet. "
    "required: it must."),
    "accept_changed_inputs": (None, "Whether the run continues although the content of its prompts, rewards or another "
    "input has changed."),
    "advanced": (None, "Any other setting, one `section.key=value` per entry, as with `millrace run --set`. They win "
    "over the other fields."),
}  # fmt: skip
"""Fields of the forms by the parameter's name: the key of the config that a field sets, and its description."""


def describes_fields(function: F) -> F:
    """Decorates a flow's function: its docstring gets an `Args:` section with the fields that are its parameters.

    Prefect's form has one default per field, whatever preset is chosen. So a field's text ends with its values in the
    presets.
    """
    configs = {preset: load_config(PRESETS / f"{preset}.yaml", []).model_dump(mode="json") for preset in PRESET_NAMES}

    def described(name: str) -> str:
        key, text = _FIELDS[name]
        if key is None or key == "name":
            return f"    {name}: {text}"
        presets: dict[str, list[str]] = defaultdict(list)
        for preset, config in configs.items():
            presets[json.dumps(reduce(getitem, key.split("."), config))].append(preset)
        of_each = ", ".join(f"{value} ({', '.join(names)})" for value, names in presets.items())
        values = f"In all presets: {next(iter(presets))}." if len(presets) == 1 else f"In the presets: {of_each}."
        return f"    {name}: {text} Sets {key}. {values}"

    fields = "\n".join(map(described, inspect.signature(function).parameters))
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nArgs:\n{fields}\n"
    return function


def _flow_run_name() -> str:
    """The name until an attempt has begun."""
    parameters = runtime.flow_run.parameters
    return str(parameters.get("name") or parameters["preset"])


@flow(**{**OPTIONS, "name": "campaign-from-preset", "flow_run_name": _flow_run_name})
@fails_with_one_line
@describes_fields
def campaign_from_preset(
    preset: Preset = "tiny-cpu",
    name: str | None = None,
    max_steps: int | None = None,
    duration_minutes: float | None = None,
    model: str | None = None,
    prompts: str | None = None,
    reward: str | None = None,
    learning_rate: float | None = None,
    max_staleness: int | None = None,
    resume: Resume = "latest",
    accept_changed_inputs: bool = False,
    advanced: list[str] | None = None,
) -> dict[str, Any] | State[dict[str, Any]]:
    """One attempt of a campaign as a preset describes it, with a few changes. Returns the result of `campaign`.

    Raises ConfigError for a wrong setting, and the errors of `campaign`.
    """
    config = _config_of_form(locals())
    return campaign.fn(config, config.name, resume, accept_changed_inputs)


@flow(**{**OPTIONS, "name": "sft", "flow_run_name": _flow_run_name})
@fails_with_one_line
@describes_fields
def sft(
    model: str,
    prompts: str,
    where: str | None = None,
    preset: Preset = "tiny-cpu",
    name: str | None = None,
    max_steps: int | None = None,
    max_new_tokens: int | None = None,
    learning_rate: float | None = None,
    resume: Resume = "latest",
    advanced: list[str] | None = None,
) -> dict[str, Any] | State[dict[str, Any]]:
    """One attempt of supervised fine-tuning, as `millrace sft`. Returns the result of `campaign`.

    Raises ConfigError for a wrong setting, and the errors of `campaign`.
    """
    config = _config_of_form(locals(), *SUPERVISED)
    return campaign.fn(config, config.name, resume)


@flow(**{**OPTIONS, "name": "distill", "flow_run_name": _flow_run_name})
@fails_with_one_line
@describes_fields
def distill(
    teacher: str,
    preset: Preset = "distill-cpu",
    name: str | None = None,
    model: str | None = None,
    prompts: str | None = None,
    reward_coefficient: float = 0.0,
    max_steps: int | None = None,
    learning_rate: float | None = None,
    resume: Resume = "latest",
    advanced: list[str] | None = None,
) -> dict[str, Any] | State[dict[str, Any]]:
    """One attempt of on-policy distillation. Returns the result of `campaign`.

    Raises ConfigError for a wrong setting, and the errors of `campaign`.
    """
    teachers = "teachers=" + json.dumps({"teacher": {"path": teacher}}, ensure_ascii=False)
    config = _config_of_form(locals(), teachers, "training.distillation.teacher=teacher")
    return campaign.fn(config, config.name, resume)


def _config_of_form(form: dict[str, Any], *settings: str) -> RunConfig:
    """The config of a form by its fields' names, with `settings` that the form implies. Raises ConfigError."""
    fields = {key: form[name] for name, (key, _) in _FIELDS.items() if key is not None and name in form}
    return preset_config(form["preset"], fields, [*settings, *(form["advanced"] or [])])


def preset_config(preset: Preset, fields: dict[str, str | float | None], advanced: list[str]) -> RunConfig:
    """The preset, changed by each of the `fields` that is not None and then by `advanced`. Raises ConfigError."""
    settings = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in fields.items() if value is not None]
    return load_config(PRESETS / f"{preset}.yaml", [*settings, *advanced], option="the form")
