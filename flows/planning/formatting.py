"""A plan as tables: for a terminal, and as Markdown."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from flows.display.terminal import new_table, plain
from millrace.planning.candidate import Candidate
from millrace.planning.hardware import GIB
from millrace.planning.plan import Plan

_DAY = 86400.0
_COLUMNS = ("trainer", "generators", "mode", "places", "s/step", "tokens/s", "stale")


def as_tables(plan: Plan) -> Iterator[RenderableType]:
    """For a terminal, piece by piece."""
    yield plain(headline(plan), "bold")
    if plan.is_what_if:
        yield _side_by_side(plan)
    else:
        yield _figures(plan)
    yield from _settings(plan)
    if not plan.is_what_if:
        yield from _runners_up(plan)
    yield _assumptions(plan)


def as_markdown(plan: Plan, chart: str | None) -> str:
    """For the Prefect UI."""
    if plan.is_what_if:
        before, after = plan.entries
        columns = zip(figures(before, plan), figures(after, plan), strict=True)
        table = _markdown(("figure", "as it is", "changed"), [(name, old, new) for (name, old), (_, new) in columns])
    else:
        table = _markdown(("figure", "value"), figures(plan.chosen, plan))
    runners_up = list(enumerate(plan.entries[1:], 1))
    lines = [(str(number), *_line(entry)) for number, entry in runners_up]
    # The UI cuts wide cells off, so the reasons stand below the table.
    reasons = "\n".join(f"{number}. {entry.reason}" for number, entry in runners_up)
    others = [] if plan.is_what_if else ["## Runners-up", _markdown(("", *_COLUMNS), lines), reasons]
    changed = "\n".join(f"    {line}" for line in settings(plan, plan.chosen))
    assumed = [(one.what, one.value, one.source) for one in plan.assumptions]
    return "\n\n".join(
        [
            f"# {headline(plan)}",
            table,
            *([chart] if chart else []),
            "## Settings",
            changed,
            *others,
            "## Assumptions",
            _markdown(("what", "value", "source"), assumed),
            "",
        ]
    )


def headline(plan: Plan) -> str:
    """What was planned, in a line."""
    if plan.is_what_if:
        return f"{plan.base.name}: {plan.machine}, as it is and changed"
    gpus = "" if plan.gpus is None else f", {plan.gpus} GPUs"
    return (
        f"{plan.base.name}: {plan.machine}{gpus}: the {plan.goal} of {plan.num_layouts:,} layouts; "
        f"{len(plan.simulated)} configs simulated"
    )


def figures(entry: Candidate, plan: Plan) -> list[tuple[str, str]]:
    """Everything of one entry, as (name, value)."""
    config, outcome = entry.config, entry.outcome
    found = [
        *([] if entry.gpus is None else [("trainer GPUs", entry.trainer)]),
        ("generators" if entry.gpus is None else "generator GPUs", entry.generators),
        ("mode", entry.mode),
        ("places", f"{_places(entry)}: generators × groups × responses in flight"),
        ("batch", f"{config.training.groups_per_step} × {config.generation.group_size} responses per step"),
    ]
    if outcome is None:
        return [*found, *_empty(), *_memory(entry), *_bill(entry, plan, None), ("result", entry.reason)]
    idle = ", ".join(f"{stage} {share:.0%}" for stage, share in outcome.idle.items())
    staleness = f"mean {outcome.staleness_mean:.2f}, max {outcome.staleness_max} of {config.effective_max_staleness}"
    return [
        *found,
        ("step", f"{outcome.step_seconds:.4g} s"),
        ("speed", f"{outcome.tokens_per_second:,.0f} response tokens trained per second"),
        ("staleness", staleness),
        (
            "dropped, masked",
            f"{outcome.dropped_share:.1%} of the rollouts, {outcome.masked_token_share:.1%} of the tokens",
        ),
        ("idle", idle),
        ("weight sync", _weight_sync(entry)),
        *_memory(entry),
        *_bill(entry, plan, outcome.step_seconds),
        ("result", entry.bottleneck or ""),
    ]


def settings(plan: Plan, entry: Candidate) -> list[str]:
    """What an entry's config changes in the given one, each `key=value`."""
    return [f"{key}={_scalar(value)}" for key, value in plan.changes(entry).items()]


def table_rows(plan: Plan) -> list[dict[str, str]]:
    """Every config that was simulated, as rows of a table."""
    return [
        dict(zip(_COLUMNS, _line(entry), strict=True)) | {"bottleneck": entry.bottleneck or ""}
        for entry in plan.simulated
    ]


