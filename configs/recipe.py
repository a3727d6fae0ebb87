"""How the tiny start model is made: its shape, and its warm start, which depends on the prompts."""

from dataclasses import dataclass, replace

from configs.schema import RunConfig

THREADS = 1
"""CPU threads of the warm start. Its operations are so small that two threads mostly wait for each other where other
processes are at work: on two cores at a load of 14, 40 steps took 25 s with one thread, and over 300 s with two."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Shape and warm start of a tiny Llama. The defaults suit the built-in sums."""

    hidden_size: int = 64
    num_layers: int = 3
    num_heads: int = 4
    intermediate_size: int = 256
    error_rate: float = 0.65
    """Fraction of arithmetic demonstrations with a wrong carry, and of the carries in a demonstrated chain of sums;
    demonstrations of other prompts are all right."""
    target_imitation_rate: float = 0.98
    """The warm start ends once this fraction of greedy answers could be a demonstration …"""
    max_accuracy: float = 0.38
    """… and at most this fraction is right, so that rewards have work left."""
    max_steps: int = 2000
    """Maximum supervised optimizer steps."""
    batch_size: int = 128
    """Prompts per step. Sources share a step equally; one that is learned counts as a quarter of a source."""
    learning_rate: float = 3e-3


_ARITHMETIC = Recipe()
_IN_ENVIRONMENT = Recipe(
    num_layers=2, error_rate=0.7, target_imitation_rate=0.85, max_accuracy=0.45, max_steps=1000, learning_rate=4e-3
)
_CHAINS = Recipe(
    num_layers=2,
    error_rate=0.6,
    target_imitation_rate=0.8,
    max_accuracy=1.0,
    max_steps=800,
    batch_size=32,
    learning_rate=4e-3,
)
# Answers in the right format, some of them right.
_REASONING_GYM = Recipe(target_imitation_rate=0.08, max_accuracy=1.0, max_steps=100, batch_size=64)
# A fifth of the training answers memorized. Also for sums of one digit, whose carry can't be wrong.
_OTHER = Recipe(target_imitation_rate=0.2, max_accuracy=1.0, max_steps=150, batch_size=32)


def choose_recipe(config: RunConfig) -> Recipe:
    """Returns the recipe for the start model of a run without `model.path`.

    Of a mixture it is that of the source with the longest warm start.
    """
    return max(map(_choose_for_source, config.by_source().values()), key=lambda recipe: recipe.max_steps)


def _choose_for_source(config: RunConfig) -> Recipe:
    source = config.prompts.source
    if config.environment.name is not None:
        recipe = _IN_ENVIRONMENT
    elif source == "arithmetic" and config.prompts.digits > 1:
        recipe = _ARITHMETIC
    elif source == "chains":
        recipe = _CHAINS
    elif source.startswith("reasoning_gym:"):
        recipe = _REASONING_GYM
    else:
        recipe = _OTHER
    if config.generation.engine == "vllm":
        # Heads of 32 features are the smallest that vLLM's attention on a CPU supports.
        recipe = replace(recipe, hidden_size=96, num_heads=3, intermediate_size=384)
    limit = config.model.warm_start_steps
    return recipe if limit is None else replace(recipe, max_steps=limit)
