"""Admission: which requests a generator submits, limited by the staleness bound and by its slots.

    missing groups, then new ones ─► under the bound? ─► requests of the group ─► a slot free? ─► engine

A slot holds one request in flight. A group that waits for its last response holds one slot, so the engine stays full
while it waits for a straggler.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.sources import SourceConfig
from configs.stored import DEFAULT_SOURCE
from millrace.chat.encoder import PromptEncoder
from millrace.prompts.blocks import PromptBlock
from millrace.prompts.dataset import PromptOrder
from millrace.prompts.mixture import MixedSource, Mixture
from millrace.rollouts.group_sequence import GroupSet
from millrace.rollouts.groups_in_flight import GroupsInFlight, num_tokens
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.staleness import admission_limit, max_in_flight
from millrace.runtime.stage import Stage
from millrace.types import Prompt, Request, Trajectory
from storage.progress import read_status


class Admission:
    """The groups of one generator, from admission until they are taken for commit."""

    def __init__(self, stage: Stage, order: PromptOrder | Mixture, encoders: Mapping[str, PromptEncoder]) -> None:
        """`encoders` are by source."""
        config = stage.config
        self._stage = stage
        self._order = order
        self._encoders = encoders
        self._group_sizes = {name: source.generation.group_size for name, source in config.by_source().items()}
        self.by_step = config.pipeline.mode == "sync"
        """Whether a part is a generator's whole share of a step, as in sync mode."""
        self.max_staleness = config.effective_max_staleness
        """Staleness bound of the weights in use, policy versions."""
        self._slots = max_in_flight(
            by_step=self.by_step,
            groups_per_step=config.training.groups_per_step,
            groups_per_batch=config.generation.groups_per_batch,
            # With the largest, a step's groups are decoded together in sync mode, whichever sources they are of.
            group_size=max(self._group_sizes.values()),
        )
        self.newest_version = 0
        """The trainer's policy version at the last check for room."""
        self.groups = GroupsInFlight(config.seed)
        # Set by `restart`, once the first weights have arrived.
        self._numbers: Iterator[int]
        self._next: int
        self._begun: dict[int, dict[int, Trajectory]] = {}
        self._queue: deque[Request] = deque()

    def switch_lineage(self, lineage: Lineage, last_group: int) -> None:
        """Switches to weights of another incarnation, of this lineage. Call `restart` next.

        Raises StreamCorrupt if the block of prompts is missing of `last_group`, the highest group that was sampled.
        """
        if isinstance(self._order, Mixture):
            self._order.switch_lineage(lineage, last_group)
            if self._order.newest is not None:
                self._update_status(self._order.newest)

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
        source, prompt = self._prompt(policy_version)
        tokens, starts = self._encoders[source].encode(prompt)
        self._queue += self.groups.admit(
            self._next,
            prompt,
            tokens,
            policy_version,
            time.time(),
            self._begun.pop(self._next, None),
            starts,
            source=source,
            group_size=self._group_sizes[source],
        )
        self._next = next(self._numbers)

    def _prompt(self, policy_version: int) -> tuple[str, Prompt]:
        """The source and the prompt of the next group."""
        if isinstance(self._order, PromptOrder):
            return DEFAULT_SOURCE, self._order.prompt_at(self._next)
        if self._order.decide(self._next, policy_version):
            block, lineage = self._order.newest, self._order.lineage
            assert block is not None
            assert lineage is not None
            self._update_status(block)
            weights = {f"source_weight/{name}": source.weight for name, source in block.sources.items()}
            self._stage.metrics.log(
                incarnation=lineage.incarnation, policy_version=policy_version, **self._rare_shares(block), **weights
            )
        return self._order.prompt_at(self._next)

    def _update_status(self, block: PromptBlock) -> None:
        weights = {name: source.weight for name, source in block.sources.items()}
        self._stage.update_status(**self._rare_shares(block), source_weights=weights)

    def _rare_shares(self, block: PromptBlock) -> dict[str, Any]:
        """Shares of the prompts that are asked less often, of all sources together; {} without a curriculum."""
        if all(source.prompts.curriculum_window is None for source in self._stage.config.by_source().values()):
            return {}
        sources = block.sources.values()
        num_prompts = sum(source.num_prompts for source in sources)
        return {
            "easy_prompt_share": sum(source.num_easy for source in sources) / num_prompts,
            "hard_prompt_share": sum(source.num_hard for source in sources) / num_prompts,
        }


def prompt_order(stage: Stage, prompts: Mapping[str, Sequence[Prompt]]) -> PromptOrder | Mixture:
    """Orders the training prompts of each source. Raises StreamCorrupt and PromptsError like `Mixture`."""
    config = stage.config
    if not config.stores_prompt_blocks:
        return PromptOrder(prompts[DEFAULT_SOURCE], seed=config.seed, shuffle=config.prompts.shuffle)
    sources = {
        name: MixedSource(
            prompts=prompts[name],
            config=source.prompts,
            mixing=config.sources.get(name, SourceConfig()),
            seed=config.seed,
        )
        for name, source in config.by_source().items()
    }
    # As many groups as may be admitted before the first of them is trained.
    block_groups = (config.effective_max_staleness + 1) * config.training.groups_per_step
    return Mixture(stage.store, sources, seed=config.seed, block_groups=block_groups)
