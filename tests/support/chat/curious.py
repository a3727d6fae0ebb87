"""A conversation in which the user asks twice more, whatever the policy says."""

from millrace.chat.base import Turn
from millrace.generation.environments.base import ChatEnvironment, Observation
from millrace.types import Prompt


class Curious(ChatEnvironment):
    """A random model hardly ever ends a turn, so a few letters end it too."""

    stop = ("a", "e", "i", "o", "u")

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.asked = 0

    def step(self, turn: Turn) -> Observation:
        self.asked += 1
        return Observation(done=self.asked > 2, messages=({"role": "user", "content": f"and {self.asked}?"},))
