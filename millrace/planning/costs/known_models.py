"""Sizes of published models by a short name, from their config.json."""

from millrace.errors import InputError
from millrace.planning.costs.model_shape import ModelShape


def _llama(name: str, layers: int, hidden: int, intermediate: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=8,
        vocabulary=128_256,
    )


def _qwen2(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, *, tied: bool = False
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        # 1.5B and 3B have 151,936; larger ones pad to 152,064.
        vocabulary=151_936 if tied else 152_064,
        tied=tied,
        qkv_bias=True,
    )


def _qwen3(
    name: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    *,
    kv_heads: int = 8,
    tied: bool = False,
    experts: int = 0,
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=151_936,
        tied=tied,
        head_norms=True,
        experts=experts,
        experts_per_token=8 if experts else 0,
    )


_TABLE = (
    _llama("llama-8b", 32, 4096, 14_336, 32),
    _llama("llama-70b", 80, 8192, 28_672, 64),
    _llama("llama-405b", 126, 16_384, 53_248, 128),
    _qwen2("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, tied=True),
    _qwen2("qwen2.5-3b", 36, 2048, 11_008, 16, 2, tied=True),
    _qwen2("qwen2.5-7b", 28, 3584, 18_944, 28, 4),
    _qwen2("qwen2.5-14b", 48, 5120, 13_824, 40, 8),
    _qwen2("qwen2.5-32b", 64, 5120, 27_648, 40, 8),
    _qwen2("qwen2.5-72b", 80, 8192, 29_568, 64, 8),
    _qwen3("qwen3-0.6b", 28, 1024, 3072, 16, tied=True),
    _qwen3("qwen3-1.7b", 28, 2048, 6144, 16, tied=True),
    _qwen3("qwen3-4b", 36, 2560, 9728, 32, tied=True),
    _qwen3("qwen3-8b", 36, 4096, 12_288, 32),
    _qwen3("qwen3-14b", 40, 5120, 17_408, 40),
    _qwen3("qwen3-32b", 64, 5120, 25_600, 64),
    _qwen3("qwen3-30b-a3b", 48, 2048, 768, 32, kv_heads=4, experts=128),
    _qwen3("qwen3-235b-a22b", 94, 4096, 1536, 64, kv_heads=4, experts=128),
)
MODELS = {one.name: one for one in _TABLE}
"""By name: Llama 3.1, Qwen 2.5, Qwen 3."""


def model_named(name: str) -> ModelShape:
    """Raises InputError, with the names that are known, for another."""
    if name not in MODELS:
        raise InputError(
            f'the sizes of "{name}" are not known; expected a model\'s folder or one of {", ".join(MODELS)}'
        )
    return MODELS[name]
