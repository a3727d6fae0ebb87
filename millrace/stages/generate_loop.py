"""The loop of the generate stage: groups into the engine, trajectories into the stream, new weights in between.

    newest weights ◄── sync_weights          status record of the trainer: groups dropped
          │                                          │
          ▼                                          ▼
    ┌► update weights ─► a slot free, and group n under the bound? ──no──► wait ──┐
    │                          │ yes                                              │
    │                          ▼                                                  │
    │         requests of n, n+G, … ─► engine ─► whole groups ─► group commit ──► ║ trajectories/<generator> ║
    │                                     └─► drained ─► unfinished responses ──► ║ unfinished/<generator> ║
    └─────────────────────────────────────────────────────────────────────────────┘

Weights are updated while groups are in flight. Those continue under the new weights, and their version spans hold the
first token of each version. If trainer and generators share a device, the engine sleeps while it has nothing to do
(`runtime/device_sharing.py`). Weights of a new incarnation mean that the trainer was rolled back: the generator returns
to the first group that the trainer is missing, and continues the responses in flight whose weights still exist. In sync
mode it starts them again, so that a step's responses do not depend on the time of a kill.
"""

import time
from itertools import groupby

from millrace.errors import WeightsCorrupt, WeightsNotReceived
from millrace.generation.engines.base import Engine
from millrace.rollouts.writer import TrajectoryWriter
from millrace.runtime.device_sharing import DeviceTurns
from millrace.runtime.stage import Stage
from millrace.stages.admission import Admission
from millrace.stages.carry_over import CarryOver
from millrace.weights.base import Weights, WeightsId
from millrace.weights.fallback import FallbackReceiver
from millrace.weights.probe import NUM_LOGPROBS, alarm, largest_difference, tolerance_between
from storage.failpoints import failpoint

_COLLECT_SECONDS = 0.02
"""Longest wait for a finished trajectory before the next check for new weights."""
_SHOW_SECONDS = 0.2
"""Time between two updates of the status record about requests in flight."""
_WEIGHTS = "waiting for weights"
_ROOM = "waiting for room under max_staleness"
_DEVICE = "waiting for the trainer to give the device back"


