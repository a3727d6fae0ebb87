"""Which groups a generator puts in flight: its own, in order, as far as the staleness bound and its batch have room."""

import time
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from millrace.prompts.dataset import PromptOrder
from millrace.rollouts.group_sequence import next_group
from millrace.rollouts.groups_in_flight import GroupsInFlight
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.staleness import admission_limit
from millrace.runtime.stage import Stage
from millrace.types import Request
from storage.progress import read_status


class Admission:
    """The groups of one generator, from admission until they are taken for commit."""

    def __init__(self, stage: Stage, order: PromptOrder, tokenizer: PreTrainedTokenizerBase) -> None:
        config = stage.config
        self._stage = stage
        self._order = order
        self._tokenizer = tokenizer
        self._replicas = config.generation.replicas
        # Known once the first weights are here.
        self._next_group = 0
        self.by_step = config.pipeline.mode == "sync"
        """Whether a part is a whole step's share: the barrier between generation and the other stages."""
        self._most = config.training.groups_per_step if self.by_step else config.generation.groups_per_batch
        self.groups = GroupsInFlight(config.generation.group_size, config.seed)

    def restart(self, incarnation: int) -> None:
        """Forgets the groups in flight, and goes back to the first group that this incarnation's trainer lacks."""
        self.groups.clear()
        store = self._stage.store
        lineage = Lineage.of(store, incarnation)
        self._next_group = next_group(store, self._stage.replica, self._replicas, lineage)

    def admissible(self, policy_version: int) -> list[int]:
        """The numbers of the groups that may be put in flight under this version."""
        config = self._stage.config
        limit = admission_limit(
            policy_version,
            max_staleness=config.effective_max_staleness,
            groups_per_step=config.training.groups_per_step,
            groups_dropped=read_status(self._stage.store, "train", 0).get("groups_dropped", 0),
        )
        room = max(0, self._most - len(self.groups))
        first = self._next_group
        return [n for n in range(first, first + room * self._replicas, self._replicas) if n < limit]

    def admit(self, policy_version: int) -> Iterator[list[Request]]:
        """Puts the admissible groups in flight; yields the requests of each."""
        t_admitted = time.time()
        for group_id in self.admissible(policy_version):
            prompt = self._order.prompt_at(group_id)
            tokens = tuple(self._tokenizer(prompt.text)["input_ids"])
            self._next_group = group_id + self._replicas
            yield self.groups.admit(group_id, prompt, tokens, t_admitted)
