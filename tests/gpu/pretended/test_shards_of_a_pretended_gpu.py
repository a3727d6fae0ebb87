"""A trainer on a pretended GPU as a member of `direct`: its copies to the host."""

from contextlib import closing

import pytest
import torch
from support.gpu.pretend_gpu import CPU, GPU, pretend_gpu
from support.training.sharded_trainers import CASES, make_trainer, samples

from millrace.training.parallel.leader import hand_over
from millrace.training.parallel.ranks import Ranks
from millrace.training.parallel.sharding import base_tensors, layout
from millrace.weights.base import Manifest, WeightsId
from millrace.weights.direct.sender import ShardSender

MANIFEST = Manifest(id=WeightsId(incarnation=0, policy_version=1, t_offered=0.0))


@pytest.mark.parametrize(("name", "dtype"), [("llama aipo", torch.float32), ("qwen3 lora", torch.bfloat16)])
def test_a_rank_s_shards_are_copied_to_the_host_once_in_the_generators_dtype(name: str, dtype: torch.dtype) -> None:
    with pretend_gpu() as gpu:
        trainer = make_trainer(CASES[name], Ranks.alone(GPU), None)
        trainer.step(samples(5, seed=0))
        shards = layout(trainer.model, trainer.ranks, dtype)
        with closing(ShardSender(lambda: None, shards, 0, device=CPU, deadline_seconds=3.0)) as sender:
            gpu.forget()
            hand_over(trainer, sender, MANIFEST)
            kept = sender._snapshot.tensors
            assert gpu.copied_to_host == {"weights/direct/sender.py:take": sum(each.nbytes for each in kept.values())}
            assert not gpu.waits
            for tensor, part in base_tensors(trainer.model, whole=False):
                assert torch.equal(kept[tensor], part.to(dtype).cpu()), tensor
