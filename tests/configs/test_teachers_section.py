"""Teachers in a config: which source has which, which processes compute them, and which mistakes are named."""

from typing import Any

import pytest

from configs.errors import ConfigError, UserError
from configs.load import changed_immutably, with_overrides
from configs.schema import RunConfig

TEACHERS: dict[str, Any] = {"expert": {"path": "models/expert", "replicas": 2}, "before": {"path": "start"}}


def values(teacher: str | None, **sources: str | None) -> dict[str, Any]:
    """A run with this teacher, and sources with their own."""
    return {
        "teachers": TEACHERS,
        "training": {"max_steps": 3, "distillation": {"teacher": teacher}},
        "sources": {
            name: {"training": {"distillation": {"teacher": teacher_of_source}}}
            for name, teacher_of_source in sources.items()
        }
        | ({"plain": {}} if sources else {}),
    }


def mistakes(settings: dict[str, Any], *overrides: str) -> list[UserError]:
    with pytest.raises(ConfigError) as caught:
        with_overrides(settings, overrides, where="run.yaml")
    return list(caught.value.mistakes)


def test_a_source_has_its_own_teacher_or_that_of_the_run_or_none() -> None:
    config = RunConfig.model_validate(values("expert", sums="before", words=None))
    pools = config.annotators
    assert pools.of_kind("teachers") == {"teachers/before": 1, "teachers/expert": 2}
    teachers = {name: pools.of_source("teachers", name) for name in config.sources}
    assert teachers == {"sums": "teachers/before", "words": None, "plain": "teachers/expert"}


def test_the_replicas_of_teachers_do_not_depend_on_the_order_in_the_file() -> None:
    config = RunConfig.model_validate(values("expert", sums="before"))
    assert [config.teacher_of(replica)[0] for replica in range(3)] == ["before", "expert", "expert"]
    with pytest.raises(ValueError, match="3 annotators"):
        config.teacher_of(3)


def test_a_key_of_a_teacher_can_be_overridden() -> None:
    config = with_overrides(values("expert", sums="before"), ["teachers.expert.path=runs/best"], where="run.yaml")
    assert config.teachers["expert"].path == "runs/best"


@pytest.mark.parametrize(
    ("settings", "key", "read"),
    [
        (values("genius", sums="expert", words="before"), "training.distillation.teacher", '"genius"'),
        (values("expert", sums="genius", words="before"), "sources.sums.training.distillation.teacher", '"genius"'),
        (values("expert"), "teachers.before", "a teacher of no source"),
        (
            {**values("expert", sums="before"), "placement": {"teach": {"devices": [0]}}},
            "placement.teach.devices",
            "[0]",
        ),
    ],
    ids=["unknown", "unknown to a source", "not used", "no GPU"],
)
def test_a_teacher_that_nobody_has_and_one_that_is_not_there_are_named(
    settings: dict[str, Any], key: str, read: str
) -> None:
    assert (key, read) in [(mistake.key, mistake.read) for mistake in mistakes(settings)]


def test_an_unknown_key_of_a_teacher_is_named_with_the_known_ones() -> None:
    settings = {**values("expert"), "teachers": {"expert": {"path": "x", "copies": 2}}}
    (mistake,) = mistakes(settings)
    assert (mistake.key, mistake.expected) == ("teachers.expert.copies", "one of path, replicas, device, threads")


def test_a_resumed_run_keeps_its_teachers() -> None:
    config = RunConfig.model_validate(values("expert", sums="before"))
    other = with_overrides(config.model_dump(mode="json"), ["teachers.expert.path=other"], where="run.yaml")
    (difference,) = changed_immutably(config, other)
    assert difference.startswith("teachers was ")


def test_without_a_forward_kl_the_reverse_one_has_a_coefficient() -> None:
    settings = values("expert", sums="before")
    (mistake,) = mistakes(settings, "training.distillation.coefficient=0", "sources.sums.training.distillation.top_k=4")
    assert mistake.key == "training.distillation.coefficient"
    with_overrides(settings, ["training.distillation.coefficient=0", "training.distillation.top_k=4"], where="run.yaml")


def test_a_coefficient_of_a_forward_kl_that_is_not_there_is_refused() -> None:
    settings, change = values("expert", sums="before"), "training.distillation.forward_coefficient=0.5"
    assert "training.distillation.forward_coefficient" in {mistake.key for mistake in mistakes(settings, change)}
    with_overrides(settings, [change, "training.distillation.top_k=4"], where="run.yaml")
