"""Samples for the trainer, with defaults for the fields that a test does not vary."""

from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.training.batch import Sample


def make_sample(prompt: npt.ArrayLike, response: npt.ArrayLike, **values: Any) -> Sample:
    """A fresh response with advantage 1 at temperature 1, all of it trained; `values` are other fields of Sample."""
    tokens = np.asarray(response, np.int32)
    defaults = {"rollout_logprobs": 0.0, "loss_mask": 1, "temperature": 1.0, "advantage": 1.0, "staleness": 0}
    fields = {**defaults, "max_new_tokens": 8, **values}
    for name, dtype in (("rollout_logprobs", np.float32), ("loss_mask", np.uint8)):
        fields[name] = np.broadcast_to(np.asarray(fields[name], dtype), tokens.shape).copy()
    return Sample(prompt_tokens=np.asarray(prompt, np.int32), response_tokens=tokens, **fields)
