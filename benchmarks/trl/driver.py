"""TRL's side: GRPO as its users write it. Runs as a script in TRL's environment, without Millrace.

    python driver.py SPEC.json

The spec names the model's folder, the prompts' file and the numbers. One record per optimizer step is written to the
file that the spec calls `steps_file`: when the step ended, the mean reward and the mean length of its responses.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Recorder(TrainerCallback):
    """Collects the figures of each step; `right` is the reward function."""

    __name__ = "right"

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._last: dict[str, float] = {}

    def right(
        self, completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """1 for the right answer, 0 for any other."""
        rewards = [float(text.strip() == right.strip()) for text, right in zip(completions, answer, strict=True)]
        self._last = {
            "reward": sum(rewards) / len(rewards),
            "response_tokens": sum(map(len, completion_ids)) / len(completion_ids),
        }
        return rewards

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        self.steps.append({"t": time.time(), **self._last})


def main() -> None:
    """Trains as the spec says."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    records = [json.loads(line) for line in Path(spec["prompts"]).read_text().splitlines()]
    recorder = Recorder()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        reward_funcs=recorder.right,
        train_dataset=Dataset.from_list(records),
        callbacks=[recorder],
        args=GRPOConfig(
            output_dir=spec["output"],
            seed=spec["seed"],
            max_steps=spec["steps"],
            per_device_train_batch_size=spec["responses"],
            num_generations=spec["group_size"],
            max_completion_length=spec["max_new_tokens"],
            temperature=1.0,
            learning_rate=spec["learning_rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            # The policy gradient of the group's mean, averaged over tokens, without a reference.
            loss_type="dapo",
            scale_rewards="none",
            beta=0.0,
            # The fastest settings for a small model in float32 on a CPU.
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=spec["steps"],
        ),
    )
    trainer.train()
    Path(spec["steps_file"]).write_text("".join(json.dumps(step) + "\n" for step in recorder.steps))


if __name__ == "__main__":
    main()
