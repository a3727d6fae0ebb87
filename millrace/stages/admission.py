"""Admission: which requests a generator submits, limited by the staleness bound and by its slots.

    missing groups, then new ones ─► under the bound? ─► requests of the group ─► a slot free? ─► engine

A slot holds one request in flight. A group that waits for its last response holds one slot, so the engine stays full
while it waits for a straggler.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from millrace.chat.encoder import PromptEncoder
from millrace.prompts.curriculum import Curriculum
from millrace.prompts.dataset import PromptOrder
from millrace.rollouts.group_sequence import GroupSet
from millrace.rollouts.groups_in_flight import GroupsInFlight, num_tokens
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.staleness import admission_limit, max_in_flight
from millrace.runtime.stage import Stage
from millrace.types import Prompt, Request, Trajectory
from storage.progress import read_status


class Admission:
    """The groups of one generator, from admission until they are taken for commit."""

    def __init__(self, stage: Stage, order: PromptOrder | Curriculum, encoder: PromptEncoder) -> None:
        config = stage.config
        self._stage = stage
        self._order = order
        self._encoder = encoder
        self.by_step = config.pipeline.mode == "sync"
        """Whether a part is a generator's whole share of a step, as in sync mode."""
        self.max_staleness = config.effective_max_staleness
        """Staleness bound of the weights in use, policy versions."""
        self._slots = max_in_flight(
            by_step=self.by_step,
            groups_per_step=config.training.groups_per_step,
            groups_per_batch=config.generation.groups_per_batch,
            group_size=config.generation.group_size,
        )
        self.newest_version = 0
        """The trainer's policy version at the last check for room."""
        self.groups = GroupsInFlight(config.generation.group_size, config.seed)
        # Set by `restart`, once the first weights have arrived.
        self._numbers: Iterator[int]
        self._next: int
        self._begun: dict[int, dict[int, Trajectory]] = {}
        self._queue: deque[Request] = deque()

    def switch_lineage(self, lineage: Lineage, last_group: int) -> None:
        """Switches to weights of another incarnation, of this lineage. Call `restart` next.

        Raises StreamCorrupt if the curriculum is missing `last_group`, the highest group that was sampled.
        """
        if isinstance(self._order, Curriculum):
            self._order.switch_lineage(lineage, last_group)

    def restart(self, committed: GroupSet, begun: Sequence[Trajectory] = ()) -> tuple[int, int]:
        """Continues after the committed groups, and with the unfinished responses `begun`; nothing may be in flight.

        Returns the number of responses that are continued, and of their tokens: those of committed groups are not.
        """
        self._queue.clear()
        self._numbers = committed.to_generate()
        self._next = next(self._numbers)
        self._begun = {}
        continued = [response for response in begun if response.request.group_id not in committed]
        for response in continued:
            self._begun.setdefault(response.request.group_id, {})[response.request.sample_index] = response
        return len(continued), num_tokens(continued)

    @property
    def waiting(self) -> int:
        """Requests of admitted groups that wait for a slot."""
        return len(self._queue)

    def has_room(self, policy_version: int) -> bool:
        """Whether the next group may be admitted under this version."""
        return self._next < self._limit(policy_version)

    def requests(self, policy_version: int, in_flight: int) -> list[Request]:
        """Returns the requests to submit now, given the number of requests in flight."""
        free = self._slots - in_flight
        if len(self._queue) < free:
            limit = self._limit(policy_version)
            while len(self._queue) < free and self._next < limit:
                self._admit(policy_version)
        return [self._queue.popleft() for _ in range(min(free, len(self._queue)))]

    def starved_share(self, in_flight: int) -> float:
        """Share of slots left free because the bound admits no further group, 0 to 1. Call after `requests`."""
        return max(0, self._slots - in_flight) / self._slots

    def interrupt(self, from_engine: Sequence[Trajectory]) -> list[Trajectory]:
        """Removes all groups. Returns their responses so far, and those whose groups were not admitted again yet."""
        waiting = [response for group in self._begun.values() for response in group.values()]
        self._queue.clear()
        self._begun = {}
        return [*self.groups.interrupt(from_engine), *waiting]

    def _limit(self, policy_version: int) -> int:
        trainer = read_status(self._stage.store, "train", 0)
        self.newest_version = trainer.get("policy_version", 0)
        return admission_limit(
            policy_version,
            max_staleness=self.max_staleness,
            groups_per_step=self._stage.config.training.groups_per_step,
            groups_dropped=trainer.get("groups_dropped", 0),
        )

    def _admit(self, policy_version: int) -> None:
        if isinstance(self._order, Curriculum) and self._order.decide(self._next, policy_version):
            block, lineage = self._order.newest, self._order.lineage
            assert block is not None
            assert lineage is not None
            num_prompts = block.num_prompts
            shares = {"easy": block.num_easy / num_prompts, "hard": block.num_hard / num_prompts}
            metrics: dict[str, Any] = {f"{name}_prompt_share": share for name, share in shares.items()}
            self._stage.update_status(**metrics)
            self._stage.metrics.log(incarnation=lineage.incarnation, policy_version=policy_version, **metrics)
        prompt = self._order.prompt_at(self._next)
        tokens, starts = self._encoder.encode(prompt)
        begun = self._begun.pop(self._next, None)
        self._queue += self.groups.admit(self._next, prompt, tokens, policy_version, time.time(), begun, starts)
        self._next = next(self._numbers)


def prompt_order(stage: Stage, prompts: Sequence[Prompt]) -> PromptOrder | Curriculum:
    """Orders the training prompts, a prompt per group. Raises StreamCorrupt and PromptsError like `Curriculum`."""
    config = stage.config
    if config.prompts.curriculum_window is None:
        return PromptOrder(prompts, seed=config.seed, shuffle=config.prompts.shuffle)
    # As many groups as may be admitted before the first of them is trained.
    block_groups = (config.effective_max_staleness + 1) * config.training.groups_per_step
    return Curriculum(stage.store, prompts, config.prompts, seed=config.seed, block_groups=block_groups)
