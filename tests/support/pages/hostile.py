"""Text of a model that would like to be markup, wherever a response has text."""

from typing import Any

import numpy as np

from dashboard.read.groups import StoredResponse
from dashboard.read.tokens import TokenTexts

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>[x](javascript:alert(3))\u202e\x1b[2J\n"
SPELT = "<script>alert(1)</script><img src=x onerror=alert(2)>[x](javascript:alert(3))\\u202e␛[2J␊"
"""The same as a page shows it."""


class HostileTexts(TokenTexts):
    """A tokenizer whose every token is a script."""

    def text(self, ids: Any) -> str:
        return HOSTILE * len(ids)

    def pieces(self, ids: Any) -> list[str]:
        return [HOSTILE for _ in ids]


def hostile_response(row_id: int, tokens: int) -> StoredResponse:
    """A trained response whose every text is hostile."""
    trajectory = {
        "prompt_id": HOSTILE,
        "prompt_tokens": [1],
        "meta": HOSTILE,
        "response_tokens": list(range(tokens)),
        "rollout_logprobs": [-1.0] * tokens,
        "loss_mask": [1] * (tokens - 1) + [0],
        "kept_counts": [],
        "span_versions": [3, 4],
        "span_starts": [0, 2],
        "finish_reason": HOSTILE,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": tokens,
        "incarnation": 0,
        "seed": 5,
        "t_admitted": 1.0,
        "t_started": 1.5,
        "t_finished": 3.75,
        "t_environment": [2.0, 2.5],
        "message_roles": [HOSTILE, "assistant", HOSTILE],
        "message_starts": [0, 1, 3],
    }
    score = {
        "reward": 1.0,
        "components": HOSTILE,
        "status": HOSTILE,
        "error": HOSTILE,
        "verifier_version": HOSTILE,
        "seconds": 0.5,
        "t_scored": 4.5,
    }
    taken = {
        "outcome": HOSTILE,
        "policy_version": 6,
        "staleness": 2,
        "staleness_in_flight": 1,
        "reward": 1.0,
        "advantage": None,
        "t": 5.0,
    }
    logprobs = np.full(tokens, -1.0, np.float32)
    logprobs[0] = np.log(0.5) - 1.0
    return StoredResponse(
        row_id=row_id,
        trajectory=trajectory,
        score=score,
        consumed=taken,
        trainer_logprobs=logprobs,
        trainer_entropies=np.full(tokens, 0.75, np.float32),
    )
