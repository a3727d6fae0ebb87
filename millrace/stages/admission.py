"""Which requests a generator gives its engine: of its own groups, as far as the staleness bound and its places reach.

    missing groups, then new ones ─► under the bound? ─► requests of the group ─► a place free? ─► engine

A place is that of one request in flight. A group that waits for its last response holds one place, so the engine stays
full while a straggler is on its way.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence

from configs.schema import RunConfig
from millrace.chat.encoder import PromptEncoder
from millrace.prompts.curriculum import Curriculum
from millrace.prompts.dataset import PromptOrder
from millrace.rollouts.group_sequence import GroupSet
from millrace.rollouts.groups_in_flight import GroupsInFlight, num_tokens
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.staleness import admission_limit, generator_places
from millrace.runtime.stage import Stage
from millrace.types import Prompt, Request, Trajectory
from millrace.weights.base import AdmissionPolicy
from storage.progress import read_status


class Admission:
    """The groups of one generator, from admission until they are taken for commit."""

    def __init__(self, stage: Stage, order: PromptOrder | Curriculum, encoder: PromptEncoder) -> None:
        config = stage.config
        self._stage = stage
        self._order = order
        self._encoder = encoder
        self.by_step = config.pipeline.mode == "sync"
        """Whether a part is a whole step's share: the barrier between generation and the other stages."""
        self._policy = as_configured(config)
        self.newest_version = 0
        """The newest policy version that the trainer was known to have, when room was last asked for."""
        self.groups = GroupsInFlight(config.generation.group_size, config.seed)
        # Set by `restart`, once the first weights are here.
        self._numbers: Iterator[int]
        self._next: int
        self._begun: dict[int, dict[int, Trajectory]] = {}
        self._queue: deque[Request] = deque()

    def switch_lineage(self, lineage: Lineage, last_group: int) -> None:
        """Continues under weights of another incarnation, of this lineage; `restart` comes next.

        Raises StreamCorrupt if the curriculum lacks `last_group`, the highest that was sampled.
        """
        if isinstance(self._order, Curriculum):
            self._order.switch_lineage(lineage, last_group)

    def apply(self, policy: AdmissionPolicy | None) -> None:
        """Admits by this policy from now on, that of the weights in use; None changes nothing."""
        self._policy = policy or self._policy

    def restart(self, committed: GroupSet, begun: Sequence[Trajectory] = ()) -> tuple[int, int]:
        """Goes on behind the committed groups, continuing the responses that had `begun`.

        Nothing may be in flight. What belongs to a committed group is ignored. Returns how many are continued, and how
        many tokens they have.
        """
        self._queue.clear()
        self._numbers = committed.lacking()
        self._next = next(self._numbers)
        self._begun = {}
        continued = [one for one in begun if one.request.group_id not in committed]
        for one in continued:
            self._begun.setdefault(one.request.group_id, {})[one.request.sample_index] = one
        return len(continued), num_tokens(continued)

    @property
    def waiting(self) -> int:
        """Requests of admitted groups that have no place yet."""
        return len(self._queue)

    def has_room(self, policy_version: int) -> bool:
        """Whether the next group may be admitted under this version."""
        return self._next < self._limit(policy_version)

    def requests(self, policy_version: int, in_flight: int) -> list[Request]:
        """The requests to submit now, while `in_flight` are."""
        free = self._policy.places - in_flight
        if len(self._queue) < free:
            limit = self._limit(policy_version)
            while len(self._queue) < free and self._next < limit:
                self._admit(policy_version)
        return [self._queue.popleft() for _ in range(min(free, len(self._queue)))]

    def free_for_want_of_room(self, in_flight: int) -> float:
        """The share of the places that `requests` has just left free, beside `in_flight`: the bound admits no group."""
        return max(0, self._policy.places - in_flight) / self._policy.places

    def interrupted(self, from_engine: Sequence[Trajectory]) -> list[Trajectory]:
        """Forgets all groups in flight; returns what their responses have, with what waits for its group's turn."""
        waiting = [one for group in self._begun.values() for one in group.values()]
        self._queue.clear()
        self._begun = {}
        return [*self.groups.interrupted(from_engine), *waiting]

    def _limit(self, policy_version: int) -> int:
        trainer = read_status(self._stage.store, "train", 0)
        self.newest_version = trainer.get("policy_version", 0)
        return admission_limit(
            policy_version,
            max_staleness=self._policy.max_staleness,
            groups_per_step=self._stage.config.training.groups_per_step,
            groups_dropped=trainer.get("groups_dropped", 0),
        )

    def _admit(self, policy_version: int) -> None:
        if isinstance(self._order, Curriculum) and self._order.decide(self._next, policy_version):
            self._show(self._order, policy_version)
        prompt = self._order.prompt_at(self._next)
        tokens, starts = self._encoder.encode(prompt)
        begun = self._begun.pop(self._next, None)
        self._queue += self.groups.admit(self._next, prompt, tokens, policy_version, time.time(), begun, starts)
        self._next = next(self._numbers)

    def _show(self, curriculum: Curriculum, policy_version: int) -> None:
        block, lineage = curriculum.newest, curriculum.lineage
        assert block is not None
        assert lineage is not None
        easy, hard = block.num_easy / block.num_prompts, block.num_hard / block.num_prompts
        self._stage.update_status(easy_prompt_share=easy, hard_prompt_share=hard)
        self._stage.metrics.log(
            incarnation=lineage.incarnation,
            policy_version=policy_version,
            easy_prompt_share=easy,
            hard_prompt_share=hard,
        )


def as_configured(config: RunConfig) -> AdmissionPolicy:
    """The policy of a version whose weights bring none."""
    places = generator_places(
        by_step=config.pipeline.mode == "sync",
        groups_per_step=config.training.groups_per_step,
        groups_per_batch=config.generation.groups_per_batch,
        group_size=config.generation.group_size,
    )
    return AdmissionPolicy(max_staleness=config.effective_max_staleness, places=places)


def prompt_order(stage: Stage, prompts: Sequence[Prompt]) -> PromptOrder | Curriculum:
    """Which of the training prompts each group has. Raises StreamCorrupt and PromptsError, as `Curriculum` does."""
    config = stage.config
    if config.prompts.curriculum_window is None:
        return PromptOrder(prompts, seed=config.seed, shuffle=config.prompts.shuffle)
    # As many groups as may be admitted before the first of them is trained.
    block_groups = (config.effective_max_staleness + 1) * config.training.groups_per_step
    return Curriculum(stage.store, prompts, config.prompts, seed=config.seed, block_groups=block_groups)