def _figures(plan: Plan) -> Table:
    made = _untitled("figure", "value")
    for name, value in figures(plan.chosen, plan):
        made.add_row(name, plain(value))
    return made


def _side_by_side(plan: Plan) -> Table:
    before, after = plan.entries
    made = _untitled("figure", "as it is", "changed")
    for (name, old), (_, new) in zip(figures(before, plan), figures(after, plan), strict=True):
        made.add_row(name, plain(old), plain(new, "" if old == new else "bold"))
    return made


def _runners_up(plan: Plan) -> Iterator[RenderableType]:
    """The figures in a table, and the reasons below it, where they have room."""
    made = new_table("runners-up", left=("", *_COLUMNS[:3]), right=_COLUMNS[3:])
    for number, entry in enumerate(plan.entries[1:], 1):
        made.add_row(str(number), *map(plain, _line(entry)))
    yield made
    reasons = Table.grid(padding=(0, 1))
    for number, entry in enumerate(plan.entries[1:], 1):
        reasons.add_row(f"{number:2}", plain(entry.reason))
    yield reasons
    yield ""


def _settings(plan: Plan) -> Iterator[RenderableType]:
    """What the plan changes in the config; no cell, so that it can be copied."""
    yield plain("settings", "italic")
    for line in settings(plan, plan.chosen):
        yield plain(f"  {line}")
    yield ""


def _untitled(*columns: str) -> Table:
    made = new_table("", left=columns, right=())
    made.title = None
    return made


def _assumptions(plan: Plan) -> Table:
    made = new_table("assumptions", left=("what", "value", "source"), right=())
    for one in plan.assumptions:
        made.add_row(plain(one.what), plain(one.value), plain(one.source))
    return made


def _line(entry: Candidate) -> tuple[str, ...]:
    outcome = entry.outcome
    measured = ("–", "–", "–")
    if outcome is not None:
        staleness = f"{outcome.staleness_mean:.2f}"
        measured = (f"{outcome.step_seconds:.4g}", f"{outcome.tokens_per_second:,.0f}", staleness)
    return (entry.trainer, entry.generators, entry.mode, _places(entry), *measured)


def _places(entry: Candidate) -> str:
    generation = entry.config.generation
    return f"{generation.replicas} × {generation.groups_per_batch} × {generation.group_size}"


def _memory(entry: Candidate) -> list[tuple[str, str]]:
    if entry.memory is None:
        return []
    memory = entry.memory
    needs = f"trainer {memory.trainer / GIB:.0f}, generator {memory.generator / GIB:.0f}"
    return [("memory", f"{needs} of {memory.capacity / GIB:.0f} GiB per GPU")]


def _bill(entry: Candidate, plan: Plan, step_seconds: float | None) -> list[tuple[str, str]]:
    if entry.gpus is None:
        return []
    if step_seconds is None:
        return [(name, "–") for name in ("GPU-hours", "cost", "storage", "failures")]
    million = entry.gpu_hours_per_million_tokens
    hours = f"{entry.gpus * step_seconds / 3600:.3g} per step, {million:.3g} per million tokens trained"
    per_step, per_day = plan.dollars(entry, step_seconds), plan.dollars(entry, _DAY)
    dollars = "give --price" if per_step is None else f"${per_step:,.2f} per step, ${per_day:,.0f} a day"
    stored = "–"
    if entry.upkeep is not None:
        gigabytes = entry.upkeep.bytes_per_day / 1e9, entry.upkeep.checkpoint_bytes / 1e9
        stored = "{:,.0f} GB a day, checkpoints of {:,.0f} GB".format(*gigabytes)
    return [
        ("GPU-hours", hours),
        ("cost", dollars),
        ("storage", f"{stored}, before anything is deleted"),
        ("failures", _failures(entry)),
    ]


def _failures(entry: Candidate) -> str:
    if entry.upkeep is None:
        return "–"
    often = f"a GPU of the trainer every {entry.upkeep.mtbf / 3600:,.0f} hours, by assumption"
    every = entry.config.training.checkpoint_every
    return f"{often}; {entry.upkeep.share_lost:.1%} of the time lost, at a checkpoint every {every} steps"


def _weight_sync(entry: Candidate) -> str:
    if entry.costs is None:
        return "–"
    costs, transport = entry.costs, entry.config.weights.transport
    return (
        f"{costs.push:.3g} s by {transport} while both go on; the trainer stands still for {costs.handover:.2g} s, a "
        f"generator for {costs.pause:.2g} s"
    )


def _empty() -> list[tuple[str, str]]:
    return [(name, "–") for name in ("step", "speed", "staleness", "dropped, masked", "idle", "weight sync")]


def _scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)
