"""JSON from files that anyone may have written."""

import json
from typing import Any


def parse_json(data: bytes | str, **hooks: Any) -> Any:
    """The value in `data`, made with the `hooks` of `json.loads`. Raises ValueError for whatever is no JSON, or can't
    be read as such: text that is not UTF-8, numbers of thousands of digits, and values nested thousands deep among it.
    """
    try:
        return json.loads(data, **hooks)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error
