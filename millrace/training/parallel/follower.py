"""The other ranks: each does its share of what rank 0 commands.

    receive ─► step, weights, … of the rank's own trainer ─► receive ─► … ─► END

Only rank 0 reads streams, hands weights over and commits; see `millrace.training.parallel.leader`.
"""

import json
import struct
from dataclasses import asdict

from millrace.training.checkpoints.reading import StoredFiles
from millrace.training.checkpoints.saving import AsyncCheckpoints
from millrace.training.parallel.messages import RATE_FACTOR, Command, exchange, receive, unpack
from millrace.training.parallel.sharding import full_tensors, own_shards
from millrace.training.trainer import Trainer
from millrace.weights.base import Manifest, Weights, WeightsSender
from storage.checkpoints import Checkpoint
from storage.errors import StreamCorrupt
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.streams.files import FileRef


def follow(trainer: Trainer, checkpoints: AsyncCheckpoints, sender: WeightsSender | None) -> None:
    """Follows rank 0 until it ends; `sender` takes this rank's shards, if they are handed over. Raises RuntimeError if
    rank 0 dies.

    Raises what this rank's share of the work raises. Rank 0 then meets the same error, or the loss of this rank.
    """
    trainer.before_update = checkpoints.wait_until_read
    while True:
        command, payload = receive()
        match command:
            case Command.END:
                return
            case Command.STEP:
                (rate_factor,) = struct.unpack_from(RATE_FACTOR, payload)
                trainer.step(unpack(payload[struct.calcsize(RATE_FACTOR) :]), rate_factor)
            case Command.WEIGHTS:
                # All ranks take part in gathering; only rank 0 uses the result.
                for _ in full_tensors(trainer.model):
                    pass
            case Command.NEXT_LOGPROBS:
                trainer.next_logprobs(**json.loads(payload))
            case Command.CHECKPOINT:
                checkpoints.begin(int(payload), trainer.tensors(), {})
            case Command.SLEEP:
                trainer.sleep()
                exchange("", trainer.ranks.size)
            case Command.WAKE:
                trainer.wake()
            case Command.HAND_OVER:
                assert sender is not None
                hand_over(trainer, sender, Manifest.from_json(json.loads(payload)))
            case Command.RESTORE:
                restore_share(trainer, *_checkpoint(payload))


def hand_over(trainer: Trainer, sender: WeightsSender, manifest: Manifest) -> None:
    """Hands this rank's shards over; every rank has to call this."""
    sender.publish(Weights(manifest=manifest, tensors=dict(own_shards(trainer.model))))


def checkpoint_payload(store: Store, checkpoint: Checkpoint) -> bytes:
    """The payload of `Command.RESTORE`."""
    files = {name: asdict(ref) for name, ref in checkpoint.files.items()}
    found = {"run": store.url, "step": checkpoint.step, "incarnation": checkpoint.incarnation, "files": files}
    return json.dumps(found).encode()


def restore_share(trainer: Trainer, store: Store, checkpoint: Checkpoint) -> StreamCorrupt | None:
    """Restores this rank's share of `checkpoint`; every rank has to call this.

    Returns the damage that any rank found, the same on all of them. After damage the ranks hold different policies
    until they have restored another checkpoint.
    """
    damage: StreamCorrupt | None = None
    try:
        trainer.restore(checkpoint.step, StoredFiles(store, checkpoint))
    except StreamCorrupt as error:
        damage = error
    own = [] if damage is None else [damage.file, damage.reason]
    found = [json.loads(text) for text in exchange(json.dumps(own), trainer.ranks.size)]
    return next((StreamCorrupt(*one) for one in found if one), None)


def _checkpoint(payload: bytes) -> tuple[Store, Checkpoint]:
    found = json.loads(payload)
    files = {name: FileRef(**ref) for name, ref in found["files"].items()}
    checkpoint = Checkpoint(step=found["step"], files=files, state={}, incarnation=found["incarnation"])
    return open_store(found["run"]), checkpoint
