"""The table of the trainer's decisions about staleness and rollbacks, for the Prefect UI and the report."""

from typing import Any

Row = dict[str, str]


def rows(status: dict[str, Any]) -> list[Row]:
    """The table of the latest decisions in a status, oldest first."""
    return [
        {
            "version": f"{one['policy_version']:,}",
            "decision": one["change"],
            "bound": str(one["max_staleness"]),
            "places": str(one["places"]),
            "reason": one["reason"],
        }
        for one in status["decisions"]["latest"]
    ]
