"""The other ranks: they do what rank 0 says, each its share, and nothing else.

    hear ─► step, weights, … of the rank's own trainer ─► hear ─► … ─► END

Rank 0 alone reads streams, hands weights over, commits and speaks; see `millrace.parallel.led`.
"""

import json
from dataclasses import asdict

from millrace.checkpointing.reading import StoredFiles
from millrace.checkpointing.saving import AsyncCheckpoints
from millrace.parallel.sharding import full_tensors
from millrace.parallel.wire import Order, Word, exchange, hear, unpack
from millrace.trainer import Trainer
from storage.checkpoints import Checkpoint
from storage.errors import StreamCorrupt
from storage.factory import open_store
from storage.files import FileRef
from storage.store import Store


def follow(trainer: Trainer, checkpoints: AsyncCheckpoints) -> None:
    """Until rank 0 says that it has ended. Raises RuntimeError where rank 0 is gone without a word.

    Raises what the rank's share of the work raises: rank 0 then meets the same, or the loss of this rank.
    """
    while (order := hear()).word is not Word.END:
        match order.word:
            case Word.STEP:
                trainer.step(unpack(order.payload))
            case Word.WEIGHTS:
                # Gathered by all; only rank 0 has a use for them.
                for _ in full_tensors(trainer.model):
                    pass
            case Word.NEXT_LOGPROBS:
                trainer.next_logprobs(**json.loads(order.payload))
            case Word.CHECKPOINT:
                checkpoints.begin(int(order.payload), trainer.tensors(), {})
            case Word.SLEEP:
                trainer.sleep()
                exchange("", trainer.ranks.size)
            case Word.WAKE:
                trainer.wake()
            case Word.RESTORE:
                restore_share(trainer, *_checkpoint(order.payload))


def restoring(store: Store, checkpoint: Checkpoint) -> Order:
    """How rank 0 says which checkpoint all are to restore."""
    files = {name: asdict(ref) for name, ref in checkpoint.files.items()}
    said = {"run": store.url, "step": checkpoint.step, "incarnation": checkpoint.incarnation, "files": files}
    return Order(word=Word.RESTORE, payload=json.dumps(said).encode())


def restore_share(trainer: Trainer, store: Store, checkpoint: Checkpoint) -> StreamCorrupt | None:
    """Puts this rank's share of `checkpoint` into `trainer`; every rank has to come here.

    Returns the damage that any rank has met, the same on all of them; then the ranks hold different policies until
    they have restored another checkpoint.
    """
    damage: StreamCorrupt | None = None
    try:
        trainer.restore(checkpoint.step, StoredFiles(store, checkpoint))
    except StreamCorrupt as error:
        damage = error
    found = [] if damage is None else [damage.file, damage.reason]
    met = [json.loads(said) for said in exchange(json.dumps(found), trainer.ranks.size)]
    return next((StreamCorrupt(*said) for said in met if said), None)


def _checkpoint(payload: bytes) -> tuple[Store, Checkpoint]:
    said = json.loads(payload)
    files = {name: FileRef(**ref) for name, ref in said["files"].items()}
    checkpoint = Checkpoint(step=said["step"], files=files, state={}, incarnation=said["incarnation"])
    return open_store(said["run"]), checkpoint
