"""The configs of a chain of campaigns."""

from pathlib import Path

import pytest

from flows.campaign.chain import Link, link_configs
from millrace.errors import InputError


def test_each_link_starts_from_the_run_before_unless_it_names_a_model(tmp_path: Path) -> None:
    root = f"storage.root={tmp_path}"
    first, second, third = link_configs(
        [
            Link(preset="tiny-cpu", settings=["name=first", root]),
            Link(preset="tiny-cpu", settings=["name=second", root]),
            Link(preset="tiny-cpu", settings=["name=third", root, "model.path=models/other"]),
        ]
    )
    assert first.model.path is None
    assert second.model.path == str(tmp_path / "first")
    assert third.model.path == "models/other"


def test_a_link_may_learn_demonstrations() -> None:
    shown = ["name=first", "model.path=models/mine", "prompts.source=shown.jsonl"]
    first, second = link_configs([Link(preset="tiny-cpu", sft=True, settings=shown), Link(preset="tiny-cpu")])
    assert (first.prompts.demonstrations, first.training.loss.name) == (True, "cross_entropy")
    assert second.generation.engine == "transformers"


def test_two_links_with_one_name_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        link_configs([Link(preset="tiny-cpu"), Link(preset="tiny-cpu")])
    assert caught.value.key == "name"
