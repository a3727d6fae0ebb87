"""CUDA IPC handles as JSON. vLLM's own HTTP client pickles them, and unpickling a message can run any code.

rebuild_cuda_tensor's arguments for vLLM's packed buffer ◄─► numbers and base64; classes and dtype are always the same
"""

import base64
from typing import Any

import torch

_HANDLE, _REF_COUNTER, _EVENT = 7, 11, 13
"""Positions of bytes among the arguments (torch.multiprocessing.reductions)."""
_FIXED: dict[int, Any] = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8}
"""The buffer's class, its storage's, its dtype."""


def encode_handles(update_info: dict[str, Any]) -> dict[str, Any]:
    """Returns `update_info` as plain JSON. Raises ValueError for a handle of anything but a packed buffer."""
    handles = update_info.get("ipc_handles")
    if handles is None:
        return update_info
    return {**update_info, "ipc_handles": {uuid: _encode(arguments) for uuid, arguments in handles.items()}}


def decode_handles(update_info: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `encode_handles`."""
    handles = update_info.get("ipc_handles")
    if handles is None:
        return update_info
    return {**update_info, "ipc_handles": {uuid: _decode(arguments) for uuid, arguments in handles.items()}}


def _encode(arguments: tuple[Any, ...]) -> list[Any]:
    if any(arguments[position] is not value for position, value in _FIXED.items()):
        raise ValueError(f"expected the handle of a packed buffer, not {arguments[:6]}")
    encoded = [None if position in _FIXED else value for position, value in enumerate(arguments)]
    for position in (_HANDLE, _REF_COUNTER, _EVENT):
        encoded[position] = base64.b64encode(arguments[position]).decode()
    return [list(value) if isinstance(value, tuple) else value for value in encoded]


def _decode(encoded: list[Any]) -> tuple[Any, ...]:
    arguments = [_FIXED.get(position, value) for position, value in enumerate(encoded)]
    for position in (_HANDLE, _REF_COUNTER, _EVENT):
        arguments[position] = base64.b64decode(arguments[position])
    return tuple(tuple(value) if isinstance(value, list) else value for value in arguments)
