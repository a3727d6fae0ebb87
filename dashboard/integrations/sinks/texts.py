"""Texts of a run for a sink: the config of each attempt, and the best and the worst response every 20 steps.

attempts/<n>.json                      ─► `config`, at the version that the attempt resumed from
consumed, trajectories, tokenizer      ─► `samples`, at versions 1, 20, 40, …
"""

import json
from collections.abc import Sequence

import numpy as np

from dashboard.integrations.sinks.sink import Text
from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.read.tokens import shortened
from millrace.errors import InputError
from millrace.runs.record import latest_attempt, read_attempt
from storage.stores.base import Store

SAMPLE_STEPS = 20
_CHARACTERS = 4000
"""Limit for a prompt or a response."""


def config_texts(store: Store, first: int) -> Sequence[Text]:
    """Returns the configs of attempt `first` and later as indented JSON."""
    attempts = [read_attempt(store, number) for number in range(first, latest_attempt(store).number + 1)]
    return [
        Text(
            policy_version=attempt.first_step,
            t=attempt.t_started,
            name="config",
            markdown=_verbatim(json.dumps(attempt.config, indent=2, sort_keys=True)),
        )
        for attempt in attempts
    ]


def sampled_versions(after: int, newest: int) -> Sequence[int]:
    """Returns the versions above `after` up to `newest` that get samples: 1, 20, 40, …"""
    return [version for version in range(after + 1, newest + 1) if version == 1 or version % SAMPLE_STEPS == 0]


class Samples:
    """Formats trained responses as text."""

    def __init__(self, store: Store) -> None:
        self._reader = RunReader(store)
        self._groups, self._texts = self._reader.groups()

    def of_versions(self, versions: Sequence[int]) -> Sequence[Text]:
        """Returns a text for each version with at least one trained trajectory that has a reward."""
        run = self._reader.look()
        texts = [self._of_version(run, version) for version in versions]
        return [text for text in texts if text is not None]

    def _of_version(self, run: RunData, version: int) -> Text | None:
        rewards = np.where(run.trained, run.consumed["reward"], np.nan)
        mine = np.flatnonzero((run.consumed["policy_version"] == version) & np.isfinite(rewards))
        if not len(mine):
            return None
        best, worst = mine[np.argmax(rewards[mine])], mine[np.argmin(rewards[mine])]
        samples = [self._sample(run, int(row), title) for row, title in ((best, "Best"), (worst, "Worst"))]
        return Text(
            policy_version=version,
            t=float(run.consumed["t"][best]),
            name="samples",
            markdown="\n\n".join(samples),
        )

    def _sample(self, run: RunData, row: int, title: str) -> str:
        generator, row_id = run.consumed.place(row)
        heading = f"**{title}: reward {run.consumed['reward'][row]:.3g}**"
        try:
            group = self._groups.read(run, generator, row_id)
        except InputError as error:
            return f"{heading}\n\n{_verbatim(str(error))}"
        response = next((response for response in group.responses if response.row_id == row_id), None)
        if response is None or response.trajectory is None or group.prompt is None:
            return f"{heading}\n\n{_verbatim('; '.join(group.problems) or 'no longer stored')}"
        prompt = self._texts.text(group.prompt["prompt_tokens"])
        response_text = self._texts.text(response.trajectory["response_tokens"])
        return f"{heading}, group {group.group_id}\n\n{_verbatim(prompt)}\n\n→\n\n{_verbatim(response_text)}"


def _verbatim(text: str) -> str:
    """Formats `text` as a Markdown code block, so that its markup has no effect."""
    return "\n".join(f"    {line}" for line in shortened(text, _CHARACTERS).splitlines() or [""])
