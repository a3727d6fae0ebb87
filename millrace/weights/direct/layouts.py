"""The layouts of a push's members, out of what they say of themselves; the same everywhere, so all make the same plan.

A trainer's rank 0 tells the layout of all its ranks. A generator tells its workers' layout, or that it takes the model
whole, as the trainer has it.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.weights.direct.exchange import BUCKET_BYTES
from millrace.weights.transfer.generator_layouts import whole_layout
from millrace.weights.transfer.layout import Layout
from millrace.weights.transfer.plan import TransferPlan, plan_transfer

_ALONE_BYTES = 2 << 20
"""In the CPU's memory a copy takes about as long as sending the same bytes, and far longer than one message more."""
WHOLE: Mapping[str, Any] = {"whole": True}
"""A generator that takes the model whole."""
FOLLOWS: Mapping[str, Any] = {"follows": True}
"""A trainer rank whose layout rank 0 tells."""


def told(source: Layout) -> dict[str, Any]:
    """What rank 0 tells."""
    return source.to_json()


class Plans:
    """Makes the plan for a set of members, and keeps the last one."""

    def __init__(self) -> None:
        self._made: tuple[str, TransferPlan] | None = None
        self._lock = threading.Lock()

    def plan(self, source: Mapping[str, Any], generators: Sequence[Mapping[str, Any]]) -> TransferPlan:
        """For the layouts that rank 0 and the generators told. Raises WeightsMismatch as `plan_transfer` does."""
        key = repr((source, generators))
        with self._lock:
            if self._made is None or self._made[0] != key:
                layout = Layout.from_json(source)
                theirs = [
                    whole_layout(layout.tensors) if said.get("whole") else Layout.from_json(said) for said in generators
                ]
                self._made = (key, plan_transfer(layout, theirs, bucket_bytes=BUCKET_BYTES, alone_bytes=_ALONE_BYTES))
            return self._made[1]
