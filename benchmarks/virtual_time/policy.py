"""A real policy in virtual time: what it samples and learns is computed, how long that takes is a cost model's.

start model ─► PolicyEngine: one token of each request per Costs.decode ─► trajectories ─► real reward
     │               ▲ weights                                                               │
     └───────► Trainer: one step per Costs.train ◄────────────────────────────────────────────┘
                   └─► every so many versions: held-out accuracy, in no time
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.virtual_time.clock import VirtualClock
from benchmarks.virtual_time.run import Parts, TimedEngine, run
from configs.schema import RunConfig
from millrace.chat.encoder import PromptEncoder
from millrace.evaluation.examiner import Examiner, Rules
from millrace.evaluation.results import write_result
from millrace.evaluation.sets import evaluation_sets
from millrace.generation.engines.transformers import TransformersEngine
from millrace.models.decoder import load_decoder
from millrace.models.loading import load_model, load_tokenizer
from millrace.planning.simulation.costs import Costs
from millrace.prompts.dataset import PromptSet, load_prompts
from millrace.rewards.base import Reward
from millrace.rewards.factory import make_reward
from millrace.rewards.scorer import Scorer
from millrace.stages.train import load_trainer
from millrace.training.trainer import Trainer
from millrace.types import Request, Sampling, Trajectory
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.probe import probe_tokens
from storage.stores.base import Store


class PolicyEngine(TransformersEngine, TimedEngine):
    """Samples one token of each request in flight in the time that `costs` say."""

    def __init__(
        self, clock: VirtualClock, costs: Callable[[], Costs], folder: Path, config: RunConfig, encoder: PromptEncoder
    ) -> None:
        model = load_model(folder, config.model.dtype)
        super().__init__(model, encoder.tokenizer, stop_token_ids=encoder.stop_token_ids)
        self._clock = clock
        self._costs = costs
        self._due = 0.0
        """When the tokens that are being sampled are there."""
        self._submitted = False

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        idle = not self.in_flight
        super().submit(requests, sampling)
        self._submitted = True
        # Requests of one group that start together have one prompt.
        prompts = {request.group_id: len(request.prompt_tokens) for request in requests}
        self._due = (self._next() if idle else self._due) + self._costs().prefill(sum(prompts.values()))

    def collect(self, seconds: float) -> list[Trajectory]:
        """As in `Engine`, but it waits for a change as long as it takes: looking again earlier finds nothing.

        After a submission it does not wait, so that the stage can show what is in flight now.
        """
        submitted, self._submitted = self._submitted, False
        while self.in_flight and not submitted:
            self._clock.poll(self._due)
            if self._clock.now < self._due:
                break
            ended = super().collect(0.0)
            self._due = self._next()
            if ended:
                return ended
        return []

    def update_weights(self, weights: Weights) -> float:
        cached = self.tokens_in_flight
        super().update_weights(weights)
        pause = self._costs().pause + self._costs().prefill(cached)
        self.stand_still(pause)
        return pause

    def stand_still(self, seconds: float) -> None:
        self._clock.sleep(seconds)
        self._due += seconds

    def _next(self) -> float:
        """When the next tokens are there, if sampling them begins now."""
        return self._clock.now + self._costs().decode(self.in_flight, self.tokens_in_flight)


def run_policy(config: RunConfig, costs: Mapping[int, Costs], store: Store) -> None:
    """A campaign of `config.model.path` in virtual time, stored with its evaluations.

    `costs` are those from each policy version of the trainer on; version 0 is among them. The start model and every
    `evaluation.every`-th version give greedy answers to the held-out prompts. Raises what a stage raises.
    """
    assert config.model.path is not None
    folder, clock = Path(config.model.path), VirtualClock()
    prompts, tokenizer = load_prompts(config.prompts), load_tokenizer(folder)
    encoder = PromptEncoder(tokenizer, config.prompts)
    trainer, reward = load_trainer(config, folder), _in_process(make_reward(config.scoring, ()))
    in_force = _InForce(costs, trainer)
    evaluation = _Evaluation(clock, config, folder, encoder, reward, prompts, trainer, store)
    evaluation.after_step()
    first_prompt = list(encoder.encode(prompts.train[0]).tokens)
    parts = Parts(
        clock=clock,
        costs=in_force,
        prompts=prompts.train,
        encoder=encoder,
        probed=probe_tokens(first_prompt, config.generation.max_new_tokens),
        engine=lambda: PolicyEngine(clock, in_force, folder, config, encoder),
        reward=reward,
        decode=load_decoder(folder),
        trainer=trainer,
        after_step=evaluation.after_step,
    )
    run(config, parts, store)


class _InForce:
    """The costs in force, by the trainer's version."""

    def __init__(self, costs: Mapping[int, Costs], trainer: Trainer) -> None:
        self._costs = costs
        self._trainer = trainer

    def __call__(self) -> Costs:
        return self._costs[max(version for version in self._costs if version <= self._trainer.policy_version)]


class _Evaluation:
    """Judges the trainer's policy on the held-out prompts, in no time."""

    def __init__(
        self,
        clock: VirtualClock,
        config: RunConfig,
        folder: Path,
        encoder: PromptEncoder,
        reward: Reward,
        prompts: PromptSet,
        trainer: Trainer,
        store: Store,
    ) -> None:
        self._every = config.evaluation.every or config.training.max_steps
        self._clock = clock
        self._trainer = trainer
        self._store = store
        self._sets = evaluation_sets(config.evaluation, config.prompts, prompts)
        self._engine = TransformersEngine(
            load_model(folder, config.model.dtype), encoder.tokenizer, stop_token_ids=encoder.stop_token_ids
        )
        rules = Rules(
            sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=config.generation.max_new_tokens),
            seed=config.seed,
            batch_size=config.evaluation.batch_size,
            answer_pattern=config.scoring.answer_pattern,
        )
        self._examiner = Examiner(self._engine, encoder, Scorer(reward), rules, lambda: True)

    def after_step(self) -> None:
        version = self._trainer.policy_version
        if version % self._every:
            return
        weights_id = WeightsId(incarnation=0, policy_version=version, t_offered=self._clock.now)
        self._engine.update_weights(Weights(manifest=Manifest(id=weights_id), tensors=self._trainer.weights()))
        result = {"policy_version": version, "weights_checksum": None, "seconds": 0.0, "t": self._clock.now}
        write_result(self._store, {**result, **self._examiner.measure(self._sets)})


def _in_process(reward: Reward) -> Reward:
    """Our own patterns end on every response, and other processes would not know the clock."""
    reward.isolated = False
    return reward
