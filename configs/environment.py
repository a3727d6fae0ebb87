"""What answers the policy between its turns."""

from configs.section import Count, Section, Text


class EnvironmentConfig(Section):
    """What answers the policy between its turns: a tool, a game, a simulated user."""

    name: Text | None = None
    """`calculator` (text), `calculator_tool` (chat, with tool calls), or the import path `package.module:Class` of your
    own environment; null: none, each response is one turn."""
    max_turns: Count = 4
    """Maximum number of policy turns per response; `generation.max_new_tokens` limits their total length, tokens
    written by the environment included."""
