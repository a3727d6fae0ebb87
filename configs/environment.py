"""What the policy talks to between its turns."""

from configs.section import Count, Section, Text


class EnvironmentConfig(Section):
    """What the policy talks to between its turns: a tool, a game, a simulated user."""

    name: Text | None = None
    """`calculator`, or the import path `package.module:Class` of an environment of your own; null: there is none, and
    a response is one turn."""
    max_turns: Count = 4
    """Most turns of the policy in a rollout with an environment; `generation.max_new_tokens` is the length of them all,
    what the environment writes included."""
