"""The tables of `millrace profile`: where the time of each recorded process went, and how fast its products were."""

from collections.abc import Iterator

from flows.display.tables import TitledTable, echo, for_terminal
from millrace.errors import InputError
from millrace.profiling.breakdown import ATTENTION, GEMM, Breakdown, break_down
from millrace.profiling.recorder import matmul_flops_per_second
from millrace.profiling.trace import ProfileRequest, Trace, read_traces, write_merged
from storage.stores.base import Store

_HEADER = ("", "s/step", "share", "GFLOP/s", "of peak")


def report(store: Store, request: ProfileRequest) -> None:
    """Prints a table per process, and stores all traces in one file. Call it when the machine is idle.

    Raises InputError if the run ended before a step was recorded.
    """
    traces = read_traces(store)
    trainer = next((trace for trace in traces if trace.process == "train-0"), None)
    if trainer is None or trainer.num_steps < 1:
        first = request.after_version + 1
        expected = f"a campaign that makes step {first}, the first one recorded; this one ended before"
        raise InputError(request.num_steps, key="--steps", expected=expected)
    for trace in reversed(traces):
        echo(*for_terminal(_table(trace, trainer)))
    if trainer.num_steps < request.num_steps:
        echo(f"The run ended early: these are {trainer.num_steps} of {request.num_steps} steps.")
    echo(f"traces, for https://ui.perfetto.dev: {store.url}/{write_merged(store, traces)}")


def _table(trace: Trace, trainer: Trace) -> TitledTable:
    """Where the time of `trace` went while the trainer made its steps."""
    start, end = max(trace.start, trainer.start), min(trace.end, trainer.end)
    breakdown = break_down(trace, start, max(start, end))
    window = sum(breakdown.seconds.values())
    step_seconds = (trainer.end - trainer.start) / 1e6 / trainer.num_steps
    peak = matmul_flops_per_second(trace.dtype, breakdown.device, trace.threads)
    where = "GPU" if breakdown.device == "cuda" else f"{trace.threads} thread{'s' if trace.threads > 1 else ''}"
    rows = []
    for category, seconds in breakdown.seconds.items():
        share = seconds / window if window else 0.0
        rows.append((category, f"{share * step_seconds:.4f}", f"{share:.1%}", *_rate(breakdown, category, peak)))
    title = f"{trace.process}: {window:.2f} s of {trainer.num_steps} steps of {step_seconds:.3f} s"
    lines = [f"peak: {peak / 1e9:,.0f} GFLOP/s, a large {trace.dtype} matrix product on the idle machine, {where}"]
    return TitledTable(title=title, header=_HEADER, rows=rows, numbers=4, lines=lines)


def _rate(breakdown: Breakdown, category: str, peak: float) -> Iterator[str]:
    """GFLOP/s while operators of the category ran, and their share of the peak; empty for others."""
    flops, seconds = breakdown.flops.get(category, 0.0), breakdown.seconds[category]
    if category not in (GEMM, ATTENTION) or not flops or not seconds:
        yield from ("", "")
        return
    yield f"{flops / seconds / 1e9:,.1f}"
    yield f"{flops / seconds / peak:.0%}"
