"""A small JSON object with a checksum of itself, so that damage is found before any value is used.

{"crc": "<CRC-32C of the object without this key>", "epoch": 0, …}      sorted keys, always the same bytes
"""

import json
from typing import Any

import google_crc32c

_KEY = "crc"
_ENCODER = json.JSONEncoder(sort_keys=True, allow_nan=False)


def seal(values: dict[str, Any]) -> bytes:
    """`values` and their checksum as one JSON object.

    Raises ValueError for a number that is not finite and TypeError for a type that JSON does not have.
    """
    checksum = f"{google_crc32c.value(_to_json(values)):08x}"
    return _to_json(values | {_KEY: checksum})


def unseal(data: bytes) -> dict[str, Any]:
    """The values in `data`, which `seal` wrote.

    Raises ValueError, whose text completes "it is …", unless `data` is a JSON object that matches its checksum.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"JSON, but of type {type(values).__name__}, expected an object")
    if _KEY not in values:
        raise ValueError("JSON, but without its checksum")
    stored_checksum = values.pop(_KEY)
    try:
        # Different bytes with the same values are damage too: only `seal` makes such objects.
        if seal(values) == data:
            return values
    except (ValueError, RecursionError) as error:
        raise ValueError(f"damaged: not a sealed object ({error})") from error
    raise ValueError(f"damaged: it does not match its checksum {stored_checksum!r}")


def _to_json(values: dict[str, Any]) -> bytes:
    return _ENCODER.encode(values).encode()
