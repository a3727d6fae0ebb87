"""The report: one file, first for people, then the same as JSON, so that a person can send it and a program read it.

benchmarks/results/gpu-check*.txt     earlier reports, which show whether a part has run before
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
    """Maps a part's name to the GPU and date of its last pass, from the reports in `folder`."""
    reports = sorted(
        (read(file.read_text()) for file in folder.glob("gpu-check*.txt")), key=lambda report: report["time"]
    )
    return {
        result["name"]: f"passed before on {report['gpus'][0]}, {report['time'][:10]}"
        for report in reports
        for result in report["results"]
        if result["outcome"] == "passed"
    }


def write(machine: Mapping[str, Any], results: Sequence[Result], earlier: Mapping[str, str]) -> str:
    """The report's text. `machine` is plain JSON with `time`, `commit`, `gpus` and `doctor`."""
    values = {
        **machine,
        "results": [result.to_json() | {"before": earlier.get(result.name, NEVER)} for result in results],
    }
    return f"{_for_people(machine, results, earlier)}\n{_JSON_FOLLOWS}\n{json.dumps(values, indent=1)}\n"


def read(text: str) -> dict[str, Any]:
    """The JSON of a report. Raises ValueError if `text` is none."""
    _, mark, values = text.partition(f"\n{_JSON_FOLLOWS}\n")
    if not mark:
        raise ValueError("not a report of gpu-check: its JSON is missing")
    report: dict[str, Any] = json.loads(values)
    return report


def _for_people(machine: Mapping[str, Any], results: Sequence[Result], earlier: Mapping[str, str]) -> str:
    never = [result for result in results if result.name not in earlier]
    ran = [result for result in never if result.outcome != "left out"]
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
    for result in results:
        lines += [
            f"{result.name}: {summary(result)}",
            f"    {result.shows}",
            f"    {earlier.get(result.name, NEVER)}",
            "",
        ]
    for result in results:
        if result.outcome in ("failed", "too slow"):
            lines += [f"==== {result.name}: the end of its output ====", result.command, "", result.output, ""]
    return "\n".join(lines)