class Generator:
    """The loop above."""

    def __init__(
        self,
        stage: Stage,
        engine: Engine,
        turns: DeviceTurns,
        admission: Admission,
        receiver: FallbackReceiver,
        writer: TrajectoryWriter,
        carry_over: CarryOver,
    ) -> None:
        self.stage = stage
        self.engine = engine
        self.turns = turns
        self.admission = admission
        self.receiver = receiver
        self.writer = writer
        self.carry_over = carry_over
        self.weights: WeightsId | None = None
        # Newer weights that wait until this generator has the device.
        self.arrived: Weights | None = None
        self.environment_failed = False
        self._waiting_for = _WEIGHTS
        # Seconds, weighted by the share of slots that are free because the bound admits no group.
        self.starved = self.stage.value("starved_ms") / 1000
        # Time of the last update of the status record about requests in flight, and their tokens then.
        self.t_shown = 0.0
        self.tokens_shown = 0

    def run(self) -> None:
        """Runs until asked to drain."""
        # When draining, do not wait for in-flight requests: that may take minutes.
        while not self.stage.draining and self.stage.wait(self._ready, why=lambda: self._waiting_for):
            began = time.monotonic()
            with self.stage.busy("generate"):
                self._submit()
                starved_share = self.admission.starved_share(self.engine.in_flight)
                self._collect()
            self.starved += starved_share * (time.monotonic() - began)
            self._commit()
            assert self.weights is not None
            self.carry_over.store_if_due(self.weights.incarnation)

    def _submit(self) -> None:
        assert self.weights is not None
        requests = self.admission.requests(self.weights.policy_version, self.engine.in_flight)
        for source, group in groupby(requests, key=lambda request: request.source):
            self.engine.submit(list(group), self.writer.sampling[source])

    def _collect(self) -> None:
        finished = self.engine.collect(_COLLECT_SECONDS)
        for trajectory in finished:
            self.admission.groups.add(trajectory)
            if (error := trajectory.response.environment_error) is not None:
                if not self.environment_failed:
                    self.environment_failed = True
                    name = self.stage.config.by_source()[trajectory.request.source].environment.name
                    self.stage.log(
                        f"generator {self.stage.replica}: environment {name} raised {error}; that trajectory is an "
                        "error, and later ones are counted without a message"
                    )
                self.stage.update_status(environment_errors=self.stage.value("environment_errors") + 1)
        if finished:
            self.stage.awaits_engine = False
            self.stage.update_status()

    def _commit(self) -> None:
        """Commits the finished groups; in sync mode, once all groups of the step are finished."""
        by_step = self.admission.by_step
        trajectories = [] if by_step and self.engine.in_flight else self.admission.groups.take()
        if not trajectories:
            self._show_in_flight()
            return
        failpoint("generate.before_commit")
        with self.stage.busy("commit"):
            num_tokens = self.writer.append(trajectories)
            if by_step or self.stage.config.staleness.too_old == "wait":
                # In sync mode the other stages wait for this share of the step. With `wait`, the trainer waits only for
                # groups that it finds in flight or committed, so no group may be neither.
                self.writer.flush()
        self.stage.update_status(rollouts=self.writer.rows, tokens=self.stage.value("tokens") + num_tokens)
        self._show_in_flight()

    def _show_in_flight(self) -> None:
        # An empty engine is shown at once, because the generator may wait for the trainer next.
        if self.engine.in_flight and time.monotonic() - self.t_shown < _SHOW_SECONDS:
            return
        self.t_shown = time.monotonic()
        groups, tokens = self.admission.groups, self.carry_over.tokens_in_flight
        if tokens != self.tokens_shown:
            # New tokens are progress, even if no response has ended.
            self.tokens_shown = tokens
            self.stage.advance()
        self.stage.update_status(
            requests_in_flight=self.engine.in_flight,
            groups_in_flight=len(groups),
            tokens_in_flight=tokens,
            starved_ms=round(1000 * self.starved),
            oldest_version_in_flight=groups.oldest_version,
            t_oldest_in_flight=groups.t_oldest,
        )

    def _ready(self) -> bool:
        # An engine could take weights again and again and never finish a request. While it has requests in flight,
        # only finished ones count as progress.
        self.stage.awaits_engine = self.engine.in_flight > 0
        self._look_for_weights()
        if self.arrived is None and not self._has_work():
            self._waiting_for = self._why_no_work()
            self.turns.end()
            return False
        if not self.turns.begin():
            self._waiting_for = _DEVICE
            return False
        if self.arrived is None:
            return True
        weights, self.arrived = self.arrived, None
        self._update_weights(weights)
        if self._has_work():
            return True
        self._waiting_for = self._why_no_work()
        return False

    def _why_no_work(self) -> str:
        if self.weights is None or self.weights.policy_version < self.admission.newest_version:
            return _WEIGHTS
        return _ROOM

    def _has_work(self) -> bool:
        if self.weights is None:
            return False
        if self.engine.in_flight or self.admission.waiting:
            return True
        return self.admission.has_room(self.weights.policy_version)

    def _look_for_weights(self) -> None:
        if self.arrived is not None or not self.engine.accepts_weights:
            return
        try:
            self.arrived = self.receiver.poll(self.weights)
        except WeightsCorrupt as error:
            kept = "no weights yet" if self.weights is None else f"version {self.weights.policy_version}"
            self.stage.log(f"generator {self.stage.replica} continues with {kept}: {error}")

    def _update_weights(self, weights: Weights) -> None:
        if weights.live is not None and not weights.live.join():
            return
        if self.weights is None or self.weights.incarnation != weights.id.incarnation:
            previous = None if self.weights is None else self.weights.incarnation
            self.carry_over.begin(weights.id.incarnation, previous)
        with self.stage.busy("update_weights"):
            try:
                pause_seconds = self.engine.update_weights(weights)
            except WeightsNotReceived as error:
                self.stage.log(f"generator {self.stage.replica} waits for another push: {error}")
                return
        failpoint("generate.before_acknowledgement")
        self.weights = weights.id
        if weights.manifest.max_staleness is not None:
            self.admission.max_staleness = weights.manifest.max_staleness
        fingerprint = weights.manifest.fingerprint
        assert fingerprint is not None
        # The acknowledgement that sync_weights looks for.
        self.stage.update_status(
            now=True,
            policy_version=weights.id.policy_version,
            incarnation=weights.id.incarnation,
            t_updated=time.time(),
            # Its successor repeats this record.
            acknowledged_by=self.stage.process,
            weights_digest=fingerprint.digest,
            weights_route=self.receiver.last_route,
            pause_seconds=pause_seconds,
        )
        self.stage.metrics.log(
            incarnation=weights.id.incarnation,
            policy_version=weights.id.policy_version,
            pause_seconds=pause_seconds,
            **{f"delivery/{self.receiver.last_route}/seconds": time.time() - weights.id.t_offered},
        )
        self._probe(weights)
        self.stage.on_version(weights.id.policy_version)

    def _probe(self, weights: Weights) -> None:
        """Raises an alarm if the engine's log-probabilities under this version differ from the trainer's."""
        probe = weights.manifest.probe
        if probe is None:
            return
        config = self.stage.config
        with self.stage.busy("probe"):
            logprobs = self.engine.next_logprobs(probe.tokens, NUM_LOGPROBS)
        if not logprobs:
            return
        difference, _ = largest_difference(probe, logprobs)
        tolerance = tolerance_between(config.compute_dtype, config.generation_dtype)
        alarms = self.stage.value("probe_alarms")
        if (wrong := alarm(probe, logprobs, tolerance)) is not None:
            alarms += 1
            sentence = (
                f"generator {self.stage.replica} and the trainer disagree about version "
                f"{weights.id.policy_version}: {wrong}"
            )
            self.stage.log(f"ALARM: {sentence}")
            self.stage.emit_event("probe.alarm", generator=self.stage.replica, sentence=sentence)
        self.stage.update_status(probe_difference=difference, probe_alarms=alarms)
        self.stage.metrics.log(
            incarnation=weights.id.incarnation, policy_version=weights.id.policy_version, probe_difference=difference
        )
