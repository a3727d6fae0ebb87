"""Campaigns with a short form: a preset, the settings that people change first, and any other one by its key.

preset ─► changed by the form's fields ─► changed by `advanced` ─► RunConfig ─► the campaign
"""

import json
import re
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


def lists_preset_values(function: F) -> F:
    """Decorates a flow's function: each `{section.key}` of its docstring becomes the values of that key in the presets.

    Prefect's form has one default per field, whatever preset is chosen, so it shows them next to the field.
    """
    configs = {preset: load_config(PRESETS / f"{preset}.yaml", []).model_dump(mode="json") for preset in PRESET_NAMES}

    def values(match: re.Match[str]) -> str:
        presets: dict[str, list[str]] = defaultdict(list)
        for preset, config in configs.items():
            presets[json.dumps(reduce(getitem, match[1].split("."), config))].append(preset)
        if len(presets) == 1:
            return f"In all presets: {next(iter(presets))}."
        return "In the presets: " + ", ".join(f"{value} ({', '.join(names)})" for value, names in presets.items()) + "."

    function.__doc__ = re.sub(r"\{([a-z_.]+)\}", values, function.__doc__ or "")
    return function


def _flow_run_name() -> str:
    """The name until an attempt has begun."""
    parameters = runtime.flow_run.parameters
    return str(parameters.get("name") or parameters["preset"])


@flow(**{**OPTIONS, "name": "campaign-from-preset", "flow_run_name": _flow_run_name})
@fails_with_one_line
@lists_preset_values
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

    Args:
        preset: The config to begin with, a file of configs/presets. Fields left at None keep its values.
        name: The run's name, and its folder under storage.root.
        max_steps: The run's last optimizer step, training.max_steps. {training.max_steps}
        duration_minutes: Time for this attempt, budget.duration_minutes; the next one continues.
            {budget.duration_minutes}
        model: Folder of the model to train, model.path. {model.path}
        prompts: The questions, prompts.source. {prompts.source}
        reward: The score of a response, scoring.reward. {scoring.reward}
        learning_rate: training.learning_rate. {training.learning_rate}
        max_staleness: How many versions behind the trainer a trajectory may be, staleness.max_staleness.
            {staleness.max_staleness}
        resume: latest: the run continues if it exists, and starts otherwise. never: it must not exist yet. required:
            it must.
        accept_changed_inputs: Whether the run continues although the content of its prompts, rewards or another input
            has changed.
        advanced: Any other setting, one `section.key=value` per entry, as with `millrace run --set`. They win over the
            fields above.

    Raises ConfigError for a wrong setting, and the errors of `campaign`.
    """
    fields = {
        "name": name,
        "training.max_steps": max_steps,
        "budget.duration_minutes": duration_minutes,
        "model.path": model,
        "prompts.source": prompts,
        "scoring.reward": reward,
        "training.learning_rate": learning_rate,
        "staleness.max_staleness": max_staleness,
    }
    config = preset_config(preset, fields, advanced or [])
    return campaign.fn(config, config.name, resume, accept_changed_inputs)


@flow(**{**OPTIONS, "name": "sft", "flow_run_name": _flow_run_name})
@fails_with_one_line
@lists_preset_values
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

    Args:
        model: Folder of the model to train, model.path.
        prompts: The demonstrations, prompts.source: a file of conversations, or the folder or URL of a stored run.
        where: Which rollouts of a stored run are learned, prompts.where, such as `reward >= 1`.
        preset: The config to begin with, a file of configs/presets. Fields left at None keep its values.
        name: The run's name, and its folder under storage.root.
        max_steps: The run's last optimizer step, training.max_steps. {training.max_steps}
        max_new_tokens: Length of the longest demonstration, tokens, generation.max_new_tokens.
            {generation.max_new_tokens}
        learning_rate: training.learning_rate. {training.learning_rate}
        resume: As in `campaign-from-preset`.
        advanced: Any other setting, one `section.key=value` per entry. They win over the fields above.

    Raises ConfigError for a wrong setting, and the errors of `campaign`.
    """
    fields = {
        "name": name,
        "model.path": model,
        "prompts.source": prompts,
        "prompts.where": where,
        "training.max_steps": max_steps,
        "generation.max_new_tokens": max_new_tokens,
        "training.learning_rate": learning_rate,
    }
    config = preset_config(preset, fields, [*SUPERVISED, *(advanced or [])])
    return campaign.fn(config, config.name, resume)


@flow(**{**OPTIONS, "name": "distill", "flow_run_name": _flow_run_name})
@fails_with_one_line
@lists_preset_values
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

    Args:
        teacher: The model to learn from, teachers.teacher.path: a folder, or the folder or URL of a stored run, whose
            promoted checkpoint then teaches.
        preset: The config to begin with, a file of configs/presets. Fields left at None keep its values.
        name: The run's name, and its folder under storage.root.
        model: Folder of the model to train, or a stored run, model.path. {model.path}
        prompts: The questions, prompts.source. {prompts.source}
        reward_coefficient: Factor of the advantage by rewards next to the teacher's,
            training.distillation.reward_coefficient.
        max_steps: The run's last optimizer step, training.max_steps. {training.max_steps}
        learning_rate: training.learning_rate. {training.learning_rate}
        resume: As in `campaign-from-preset`.
        advanced: Any other setting, one `section.key=value` per entry. They win over the fields above.

    Raises ConfigError for a wrong setting, and the errors of `campaign`.
    """
    fields = {
        "name": name,
        "model.path": model,
        "prompts.source": prompts,
        "training.distillation.teacher": "teacher",
        "training.distillation.reward_coefficient": reward_coefficient,
        "training.max_steps": max_steps,
        "training.learning_rate": learning_rate,
    }
    teachers = "teachers=" + json.dumps({"teacher": {"path": teacher}}, ensure_ascii=False)
    config = preset_config(preset, fields, [teachers, *(advanced or [])])
    return campaign.fn(config, config.name, resume)


def preset_config(preset: Preset, fields: dict[str, str | float | None], advanced: list[str]) -> RunConfig:
    """The preset, changed by each of the `fields` that is not None and then by `advanced`. Raises ConfigError."""
    settings = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in fields.items() if value is not None]
    return load_config(PRESETS / f"{preset}.yaml", [*settings, *advanced], option="the form")
