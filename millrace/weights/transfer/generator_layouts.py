"""What each worker of a generator needs of the policy: all of it, or its part by vLLM's tensor parallelism.

    q, k, v, gate, up   rows: a share of the heads or features; a head of k and v is on several workers if there are
                        more workers than such heads
    o, down             columns: a share of the heads or features
    embeddings, output  rows: a share of the vocabulary, padded to a multiple of 64
    norms               all

vLLM fuses q, k, v and gate, up on each worker. That changes where a box goes in the worker, not what it needs.
vLLM 0.32: `vllm/model_executor/layers/linear.py`, `vocab_parallel_embedding.py`.
"""

import re
from collections.abc import Iterable
from functools import cache

from millrace.errors import InputError
from millrace.weights.transfer.layout import Division, Layout, Region, TensorSpec, volume

_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
_QUERIES = re.compile(r"\.q_proj\.(weight|bias)$")
_KEYS_VALUES = re.compile(r"\.[kv]_proj\.(weight|bias)$")
_COLUMNS = re.compile(r"\.(gate|up)_proj\.(weight|bias)$")
_ROWS = re.compile(r"\.(o|down)_proj\.weight$")
_REPLICATED = re.compile(r"norm\.(weight|bias)$|\.(o|down)_proj\.bias$")
_VOCABULARY_PADDING = 64


def whole_layout(tensors: Iterable[TensorSpec]) -> Layout:
    """A generator with one worker, which needs everything."""
    tensors = tuple(tensors)
    return Layout(tensors, tuple((spec.whole if volume(spec.whole) else None,) for spec in tensors), 1)


def vllm_layout(tensors: Iterable[TensorSpec], *, tensor: int, num_heads: int, num_kv_heads: int) -> Layout:
    """A vLLM engine with `tensor` workers and a model like Llama.

    Raises InputError if the heads, features or vocabulary can't be divided by `tensor`, and for a tensor without a
    rule, such as a mixture's experts.
    """
    tensors = tuple(tensors)
    if tensor == 1:
        return whole_layout(tensors)
    if num_heads % tensor or max(num_kv_heads, tensor) % min(num_kv_heads, tensor):
        raise InputError(
            f"{num_heads} heads and {num_kv_heads} key-value heads can't be divided among {tensor} workers of vLLM"
        )

    @cache
    def divided(rule: str, shape: tuple[int, ...]) -> Division:
        return tuple(_needed(rule, shape, worker, tensor, num_kv_heads) for worker in range(tensor))

    return Layout(tensors, tuple(divided(_rule(spec, tensor), spec.shape) for spec in tensors), tensor)


def _rule(spec: TensorSpec, tensor: int) -> str:
    rules = {
        "vocabulary": _VOCABULARY,
        "key-value heads": _KEYS_VALUES,
        "rows": re.compile(f"{_QUERIES.pattern}|{_COLUMNS.pattern}"),
        "columns": _ROWS,
        "replicated": _REPLICATED,
    }
    rule = next((name for name, pattern in rules.items() if pattern.search(spec.name)), None)
    if rule is None:
        raise InputError(f"{spec.name} has no rule for a division among {tensor} workers of vLLM")
    extent = {
        "vocabulary": _padded(spec.shape[0]),
        "rows": spec.shape[0],
        "columns": spec.shape[-1],
    }.get(rule, 0)
    if extent % tensor:
        raise InputError(f"{spec.name} {list(spec.shape)} can't be divided among {tensor} workers of vLLM")
    return rule


def _needed(rule: str, shape: tuple[int, ...], worker: int, tensor: int, num_kv_heads: int) -> Region | None:
    dim, begin, end = 0, 0, shape[0]
    if rule == "vocabulary":
        share = _padded(shape[0]) // tensor
        begin, end = min(worker * share, end), min((worker + 1) * share, end)
    elif rule == "key-value heads":
        parts = min(num_kv_heads, tensor)
        share, part = shape[0] // parts, worker * parts // tensor
        begin, end = part * share, (part + 1) * share
    elif rule == "rows":
        share = shape[0] // tensor
        begin, end = worker * share, (worker + 1) * share
    elif rule == "columns":
        dim, share = 1, shape[1] // tensor
        begin, end = worker * share, (worker + 1) * share
    region = tuple((0, extent) for extent in shape)
    region = (*region[:dim], (begin, end), *region[dim + 1 :])
    return region if volume(region) else None


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
