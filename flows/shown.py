"""Markdown in the Prefect UI, if the server can be reached: what it says is in the run in any case."""

import logging

from prefect.artifacts import create_markdown_artifact

_LOGGER = logging.getLogger(__name__)


def show(markdown: str, *, key: str, description: str) -> None:
    """Puts `markdown` beside the flow run that it is called in, as the artifact `key`."""
    try:
        create_markdown_artifact(markdown, key=key, description=description)
    except Exception as error:
        # Whatever the server or the way to it does, the work is done and recorded.
        _LOGGER.warning("%s is in the run, but could not be shown in the Prefect UI: %s", key, error)
        _LOGGER.debug("why %s was not shown", key, exc_info=True)
