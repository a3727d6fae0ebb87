"""The scores of a run whose trajectories are scored anew: which parts have any, and what services answered for them."""

import json
from collections.abc import Mapping
from typing import Any

from configs.stored import AnnotatorPools
from millrace.replay.parts import ScoredParts, Scores
from millrace.rewards.services.remote import digest
from millrace.runs.record import latest_attempt
from storage.errors import PartCorrupt, PartRemoved
from storage.stores.base import Store


class RecordedScores:
    """The scores of the run in `store`."""

    def __init__(self, store: Store) -> None:
        config = latest_attempt(store).config
        scores = Scores(store=store, pools=AnnotatorPools.of(config))
        self._parts = ScoredParts(store, config["generation"]["replicas"], scores)

    def has(self, generator: int, ordinal: int) -> bool:
        """Whether the run scored a part of trajectories; the last ones of a run may have no scores."""
        return self._parts.is_scored(generator, ordinal)

    def of_part(self, generator: int, ordinal: int) -> Mapping[str, Mapping[str, Any]]:
        """The answers for a part of trajectories, by `digest` of the request; none if its scores can't be read."""
        try:
            scores = self._parts.scores(generator, ordinal, ["exchange"])
        except (PartCorrupt, PartRemoved):
            return {}
        texts = [] if scores is None else scores["exchange"].drop_null().to_pylist()
        exchanges = [exchange for text in texts for exchange in json.loads(text).values()]
        return {digest(exchange["request"]): exchange["answer"] for exchange in exchanges if exchange["answer"]}
