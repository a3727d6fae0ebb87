"""The report: one file, first for people, then the same as JSON, so that a person can send it and a program read it.

benchmarks/results/gpu-check*.txt     earlier reports: by them a part has been run before, or never
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.checking import Result, summary

EARLIER = Path(__file__).parents[1] / "results"
"""Where reports that people sent are kept, as gpu-check*.txt."""
_JSON_FOLLOWS = "---- the same as JSON ----"
NEVER = "never run on a GPU before this"


def passed_before(folder: Path) -> dict[str, str]:
    """By a part's name, on what and when it last passed, from the reports in `folder`."""
    reports = sorted((read(file.read_text()) for file in folder.glob("gpu-check*.txt")), key=lambda one: one["time"])
    return {
        result["name"]: f"passed before on {report['gpus'][0]}, {report['time'][:10]}"
        for report in reports
        for result in report["results"]
        if result["outcome"] == "passed"
    }


def write(machine: Mapping[str, Any], results: Sequence[Result], before: Mapping[str, str]) -> str:
    """The report's text. `machine` is plain JSON with `time`, `commit`, `gpus` and `doctor`."""
    values = {**machine, "results": [one.to_json() | {"before": before.get(one.name, NEVER)} for one in results]}
    return f"{_for_people(machine, results, before)}\n{_JSON_FOLLOWS}\n{json.dumps(values, indent=1)}\n"


def read(text: str) -> dict[str, Any]:
    """The JSON of a report. Raises ValueError if `text` is none."""
    _, mark, values = text.partition(f"\n{_JSON_FOLLOWS}\n")
    if not mark:
        raise ValueError("not a report of gpu-check: its JSON is missing")
    found: dict[str, Any] = json.loads(values)
    return found


def _for_people(machine: Mapping[str, Any], results: Sequence[Result], before: Mapping[str, str]) -> str:
    never = [one for one in results if one.name not in before]
    ran = [one for one in never if one.outcome != "left out"]
    lines = [
        "Millrace on GPUs: the report of `make gpu-check`",
        "",
        f"{machine['time']}, commit {machine['commit']}",
        f"{len(machine['gpus'])} × {machine['gpus'][0]}",
        *(f"{line['what']}: {line['value']}" for line in machine["doctor"]["lines"] if line["group"] == "GPUs"),
        "",
        f"{len(never)} of {len(results)} parts had never been run on a GPU; {len(ran)} of these ran now.",
        "",
    ]
    for one in results:
        lines += [f"{one.name}: {summary(one)}", f"    {one.shows}", f"    {before.get(one.name, NEVER)}", ""]
    for one in results:
        if one.outcome in ("failed", "too slow"):
            lines += [f"==== {one.name}: the end of its output ====", one.command, "", one.output, ""]
    return "\n".join(lines)
