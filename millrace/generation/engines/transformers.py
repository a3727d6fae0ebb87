"""Generation with Hugging Face `transformers`: causal language models with a key-value cache, any device, no server.

                  ┌───────────────── a token of each row ─────────────────┐
                  ▼                                                       │
submit ─► waiting ─► prefill ─┬─► logits ─► draw ─► ended? ─no─► rows ─► decode
             ▲                │                       │ yes               │
             │                └───────────────────────┼───────────────────┘
             └── not keep_cache: update_weights       ▼
                                                   collect

The batch changes between two tokens: rows that end leave it, and requests that were submitted enter it. So no response
waits for the longest. New weights arrive between two tokens as well. Rows keep their caches, or with
`keep_cache=False` enter again from their prompts and the tokens that they have (docs/decisions/06). A LoRA
adapter is merged into the weights when it arrives.
"""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millrace.generation.engines.base import Engine, check_names
from millrace.generation.engines.kv_rows import KvRows
from millrace.generation.engines.packed_linears import pack_linears
from millrace.generation.engines.sampling import StopCriteria, draw, uniforms
from millrace.models.modules import ExpertRecorder, call_at_each_layer, move
from millrace.types import FinishReason, Request, Response, Sampling, Trajectory
from millrace.weights.adapter import Adapter, merged, peft_names
from millrace.weights.base import Weights


