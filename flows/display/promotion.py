"""What the Prefect UI shows of the promotion gate: an artifact per promoted checkpoint, the last state's message."""

from typing import Any

from flows.display.artifacts import show
from flows.display.key_figures import already_finished
from flows.display.links import artifact_key, dashboard_link
from millrace.evaluation.promotion import Decision


def final_message(decision: Decision | None, status: dict[str, Any]) -> str:
    """The message of the flow run's last state, such as `v90 promoted, 0.340 → 0.570; version 90 of 400`."""
    if (finished := already_finished(status)) is not None:
        # A former attempt may have been killed before the gate.
        return f"{decision.headline}; {finished}" if decision is not None and decision.promoted else finished
    reached = f"version {status['steps']:,} of {status['max_steps']:,}"
    return reached if decision is None else f"{decision.headline}; {reached}"


def show_promoted(run_url: str, run_id: str, decision: Decision) -> None:
    """Adds the artifact `<run>-promoted` to the flow run, if the server can be reached."""
    show(promoted_card(run_url, run_id, decision), key=artifact_key(run_id, "promoted"), description=decision.headline)


def promoted_card(run_url: str, run_id: str, decision: Decision) -> str:
    """A promotion as Markdown: which version, how much better it is, and where its files are."""
    rows = [
        ("version", f"{decision.policy_version:,}"),
        ("held-out accuracy", "–" if decision.accuracy is None else f"{decision.accuracy:.4f}"),
        ("before", "–" if decision.bar is None else f"{decision.bar:.4f}"),
        ("files", f"`{run_url}/weights/promoted`"),
        ("as a Hugging Face folder", f"`millrace export {run_url} --to FOLDER --promoted`"),
    ]
    link = dashboard_link(run_id)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return "\n\n".join(
        [
            f"# {decision.headline}",
            f"The gate: {decision.sentence}.",
            f"| checkpoint | |\n|---|---|\n{table}",
            *([] if link is None else [f"[The run in the dashboard]({link})"]),
        ]
    )
