"""The table of a run's evaluations: a row per version, for the Prefect UI and the report."""

from typing import Any

from flows.display.key_figures import accuracy_text, interval

Row = dict[str, str]


def rows(status: dict[str, Any]) -> list[Row]:
    """The table from a status, in order of versions: the accuracy on each set, the held-out prompts' with its 95 %
    interval, and which version is the best."""
    best = None if status["best"] is None else status["best"]["policy_version"]
    found = []
    for one in status["evaluations"]:
        (name, held_out), *sets = one["accuracy"].items()
        found.append(
            {
                "version": f"{one['policy_version']:,}",
                name: f"{accuracy_text(held_out, 4)}{interval(one['interval'])}",
                **{further: accuracy_text(accuracy, 4) for further, accuracy in sets},
                "note": "best" if one["policy_version"] == best else "",
            }
        )
    return found


def as_markdown(table: list[Row]) -> str:
    """The rows (at least one) as a Markdown table; a set that a version was not measured on stays empty."""
    names = list(dict.fromkeys(name for row in table for name in row))
    lines = [names, ["---"] * len(names), *([row.get(name, "") for name in names] for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
