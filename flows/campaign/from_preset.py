"""Campaigns with a short form: a preset, the settings that people change first, and any other one by its key.

preset ─► changed by the form's fields ─► changed by `advanced` ─► RunConfig ─► the campaign
"""

import json
from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State

from configs.load import PRESETS, SUPERVISED, load_config
from configs.schema import RunConfig
from flows.campaign.flow import OPTIONS, campaign
from flows.campaign.prepare import Resume

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


@flow(**{**OPTIONS, "name": "campaign-from-preset", "flow_run_name": "{preset} {name}"})
def campaign_from_preset(
    preset: Preset = "tiny-cpu",
    name: str = "",
    max_steps: int = 0,
    duration_minutes: float = 0.0,
    model: str = "",
    prompts: str = "",
    reward: str = "",
    learning_rate: float = 0.0,
    max_staleness: int = -1,
    resume: Resume = "latest",
    accept_changed_inputs: bool = False,
    advanced: list[str] | None = None,
) -> dict[str, Any] | State[dict[str, Any]]:
    """One attempt of a campaign as a preset describes it, with a few changes. Returns the result of `campaign`.

    Args:
        preset: The config to begin with, a file of configs/presets. Fields that are left as they are keep its values.
        name: The run's name, and its folder under storage.root.
        max_steps: The run's last optimizer step, training.max_steps.
        duration_minutes: Time for this attempt, budget.duration_minutes; the next one continues.
        model: Folder of the model to train, model.path.
        prompts: The questions, prompts.source.
        reward: The score of a response, scoring.reward.
        learning_rate: training.learning_rate.
        max_staleness: How many versions behind the trainer a trajectory may be, staleness.max_staleness.
        resume: latest: the run continues if it exists, and starts otherwise. never: it must not exist yet. required:
            it must.
        accept_changed_inputs: Whether the run continues although the content of its prompts, rewards or another input
            has changed.
        advanced: Any other setting, one `section.key=value` per entry, as with `millrace run --set`. They win over the
            fields above.

    Raises ConfigError for a wrong setting, and the errors of `campaign`.
    """
    fields = {
        "name": name or None,
        "training.max_steps": max_steps or None,
        "budget.duration_minutes": duration_minutes or None,
        "model.path": model or None,
        "prompts.source": prompts or None,
        "scoring.reward": reward or None,
        "training.learning_rate": learning_rate or None,
        "staleness.max_staleness": None if max_staleness < 0 else max_staleness,
    }
    config = preset_config(preset, fields, advanced or [])
    return campaign.fn(config, config.name, resume, accept_changed_inputs)


@flow(**{**OPTIONS, "name": "sft", "flow_run_name": "sft {name}"})
def sft(
    model: str,
    prompts: str,
    where: str = "",
    preset: Preset = "tiny-cpu",
    name: str = "",
    max_steps: int = 0,
    max_new_tokens: int = 0,
    learning_rate: float = 0.0,
    resume: Resume = "latest",
    advanced: list[str] | None = None,
) -> dict[str, Any] | State[dict[str, Any]]:
    """One attempt of supervised fine-tuning, as `millrace sft`. Returns the result of `campaign`.

    Args:
        model: Folder of the model to train, model.path.
        prompts: The demonstrations, prompts.source: a file of conversations, or the folder or URL of a stored run.
        where: Which rollouts of a stored run are learned, prompts.where, such as `reward >= 1`.
        preset: The config to begin with, a file of configs/presets. Fields that are left as they are keep its values.
        name: The run's name, and its folder under storage.root.
        max_steps: The run's last optimizer step, training.max_steps.
        max_new_tokens: Length of the longest demonstration, tokens, generation.max_new_tokens.
        learning_rate: training.learning_rate.
        resume: As in `campaign-from-preset`.
        advanced: Any other setting, one `section.key=value` per entry. They win over the fields above.

    Raises ConfigError for a wrong setting, and the errors of `campaign`.
    """
    fields = {
        "name": name or None,
        "model.path": model,
        "prompts.source": prompts,
        "prompts.where": where or None,
        "training.max_steps": max_steps or None,
        "generation.max_new_tokens": max_new_tokens or None,
        "training.learning_rate": learning_rate or None,
    }
    config = preset_config(preset, fields, [*SUPERVISED, *(advanced or [])])
    return campaign.fn(config, config.name, resume)


@flow(**{**OPTIONS, "name": "distill", "flow_run_name": "distill {name}"})
def distill(
    teacher: str,
    preset: Preset = "distill-cpu",
    name: str = "",
    model: str = "",
    prompts: str = "",
    reward_coefficient: float = 0.0,
    max_steps: int = 0,
    learning_rate: float = 0.0,
    resume: Resume = "latest",
    advanced: list[str] | None = None,
) -> dict[str, Any] | State[dict[str, Any]]:
    """One attempt of on-policy distillation. Returns the result of `campaign`.

    Args:
        teacher: The model to learn from, teachers.teacher.path: a folder, or the folder or URL of a stored run, whose
            promoted checkpoint then teaches.
        preset: The config to begin with, a file of configs/presets. Fields that are left as they are keep its values.
        name: The run's name, and its folder under storage.root.
        model: Folder of the model to train, or a stored run, model.path.
        prompts: The questions, prompts.source.
        reward_coefficient: Factor of the advantage by rewards next to the teacher's,
            training.distillation.reward_coefficient.
        max_steps: The run's last optimizer step, training.max_steps.
        learning_rate: training.learning_rate.
        resume: As in `campaign-from-preset`.
        advanced: Any other setting, one `section.key=value` per entry. They win over the fields above.

    Raises ConfigError for a wrong setting, and the errors of `campaign`.
    """
    fields = {
        "name": name or None,
        "model.path": model or None,
        "prompts.source": prompts or None,
        "training.distillation.teacher": "teacher",
        "training.distillation.reward_coefficient": reward_coefficient,
        "training.max_steps": max_steps or None,
        "training.learning_rate": learning_rate or None,
    }
    teachers = "teachers=" + json.dumps({"teacher": {"path": teacher}}, ensure_ascii=False)
    config = preset_config(preset, fields, [teachers, *(advanced or [])])
    return campaign.fn(config, config.name, resume)


def preset_config(preset: Preset, fields: dict[str, str | float | None], advanced: list[str]) -> RunConfig:
    """The preset, changed by each of the `fields` that is not None and then by `advanced`. Raises ConfigError."""
    settings = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in fields.items() if value is not None]
    return load_config(PRESETS / f"{preset}.yaml", [*settings, *advanced], option="the form")
