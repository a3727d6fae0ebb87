"""Over how many ranks the trainer of each model divides its layers by default."""

from millrace.planning.costs.known_models import model_named

MODELS = {
    "4b": (model_named("qwen3-4b"), 2),
    "8b": (model_named("llama-8b"), 1),
    "70b": (model_named("llama-70b"), 8),
    "405b": (model_named("llama-405b"), 8),
}
"""(shape, tensor ranks of its trainer) by name."""
