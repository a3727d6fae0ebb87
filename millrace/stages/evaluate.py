"""The evaluation stage: one policy version, held-out prompts, greedy decoding, one small result in the store.

    checkpoint or base model ─► engine ─► responses ─► reward ─► evaluations/<policy version>.json

A result that is already there is kept: a resumed run does not measure twice. It names the weights it is of by their
checksum, for a trainer that went back makes other ones under the same version.
"""

import json
import time

import torch

from millrace.engines.transformers import TransformersEngine
from millrace.errors import InputError
from millrace.model import load_model, load_tokenizer, start_folder
from millrace.rewards.base import safe_score
from millrace.rewards.factory import make_reward
from millrace.stages.arguments import EVALUATE_LATEST
from millrace.stages.inputs import load_prompt_set
from millrace.stages.process import Stage, run_stage
from millrace.trainer import WEIGHTS_FILE, load_weights
from millrace.types import Sampling
from millrace.weights.base import Manifest, Weights, WeightsId
from storage import layout
from storage.checkpoints import read_latest
from storage.errors import NotInStore
from storage.store import Store


def main(stage: Stage) -> None:
    """Evaluates the base model or the latest checkpoint, as its replica number says."""
    config = stage.config
    torch.set_num_threads(config.training.threads)
    with stage.loading():
        folder = start_folder(stage.store, config.model.path, stage.arguments.handover)
        tokenizer = load_tokenizer(folder)
        engine = TransformersEngine(load_model(folder, config.model.dtype), tokenizer)
    checksum = None
    if stage.replica == EVALUATE_LATEST:
        checkpoint = read_latest(stage.store)
        if checkpoint is None:
            raise InputError(f"{stage.store.url}: no checkpoint to evaluate yet")
        weights_id = WeightsId(
            incarnation=checkpoint.incarnation, policy_version=checkpoint.step, t_offered=time.time()
        )
        checksum = checkpoint.files[WEIGHTS_FILE].checksum
        tensors = load_weights(stage.store, checkpoint)
        engine.update_weights(Weights(manifest=Manifest(id=weights_id), tensors=tensors))
    if _is_measured(stage.store, engine.policy_version, checksum):
        return
    stage.ready(f"measuring version {engine.policy_version}")
    started = time.monotonic()
    prompts = load_prompt_set(config).eval[: config.evaluation.num_prompts]
    reward = make_reward(config.scoring.reward, answer_pattern=config.scoring.answer_pattern)
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=config.generation.max_new_tokens)
    rewards: list[float | None] = []
    for first in range(0, len(prompts), config.evaluation.batch_size):
        batch = prompts[first : first + config.evaluation.batch_size]
        responses = engine.generate([tokenizer(prompt.text)["input_ids"] for prompt in batch], greedy, seed=0)
        texts = tokenizer.batch_decode([list(response.tokens) for response in responses], skip_special_tokens=True)
        stage.beat()
        rewards += [safe_score(reward, prompt, text).reward for prompt, text in zip(batch, texts, strict=True)]
    known = [value for value in rewards if value is not None]
    result = {
        "policy_version": engine.policy_version,
        "weights_checksum": checksum,
        "accuracy": sum(known) / len(rewards),
        "prompts": len(rewards),
        "errors": len(rewards) - len(known),
        "seconds": time.monotonic() - started,
        "t": time.time(),
    }
    stage.store.put(layout.evaluation(engine.policy_version), json.dumps(result).encode())
    stage.milestone(f"version {engine.policy_version}: held-out greedy accuracy {result['accuracy']:.3f}")


def _is_measured(store: Store, policy_version: int, checksum: str | None) -> bool:
    try:
        result = json.loads(bytes(store.get(layout.evaluation(policy_version))))
    except NotInStore:
        return False
    return bool(result["weights_checksum"] == checksum)


if __name__ == "__main__":
    run_stage("evaluate", main)
