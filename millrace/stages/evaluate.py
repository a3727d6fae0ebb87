"""The evaluate stage: measures policy versions on the evaluation sets and stores one small result for each.

    during training   base model ─► ║ checkpoints ║ ─► the newest one that is due ─┬─► engine ─► `Examiner`
    at the end        base model, unless measured ─► the newest checkpoint ────────┘                 │
                                                       answers/<version>.parquet ◄──────────────┤
                                  attempts/<n>.early_stop, if it is time ◄── evaluations/<version>.json

During training it uses the processor time that other stages leave idle, and no stage waits for it. An existing result
is kept, so a resumed run does not measure twice. A result names its weights by their checksum, because a trainer that
was rolled back makes other weights under the same version.
"""

import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from configs.schema import RunConfig
from configs.sources import naming_source
from millrace.errors import InputError
from millrace.evaluation.answers import answers_table, write_answers
from millrace.evaluation.examiner import (
    EvaluationSet,
    Examiner,
    Rules,
    Stopped,
    evaluation_sets,
)
from millrace.evaluation.results import HELD_OUT, as_result, measures_by_set, read_result, set_name, write_result
from millrace.evaluation.schedule import due, stop_if_no_better
from millrace.forking.process_settings import take_idle_time
from millrace.generation.engines.transformers import TransformersEngine
from millrace.generation.environments.episodes import EpisodeRules, Episodes, load_rules, sampling_of
from millrace.models.loading import load_model
from millrace.models.start_folder import start_folder
from millrace.prompts.dataset import PromptSet, load_all_prompts
from millrace.rewards.scorer import make_scorer
from millrace.rewards.services.meter import LimitReached
from millrace.runs.record import read_attempt
from millrace.runtime.arguments import EVALUATE_AT_END
from millrace.runtime.entry import run_stage
from millrace.runtime.stage import Stage
from millrace.stages.service_usage import ServiceUsage, pause_at_limit
from millrace.training.checkpoints.names import weights_checksum
from millrace.training.checkpoints.policy_state import load_weights
from millrace.weights.base import Manifest, Weights, WeightsId
from storage import layout
from storage.checkpoints import Checkpoint, checkpoints_backwards, read_latest
from storage.errors import StreamCorrupt
from storage.streams.log import LogReader

Measures = dict[str, Any]
"""Measurements of a version: accuracy, intervals and so on, as listed in docs/data.md."""
Measure = Callable[[Checkpoint | None], tuple[Measures, pa.Table]]
"""Measures the version of a checkpoint, or the base model for None; the table holds its answers (`schema.ANSWERS`)."""

_BATCH_SIZE = 256
"""Responses decoded together."""
_POLL_SECONDS = 0.25
"""Time between two checks for a new checkpoint."""


def main(stage: Stage) -> None:
    """Evaluates the base model, and then the latest checkpoint or each one that falls due, by the replica number."""
    at_end = stage.replica == EVALUATE_AT_END
    if not at_end:
        take_idle_time()
    # Made when the first version is measured.
    policy = cache(lambda: EvaluatedPolicy(stage))
    evaluation = Evaluation(stage, lambda checkpoint: policy().measure(checkpoint))
    try:
        # A replay is compared at its end alone.
        if not stage.store.exists(layout.REPLAY):
            evaluation.measure(None)
        if at_end:
            evaluation.finish(stage.config.evaluation.every)
        elif stage.config.evaluation.every is not None:
            last = read_attempt(stage.store, stage.arguments.attempt).stop_at_step
            evaluation.follow(stage.config.evaluation.every, last)
    except Stopped:
        stage.log("the evaluation in progress is given up, because the stage drains")
    except LimitReached as error:
        if at_end:
            raise
        pause_at_limit(stage, error)


