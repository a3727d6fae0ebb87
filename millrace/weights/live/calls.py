"""The four calls of vLLM's `VLLMWeightSyncClient`, from the trainer to each generator, as JSON in the rendezvous.

trainer rank 0                                  generator
init_weight_transfer_engine ─── n/call/0 ─────► is ready to join           new members, or after an error
                            ─── n/call/1 ─────► joins the group, once all are ready
start_weight_update         ─── n/call/2 ─────► the model may change now
update_weights              ─── n/call/3 ─────► receives, at the same time as the trainer sends
finish_weight_update        ─── n/call/4 ─────► the version is live
                            ◄── n/answer/i/g ── an error, or none
                            ◄── n/alive/g ───── a number that grows as long as it lives

After an error the trainer calls `abort`, which workers see too (`n/abort`), and the next push connects anew.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import DistError

from millrace.errors import WeightsNotReceived
from millrace.weights.direct.rendezvous import Push, RendezvousClient
from millrace.weights.fingerprint import Fingerprint
from millrace.weights.live.handles import encode_handles
from storage.failpoints import failpoint

INIT, START, UPDATE, FINISH = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
ABORT = "abort"
_LOOK_SECONDS = 0.002
"""Between two looks for an answer."""
_ALIVE_SECONDS, _SILENT_SECONDS = 1.0, 10.0
"""Between two signs of life, and without one until a generator counts as gone."""
_NCCL_VARIABLES = (
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE"),
    *("NCCL_NET", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE"),
)
"""Both sides of a communicator hang if these differ."""


class GeneratorsClient:
    """The trainer's end of a push to `generators`, in the order of their ranks: vLLM's `VLLMWeightSyncClient`.

    A call returns when all generators have answered. It raises RuntimeError if one fails or does not answer by `until`
    (time.monotonic), and `failed` gets the reason: vLLM's engines may wait for their workers nevertheless.
    """

    def __init__(
        self,
        client: RendezvousClient,
        push: Push,
        generators: Sequence[str],
        until: float,
        failed: Callable[[str], None],
    ) -> None:
        self.client, self.push, self.generators, self.until = client, push, generators, until
        self._failed = failed
        self._numbers = itertools.count()
        self._lives = {generator: (-1, time.monotonic()) for generator in generators}

    def init_weight_transfer_engine(self, init_info: dict[str, Any] | None) -> None:
        """Has the generators' workers join the group; None: has them prepare for it, and refuse if they can't."""
        self._call(INIT, {"backend": self.push.transport, "info": init_info, "environment": _environment()})

    def start_weight_update(self) -> None:
        """Has the generators prepare their models."""
        self._call(START)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Has the generators' workers receive."""
        assert isinstance(update_info, dict)
        self._call(UPDATE, encode_handles(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Has the generators use the new weights."""
        self._call(FINISH)

    def abort(self, reason: str) -> None:
        """Ends a call that waits, and announces to the generators that no more follow."""
        self.until = 0.0
        # Without sync_weights, generators notice its absence.
        with suppress(DistError):
            self.client.set(self.push, ABORT, reason)
            self.client.set(self.push, f"call/{next(self._numbers)}", [ABORT, reason])

    def _call(self, method: str, argument: Any = None) -> None:
        number = next(self._numbers)
        try:
            self.client.set(self.push, f"call/{number}", [method, argument])
            pending = set(self.generators)
            while pending:
                for generator in sorted(pending):
                    error = self._error(f"answer/{number}/{generator}", generator)
                    if error:
                        raise RuntimeError(f"{generator}: {method}: {error}")
                    if error is not None:
                        pending.discard(generator)
                # Not by a wait with a limit: torch logs each that runs out.
                time.sleep(_LOOK_SECONDS)
        except RuntimeError as error:
            self._failed(str(error))
            raise

    def _error(self, key: str, generator: str) -> str | None:
        """A generator's answer, empty if nothing is wrong; None while it may still come."""
        answer: str | None = self.client.get(self.push, key)
        if answer is not None:
            return answer
        now, life = time.monotonic(), self.client.get(self.push, f"alive/{generator}")
        if life != self._lives[generator][0]:
            self._lives[generator] = life, now
        if now - self._lives[generator][1] > _SILENT_SECONDS:
            return "it shows no sign of life"
        return "no answer in time" if now > self.until else None


class LiveTransfer:
    """A push to which generator `name` is invited, for its engine to serve. The methods are for the engine's thread.

    The thread that got the invitation withdraws the push if the engine does not join.
    """

    def __init__(
        self, client: RendezvousClient, push: Push, name: str, session: str, *, patience: float, seconds: float
    ) -> None:
        self.push = push
        self.error: str | None = None
        """What went wrong, empty if nothing; None if this generator did not take part."""
        self._client, self._name, self._session = client, name, session
        self._patience, self._seconds = patience, seconds
        self._lock = threading.Lock()
        self._joined = False
        self._ended = threading.Event()
        self._number = -1

    def join(self) -> bool:
        """Says that the engine is ready, and waits for the others. Returns whether it takes part."""
        with self._lock:
            if self._ended.is_set():
                return False
            self._joined = True
        self._until = time.monotonic() + self._seconds
        try:
            members = self._client.ready(self.push, self._session, self._patience)
        except DistError:
            # sync_weights is gone.
            members = {}
        if self._name not in members:
            self._ended.set()
            return False
        self._index = [member for member in members if member.startswith("generator/")].index(self._name)
        return True

    def calls(self) -> Iterator[tuple[str, Any]]:
        """Yields each call, with the argument for vLLM, and answers it once the next one is asked for.

        Ends after the last one. Raises WeightsNotReceived if none comes in time, or the trainer aborts.
        """
        for self._number in itertools.count():
            left = self._until - time.monotonic()
            method, argument = self._client.get(self.push, f"call/{self._number}", left) or (ABORT, "no call in time")
            failpoint("live.call")
            if method == ABORT:
                raise WeightsNotReceived(str(argument))
            yield method, self._adapted(method, argument)
            if method == FINISH:
                self.end("")
                return
            self._answer("")

    def end(self, error: str) -> None:
        """Ends this generator's part; `error` is what went wrong."""
        # The version may be live even if sync_weights is gone.
        with suppress(DistError):
            self._answer(error)
        self.error = error
        self._ended.set()

    def withdraw(self) -> None:
        """Ends it unless the engine has joined."""
        with self._lock:
            if not self._joined:
                self._ended.set()

    def wait(self) -> None:
        """Shows that this process lives until it ends; withdraws it unless the engine joins within its patience."""
        connection = self._client.again(self._patience)
        withdrawn = time.monotonic() + self._patience
        for life in itertools.count():
            connection.set(self.push, f"alive/{self._name}", life)
            if self._ended.wait(_ALIVE_SECONDS):
                return
            if time.monotonic() > withdrawn:
                self.withdraw()

    def _answer(self, error: str) -> None:
        self._client.set(self.push, f"answer/{self._number}/{self._name}", error)

    def _adapted(self, method: str, argument: Any) -> Any:
        if method == INIT:
            trainer_variables, variables = argument.pop("environment"), _environment()
            if trainer_variables != variables:
                raise WeightsNotReceived(f"NCCL's variables are {variables}, the trainer's are {trainer_variables}")
            return {**argument, "index": self._index, "watch": self._watch()}
        if method == UPDATE:
            fingerprint = self.push.manifest.fingerprint or Fingerprint(tensors={})
            hashes = {"tensors": fingerprint.tensors, "boxes": fingerprint.boxes, "method": fingerprint.method}
            return {"info": argument, "hashes": hashes, "watch": self._watch()}
        return argument

    def _watch(self) -> dict[str, Any]:
        """Where a worker sees that the trainer aborts, and the time that is left."""
        left = max(0.0, self._until - time.monotonic())
        return {"address": self._client.address, "key": f"{self.push.number}/{ABORT}", "seconds": left}


def _environment() -> dict[str, str]:
    variables = {name: os.environ[name] for name in _NCCL_VARIABLES if name in os.environ}
    # Other hosts may have other names for their interfaces, but loopback has to be on both sides or on none.
    if os.environ.get(interface := "NCCL_SOCKET_IFNAME") in ("lo", "=lo"):
        variables[interface] = "lo"
    return variables
