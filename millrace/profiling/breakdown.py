"""The time of a recorded process by category. Pure functions of trace events; does not import torch.

    CPU    main thread   ▕ op ▏▕ op   ▕ inner op ▏  ▏        ▕ op ▏    each moment belongs to the innermost operator
    CUDA   device             ▕ kernel ▏▕ kernel ▏           ▕ kern    … or to the kernel, and so to the op that
                                                                       launched it
           stage                                      ▕ waits ▏        no operator or kernel: waiting, or else Python

Categories add up to the window that was recorded.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

from millrace.profiling.trace import WAITING, Event, Trace

GEMM, ATTENTION, OTHER, OPTIMIZER, COPIES = "GEMM", "attention", "elementwise and other", "optimizer", "copies"
PYTHON = "Python"
CATEGORIES = (GEMM, ATTENTION, OTHER, OPTIMIZER, COPIES, PYTHON, WAITING)
_PATTERNS = {
    OPTIMIZER: re.compile(r"^Optimizer\.|_fused_adam|multi_tensor_apply"),
    ATTENTION: re.compile(r"attention|attn|flash_(fwd|bwd)", re.IGNORECASE),
    GEMM: re.compile(
        r"^aten::(mm|bmm|addmm|baddbmm|mv|addmv|linear|matmul|_grouped_mm)$|mkl.*linear|gemm|nvjet|cutlass"
    ),
    COPIES: re.compile(r"^aten::(copy_|clone|contiguous|to|_to_copy|cat)$|^Mem(cpy|set)"),
}
_WHOLE = (OPTIMIZER, ATTENTION)
"""Operators within one of these belong to it, whatever they are."""
_PRODUCTS = {
    "aten::mm": (0, -1),
    "aten::bmm": (0, -1),
    "aten::addmm": (1, -1),
    "aten::baddbmm": (1, -1),
    "mkldnn::_linear_pointwise": (0, 0),
}
"""Matrix products: the position of the first factor among their inputs, and the second one's axis of the output."""
_FUSED = re.compile(r"^aten::_scaled_dot_product_(flash|efficient|cudnn)_attention\w*$")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_OPERATOR, _ANNOTATION = "cpu_op", "user_annotation"
Segment = tuple[float, float, str]
"""Start and end in microseconds, and the category."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the time of a process went."""

    device: str
    """`cuda` if the process ran kernels: then operators count by their kernels' time. Otherwise `cpu`."""
    seconds: Mapping[str, float]
    """By category; together the time that was recorded."""
    flops: Mapping[str, float]
    """Floating-point operations of matrix products and attention, where the trace has their shapes."""


def break_down(trace: Trace, start: float, end: float) -> Breakdown:
    """The time of a process between `start` and `end`, Unix microseconds."""
    spans = [event for event in trace.events if event.get("ph") == "X"]
    operators = [
        (event, category)
        for thread in _by_thread(event for event in spans if event["cat"] in (_OPERATOR, _ANNOTATION))
        for event, category in _categorised(thread)
    ]
    kernels = [event for event in spans if event["cat"] in _KERNELS]
    if kernels:
        segments = list(_of_device(kernels, operators))
    else:
        segments = list(_of_thread([item for item in operators if item[0]["tid"] == trace.thread]))
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    gaps = []
    position = start
    for began, finished, owner in segments:
        begin, finish = max(began, start), min(finished, end)
        if finish <= begin:
            continue
        seconds[owner] += (finish - begin) / 1e6
        gaps.append((position, begin))
        position = finish
    gaps.append((position, end))
    waits = sorted((event["ts"], event["ts"] + event["dur"]) for event in spans if event["cat"] == WAITING)
    seconds[WAITING] = _overlap(gaps, waits) / 1e6
    seconds[PYTHON] = sum(max(0.0, finish - begin) for begin, finish in gaps) / 1e6 - seconds[WAITING]
    flops: defaultdict[str, float] = defaultdict(float)
    for event, category in operators:
        if start <= event["ts"] < end:
            flops[category or OTHER] += operations(event["name"], event.get("args", {}))
    return Breakdown(device="cuda" if kernels else "cpu", seconds=seconds, flops=flops)


def categorise(name: str, within: str | None = None) -> str | None:
    """The category of an operator, a kernel or an annotation inside something of the category `within`."""
    if within in _WHOLE:
        return within
    return next((category for category, pattern in _PATTERNS.items() if pattern.search(name)), within)


def operations(name: str, arguments: Mapping[str, Any]) -> float:
    """Floating-point operations of an operator, from its shapes in the trace; 0 for those that are not counted.

    Counted are matrix products and fused attention, of which a causal one computes half.
    """
    dims: list[list[int]] = arguments.get("Input Dims", [])
    if name in _PRODUCTS and dims:
        first, output_axis = _PRODUCTS[name]
        return 2.0 * prod(dims[first]) * dims[first + 1][output_axis]
    if not dims or not _FUSED.match(name):
        return 0.0
    backward = "backward" in name
    query, key, value = dims[1:4] if backward else dims[:3]
    forward = 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    causal = "flash" in name and "True" in arguments.get("Concrete Inputs", ())
    # Backward: five products instead of two.
    return forward * (2.5 if backward else 1.0) * (0.5 if causal else 1.0)


def _by_thread(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Events of each thread, outer ones before the inner ones."""
    ordered = sorted(events, key=lambda event: (str(event["pid"]), event["tid"], event["ts"], -event["dur"]))
    for _, thread in groupby(ordered, key=lambda event: (str(event["pid"]), event["tid"])):
        yield list(thread)


def _categorised(events: Sequence[Event]) -> Iterator[tuple[Event, str | None]]:
    """The category of each event of a thread, given those around it; None for an annotation without one."""
    around: list[tuple[float, str | None]] = []
    for event in events:
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        category = categorise(event["name"], around[-1][1] if around else None)
        if category is None and event["cat"] == _OPERATOR:
            category = OTHER
        around.append((event["ts"] + event["dur"], category))
        yield event, category


def _of_thread(operators: Sequence[tuple[Event, str | None]]) -> Iterator[Segment]:
    """Each moment of a thread in which an operator runs, with the category of the innermost one."""
    around: list[tuple[float, str]] = []
    position = 0.0
    for event, category in operators:
        if event["cat"] != _OPERATOR:
            continue
        assert category is not None
        start = event["ts"]
        while around and around[-1][0] <= start:
            finish, outer = around.pop()
            yield position, finish, outer
            position = max(position, finish)
        if around:
            yield position, start, around[-1][1]
        position = max(position, start)
        around.append((start + event["dur"], category))
    while around:
        finish, outer = around.pop()
        yield position, finish, outer
        position = max(position, finish)


def _of_device(kernels: Iterable[Event], operators: Iterable[tuple[Event, str | None]]) -> Iterator[Segment]:
    """Each moment in which a kernel runs; of two at once, the earlier counts."""
    launched = {event["args"].get("External id"): category for event, category in operators if "args" in event}
    position = 0.0
    for event in sorted(kernels, key=lambda event: event["ts"]):
        own = categorise(event["name"])
        operator = launched.get(event["args"]["External id"]) if "External id" in event.get("args", {}) else None
        category = own if own == COPIES and operator not in _WHOLE else (operator or own or OTHER)
        finish = event["ts"] + event["dur"]
        yield max(position, event["ts"]), finish, category
        position = max(position, finish)


def _overlap(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Total length of the intersection of two sorted sequences of intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        total += max(0.0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total
