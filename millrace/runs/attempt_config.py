"""The config of a stored attempt, parsed. Apart from `record`, which the dashboard reads without `configs`."""

from pydantic import ValidationError

from configs.schema import RunConfig
from millrace.runs.record import RESTORE, Attempt
from storage.errors import StreamCorrupt


def attempt_config(attempt: Attempt) -> RunConfig:
    """The config that the attempt was started with. Raises StreamCorrupt if it is none."""
    try:
        return RunConfig.model_validate(attempt.config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its config"
        reason = f"not a config of this version of Millrace: {where}: {first['msg']}; {RESTORE}"
        raise StreamCorrupt(attempt.path, reason) from error