class Evaluation:
    """Decides which versions are measured, and stores their results.

    `measure` raises Stopped once the stage drains, and StreamCorrupt if the checkpoint can't be read.
    """

    def __init__(self, stage: Stage, measure: Measure) -> None:
        self._stage = stage
        self._store = stage.store
        self._measure = measure
        # Versions that this process can't measure.
        self._given_up: set[int] = set()
        sources = stage.config.by_source()
        self._names = {
            set_name(source, name, is_only=len(sources) == 1)
            for source, config in sources.items()
            for name in (HELD_OUT, *config.evaluation.sets)
        }

    def follow(self, every: int, last: int) -> None:
        """Measures the checkpoints before version `last` that fall due, until asked to drain.

        The last version is left to the end, which measures it at normal priority.
        """
        log = LogReader.at_head(self._store, layout.CHECKPOINTS)

        def is_committed() -> bool:
            if log.next() is not None:
                return True
            time.sleep(_POLL_SECONDS)
            return False

        while not self._stage.draining:
            newer = due(checkpoints_backwards(self._store), every, self._is_done)
            checkpoints = [checkpoint for checkpoint in newer if checkpoint.step < last]
            if checkpoints:
                self._report_skipped(checkpoints)
                try:
                    self.measure(checkpoints[0])
                except StreamCorrupt as error:
                    # If the trainer ever starts from this checkpoint, it reports the damage too.
                    self._given_up.add(checkpoints[0].step)
                    self._stage.log(f"version {checkpoints[0].step} can't be evaluated: {error}")
            elif not self._stage.wait(is_committed, why="waiting for the next version to evaluate"):
                return

    def finish(self, every: int | None) -> None:
        """Measures the latest checkpoint. Raises InputError if there is none, and the errors of `Measure`."""
        checkpoint = read_latest(self._store)
        if checkpoint is None:
            raise InputError("no checkpoint to evaluate yet", file=self._store.url)
        if every is not None:
            self._report_skipped([checkpoint, *due(checkpoints_backwards(self._store), every, self._is_done)])
        self.measure(checkpoint)

    def measure(self, checkpoint: Checkpoint | None) -> None:
        """Measures the version of `checkpoint`, or the base model, and stores the result, unless it is stored already.

        Raises the errors of `Measure`.
        """
        if self._is_done(checkpoint):
            return
        version = 0 if checkpoint is None else checkpoint.step
        self._stage.update_status(now=True, policy_version=version)
        started = time.monotonic()
        with self._stage.busy("evaluate"):
            measures, answers = self._measure(checkpoint)
        result = {
            "policy_version": version,
            "weights_checksum": _checksum(checkpoint),
            **measures,
            "answers": write_answers(self._store, version, answers),
            "seconds": time.monotonic() - started,
            "t": time.time(),
        }
        write_result(self._store, result)
        if result["accuracy"] is None:
            # Another process tries again: the reward may have been corrected.
            self._given_up.add(version)
        accuracies = {name: measures["accuracy"] for name, measures in measures_by_set(result).items()}
        words = [f"{name} {'not scored' if value is None else f'{value:.3f}'}" for name, value in accuracies.items()]
        self._stage.log(f"version {version}: accuracy {', '.join(words)} in {result['seconds']:.1f} s")
        if (stop_after := self._stage.config.evaluation.stop_after) is not None:
            stop_if_no_better(self._store, self._stage.arguments.attempt, stop_after)

    def _report_skipped(self, checkpoints: list[Checkpoint]) -> None:
        """Reports that of these due checkpoints only the first will be evaluated."""
        chosen, *others = (checkpoint.step for checkpoint in checkpoints)
        if skipped := sorted({*others} - {chosen}):
            names = ", ".join(map(str, skipped))
            self._stage.log(f"evaluation is behind: version {chosen} comes next, skipped: {names}")

    def _is_done(self, checkpoint: Checkpoint | None) -> bool:
        version = 0 if checkpoint is None else checkpoint.step
        if version in self._given_up:
            return True
        result = read_result(self._store, version)
        return (
            result is not None
            and result["accuracy"] is not None
            and result["weights_checksum"] == _checksum(checkpoint)
            and self._names <= measures_by_set(result).keys()
        )