@dataclass(kw_only=True, slots=True)
class _Row:
    """A request in flight."""

    request: Request
    sampling: Sampling
    criteria: StopCriteria
    limit: int
    """New tokens at most."""
    t_started: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[tuple[int, int]] = field(default_factory=list)
    # There may be thousands for each token: four bytes each, not a Python object.
    kept_tokens: "array[int]" = field(default_factory=lambda: array("i"))
    kept_counts: list[int] = field(default_factory=list)
    experts: list[torch.Tensor] = field(default_factory=list)
    """[tokens, layers, k] uint16 of each forward pass: the experts that computed the tokens of `text` first."""

    @property
    def text(self) -> tuple[int, ...]:
        """All that the next token follows."""
        return (*self.request.prompt_tokens, *self.request.response_tokens, *self.tokens)

    @property
    def position(self) -> int:
        """Place of the next token in the response, given tokens included."""
        return len(self.request.response_tokens) + len(self.tokens)

    def add(self, token: int, logprob: float, kept: Sequence[int], policy_version: int) -> None:
        """`kept` are the ids that the token was drawn from, none if nothing was truncated."""
        if not self.version_spans or self.version_spans[-1][0] != policy_version:
            self.version_spans.append((policy_version, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if kept:
            self.kept_tokens.extend(kept)
            self.kept_counts.append(len(kept))

    def record(self, experts_TLK: torch.Tensor) -> None:
        """Adds the experts of the last T tokens of `text`, without those that were recorded before new weights came."""
        num_new = len(self.text) - sum(map(len, self.experts))
        # A copy: the whole tensor holds other rows too.
        self.experts.append(experts_TLK[len(experts_TLK) - num_new :].clone())

    def trajectory(self, finish_reason: FinishReason) -> Trajectory:
        response = Response(
            tokens=tuple(self.tokens),
            rollout_logprobs=tuple(self.logprobs),
            version_spans=tuple(self.version_spans),
            finish_reason=finish_reason,
            kept_tokens=tuple(self.kept_tokens),
            kept_counts=tuple(self.kept_counts),
            routed_experts=torch.cat(self.experts).numpy().tobytes() if self.experts else b"",
        )
        return Trajectory(request=self.request, response=response, t_started=self.t_started, t_finished=time.time())


class TransformersEngine(Engine):
    """A causal language model with its tokenizer.

    A response depends on its request and the weights. Other requests change the rounding only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_version: int = 0,
        *,
        stop_token_ids: Sequence[int] = (),
        records_experts: bool = False,
        keep_cache: bool = True,
        on_progress: Callable[[], None] | None = None,
    ) -> None:
        """`model` belongs to the engine: a fused optimizer that trained it would not be noticed (`pack_linears`).

        `stop_token_ids`, by default the tokenizer's end-of-sequence token, are for requests that name none.
        `records_experts`: whether responses say which experts computed each token; only for mixtures of experts.
        `on_progress` is called at each layer of a pass: many prompts together may take minutes.
        """
        self.model = model
        pack_linears(model)
        if on_progress is not None:
            call_at_each_layer(model, on_progress)
        self.policy_version = policy_version
        self.keep_cache = keep_cache
        self._device: torch.device = model.device
        self.vocab_size: int = model.config.vocab_size
        self._tokenizer = tokenizer
        self._ends = stop_token_ids or [tokenizer.eos_token_id]
        # By sampling, whose limit does not matter here.
        self._criteria: dict[Sampling, StopCriteria] = {}
        self._recorder = ExpertRecorder(model) if records_experts else None
        # Row i of the cache is that of `_rows[i]`, and holds all its tokens but the newest.
        self._cache = KvRows(model, self._recorder)
        self._rows: list[_Row] = []
        self._waiting: list[_Row] = []
        self._base: dict[str, torch.Tensor] = {}
        """Copies of the weights that have an adapter, without it, on the CPU; empty before the first adapter."""

    @property
    def in_flight(self) -> int:
        return len(self._rows) + len(self._waiting)

    @property
    def tokens_in_flight(self) -> int:
        return sum(len(row.tokens) for row in self._rows + self._waiting)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        now = time.time()
        without_limit = replace(sampling, max_new_tokens=0)
        if without_limit not in self._criteria:
            ends = sampling.stop_token_ids or self._ends
            self._criteria[without_limit] = StopCriteria(self._tokenizer, sampling.stop, ends)
        criteria = self._criteria[without_limit]
        for request in requests:
            limit = sampling.max_new_tokens - len(request.response_tokens)
            row = _Row(request=request, sampling=sampling, criteria=criteria, limit=limit, t_started=now)
            self._waiting.append(row)

    def collect(self, seconds: float) -> list[Trajectory]:
        # Not at the start: a trainer of the same model may have changed it since.
        if self.model.training:
            self.model.eval()
        deadline = time.monotonic() + seconds
        finished: list[Trajectory] = []
        while self.in_flight and not finished:
            finished = self._next_tokens()
            if time.monotonic() >= deadline:
                break
        return finished

    def interrupt(self) -> list[Trajectory]:
        trajectories = [row.trajectory("unfinished") for row in self._rows + self._waiting]
        self._rows, self._waiting = [], []
        self._cache.clear()
        return trajectories

    def update_weights(self, weights: Weights) -> float:
        parameters = dict(self.model.named_parameters())
        check_names({name: parameter.shape for name, parameter in parameters.items()}, weights)
        started = time.monotonic()
        with torch.no_grad():
            if weights.manifest.adapter is not None:
                self._merge(weights.manifest.adapter, weights.tensors)
            else:
                self._base = {}
                for name, parameter in parameters.items():
                    parameter.copy_(weights.tensors[name])
        self.policy_version = weights.id.policy_version
        if not self.keep_cache:
            self._cache.clear()
            self._rows, self._waiting = [], self._rows + self._waiting
        return time.monotonic() - started

    def _merge(self, adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> None:
        """Merges the adapter into copies of the base weights, so that no rounding adds up from version to version."""
        adapted = {name: weight for name, weight in self.model.named_parameters() if adapter.adapts(name)}
        self._base = self._base or {name: weight.to("cpu", copy=True) for name, weight in adapted.items()}
        for name, weight in adapted.items():
            down, up = peft_names(name)
            weight.copy_(merged(self._base[name], tensors[down], tensors[up], adapter.scaling))

    @torch.inference_mode()
    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        self.model.eval()
        cache = KvRows(self.model, self._recorder)
        *earlier, newest = tokens
        logits_1V = cache.append([tuple(earlier or tokens)])
        if earlier:
            logits_1V = cache.decode([newest])
        best = torch.log_softmax(logits_1V[0].float(), dim=-1).topk(min(most, self.vocab_size))
        return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def sleep(self) -> None:
        self._cache = KvRows(self.model, self._recorder)
        move(self.model, torch.device("cpu"))

    def wake(self) -> None:
        move(self.model, self._device)

    def close(self) -> None:
        """Does nothing: it runs in the caller's process."""

    @torch.inference_mode()
    def _next_tokens(self) -> list[Trajectory]:
        """Samples one token for each request in flight. Returns those that ended with it."""
        logits = []
        if self._rows:
            logits.append(self._cache.decode([row.tokens[-1] for row in self._rows]))
            self._record(self._rows)
        if self._waiting:
            logits.append(self._cache.append([row.text for row in self._waiting]))
            self._record(self._waiting)
            self._rows, self._waiting = self._rows + self._waiting, []
        rows = self._rows
        self._draw(torch.cat(logits))
        ended: dict[int, Trajectory] = {}
        for i, row in enumerate(rows):
            finish_reason = row.criteria.end(row.tokens, row.limit)
            if finish_reason is not None:
                ended[i] = row.trajectory(finish_reason)
        if ended:
            self._rows = [rows[i] for i in self._cache.remove(list(ended))]
        return list(ended.values())

    def _draw(self, logits_BV: torch.Tensor) -> None:
        """Adds a token to each row. Rows that differ at most in their limits are drawn together."""
        alike: dict[StopCriteria, list[int]] = {}
        for i, row in enumerate(self._rows):
            alike.setdefault(row.criteria, []).append(i)
        for indices in alike.values():
            rows = [self._rows[i] for i in indices]
            uniforms_B = uniforms([row.request.seed for row in rows], [row.position for row in rows])
            drawn = draw(logits_BV if len(alike) == 1 else logits_BV[indices], rows[0].sampling, uniforms_B)
            kept_B = drawn.kept or [[]] * len(rows)
            for row, token, logprob, kept in zip(
                rows, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), kept_B, strict=True
            ):
                row.add(token, logprob, kept, self.policy_version)

    def _record(self, rows: Sequence[_Row]) -> None:
        """Adds the experts of the last forward pass to these rows."""
        for row, experts_TLK in zip(rows, self._cache.experts, strict=bool(self._recorder)):
            row.record(experts_TLK)