class EvaluatedPolicy:
    """The run's policy, in an engine that starts with the base model."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._config = stage, stage.config
        config = stage.config
        torch.set_num_threads(config.training.num_threads)
        self._sets: dict[str, dict[str, EvaluationSet]] = {}
        with stage.loading():
            self._folder = start_folder(stage.store, config.model.path, stage.arguments.handover)
            prompts = load_all_prompts(config.by_source())
            for name, source in config.by_source().items():
                self._sets[name] = evaluation_sets(source.evaluation, prompts[name])
            self._engine, self._rules = load_asked_policy(config, self._folder, prompts, stage.advance)
        names = [
            f"{len(prompt_set.prompts)} prompts of {set_name(source, name, is_only=len(self._sets) == 1)}"
            for source, sets in self._sets.items()
            for name, prompt_set in sets.items()
        ]
        stage.mark_ready(f"evaluation ready, on {', '.join(names)}")

    def measure(self, checkpoint: Checkpoint | None) -> tuple[Measures, pa.Table]:
        """Measures the version of `checkpoint`, or the base model for None, which must come first."""
        # The engine starts with the base model, and no checkpoint can restore that.
        if checkpoint is not None and checkpoint.step > 0:
            self._load(checkpoint)
        assert self._engine.policy_version == (0 if checkpoint is None else checkpoint.step)
        config = self._config
        with make_scorer(config.by_source()) as scorer:
            scorer.on_first_failure = self._stage.log
            usage = ServiceUsage(self._stage, scorer)

            def continues() -> bool:
                self._stage.update_status(**usage.values())
                return not self._stage.draining

            examiner = Examiner(self._engine, scorer, self._rules, continues)
            measured: dict[str, dict[str, Measures]] = {source: {} for source in self._sets}
            answered = {}
            for source, sets in self._sets.items():
                for name, prompt_set in sets.items():
                    shown = set_name(source, name, is_only=len(self._sets) == 1)
                    measured[source][name], answered[shown] = examiner.measure(source, prompt_set)
            self._stage.update_status(**usage.values())
        weights = config.evaluation.weights or {name: source.weight for name, source in config.sources.items()}
        return as_result(measured, weights), answers_table(answered)

    def _load(self, checkpoint: Checkpoint) -> None:
        """Replaces the engine's weights. Raises StreamCorrupt."""
        weights_id = WeightsId(
            incarnation=checkpoint.incarnation, policy_version=checkpoint.step, t_offered=time.time()
        )
        # Adapters and frozen layers need the start model, and the engine's may have changed since.
        training = self._config.training
        partly = training.lora.rank is not None or training.frozen_layers > 0
        start = load_model(self._folder, self._config.model.dtype).named_parameters() if partly else ()
        tensors = load_weights(self._stage.store, checkpoint, dict(start))
        self._engine.update_weights(Weights(manifest=Manifest(id=weights_id), tensors=tensors))


def load_asked_policy(
    config: RunConfig, folder: Path, prompts: Mapping[str, PromptSet], on_progress: Callable[[], None] | None = None
) -> tuple[Episodes, dict[str, Rules]]:
    """The model in `folder`, in an engine on the CPU, and how it is asked the prompts of each source."""
    episodes: dict[str, EpisodeRules] = {}
    rules: dict[str, Rules] = {}
    for name, source in config.by_source().items():
        with naming_source(name):
            loaded = episodes[name] = load_rules(
                folder, source.model, source.prompts, source.environment, prompts[name].asked
            )
        rules[name] = Rules(
            encoder=loaded.encoder,
            sampling=sampling_of(source.generation),
            seed=config.seed,
            batch_size=_BATCH_SIZE,
            answer_pattern=source.scoring.answer_pattern,
        )
    engine = TransformersEngine(
        load_model(folder, config.model.dtype), loaded.encoder.tokenizer, on_progress=on_progress
    )
    return Episodes(engine, episodes), rules


def _checksum(checkpoint: Checkpoint | None) -> str | None:
    """Checksum of a checkpoint's weights; None for the base model, even if a checkpoint holds it."""
    return None if checkpoint is None or checkpoint.step == 0 else weights_checksum(checkpoint)


if __name__ == "__main__":
    run_stage("evaluate", main)
