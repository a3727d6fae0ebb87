"""Generation with vLLM: many requests at a time, batched token by token, on a CPU or on GPUs.

    submit ─► an asyncio task per request ─► AsyncLLM ─► engine core ─► workers (one per tensor-parallel rank)
    collect ◄─ queue ◄─ finished ◄──────────────┘                         ▲
    interrupt: AsyncLLM ends each request with the tokens that the core has reported
    update_weights: pause, requests kept ─► new salt ─► workers load from shared memory, or the trainer's calls are
                    served (millrace/weights/live) ─► resume
    update_weights, a LoRA adapter: loaded next to the others (adapters.py); requests in flight keep theirs

Weights change between two tokens of a request: its tokens are kept. Its key-value cache is kept too, or with
`keep_cache=False` recomputed under the new weights (docs/decisions/06). vLLM reports which version drew each token.

Blocks of the prefix cache are found by their tokens and a salt, which each update changes: requests submitted later
share blocks with each other, but never read blocks of older weights.
"""

import asyncio
import math
import os
import queue
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from millrace.errors import WeightsMismatch, WeightsNotReceived
from millrace.generation.engines.base import Engine, check_names, unstarted
from millrace.generation.engines.vllm.startup import ENVIRONMENT, end, vllm_arguments, vllm_processes
from millrace.models.loading import empty_model
from millrace.types import FinishReason, Request, Response, Sampling, Trajectory
from millrace.weights.base import Weights
from millrace.weights.live.calls import INIT, START, UPDATE, LiveTransfer

os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})

# vLLM reads the environment when it is imported.
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from millrace.generation.engines.vllm.adapters import LoadedAdapters

_T = TypeVar("_T")
_LOOK_SECONDS = 1.0
"""How often to check that vLLM is alive while waiting for it."""
_ABORT_SECONDS = 0.01
"""How long to wait for aborted requests before looking for others to abort."""
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "unfinished"}


class VllmEngine(Engine):
    """The model in `folder`. Responses end after one of the tokens `stop_token_ids` unless their sampling names others.

    `arguments` are those of `vllm_arguments`. The start takes some 20 seconds. If vLLM's processes die, waiting
    and later calls raise vLLM's EngineDeadError.
    """

    def __init__(
        self, folder: Path, *, stop_token_ids: Sequence[int], keep_cache: bool = True, **arguments: Any
    ) -> None:
        model = empty_model(folder)
        self.policy_version = 0
        self.keep_cache = keep_cache
        self.vocab_size: int = model.config.vocab_size
        self._ends = list(stop_token_ids)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        engine_args = vllm_arguments(folder, **arguments)
        self._returns_masks: bool = engine_args["return_sampling_mask"]
        self._finished: queue.Queue[Trajectory | Exception] = queue.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._num_requests = 0
        # The salt of the prefix cache. A rolled-back trainer repeats policy versions, with other weights.
        self._num_updates = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        processes_before = vllm_processes()

        async def start() -> AsyncLLM:
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))
            await llm.update_weight_version("0")
            return llm

        self._llm: AsyncLLM = self._call(start()).result()
        self._processes = vllm_processes() - processes_before
        self._adapters = LoadedAdapters(self._llm, engine_args["max_loras"]) if arguments.get("adapters") else None

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._in_flight += len(requests)
        self._loop.call_soon_threadsafe(self._launch, list(requests), sampling)

    def collect(self, seconds: float) -> list[Trajectory]:
        finished: list[Trajectory] = []
        patience = seconds
        while len(finished) < self._in_flight:
            try:
                finished.append(self._next(patience))
            except queue.Empty:
                self._check_alive()
                break
            patience = 0
        if any(trajectory.response.finish_reason == "unfinished" for trajectory in finished):
            raise RuntimeError("vLLM ended a request that was not interrupted")
        self._in_flight -= len(finished)
        return finished

    @property
    def tokens_in_flight(self) -> int:
        states = list(self._llm.output_processor.request_states.values())
        sampled: int = sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer)
        with self._finished.mutex:
            ended = list(self._finished.queue)
        return sampled + sum(len(done.response.tokens) for done in ended if isinstance(done, Trajectory))

    def interrupt(self) -> list[Trajectory]:
        self._run(self._abort_all())
        ended = [self._next(0.0) for _ in range(self._in_flight)]
        self._in_flight = 0
        return [trajectory if trajectory.response.tokens else unstarted(trajectory.request) for trajectory in ended]

    @property
    def accepts_weights(self) -> bool:
        return self._adapters is None or self._adapters.has_room

    def update_weights(self, weights: Weights) -> float:
        version = str(weights.id.policy_version)
        if weights.live is not None:
            started = self._serve(weights.live, version)
        else:
            check_names(self._shapes, weights)
            if weights.shared is None:
                raise ValueError("vLLM's workers are other processes: they need weights in shared memory")
            if (weights.manifest.adapter is None) != (self._adapters is None):
                kinds = ("adapters", "the whole model") if self._adapters is None else ("the whole model", "adapters")
                raise WeightsMismatch(f"version {version} is one of {kinds[0]}, and vLLM was started for {kinds[1]}")
            started = time.monotonic()
            if self._adapters is not None:
                self._run(self._adapters.load(weights))
            else:
                self._run(self._update(weights.shared.to_json(), version))
        self.policy_version = weights.id.policy_version
        return time.monotonic() - started

    def _serve(self, push: LiveTransfer, version: str) -> float:
        """Serves the trainer's calls; returns when the pause began (time.monotonic).

        Raises WeightsNotReceived after an error. If the model may have changed, generation stays paused until the next
        update.
        """
        started = 0.0
        try:
            for method, argument in push.calls():
                if method == START:
                    started = time.monotonic()
                    self._run(self._pause())
                self._run(self._perform(method, argument, version))
        except Exception as error:
            # Whatever it is, the trainer has to know.
            self._check_alive()
            if started:
                self._run(self._give_up())
            push.end(str(error) or repr(error))
            raise WeightsNotReceived(f"version {version} did not arrive: {error}") from error
        self._run(self._llm.resume_generation())
        return started

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=1)
        parameters = self._parameters(sampling, seed=0, logprobs=most)
        completion = self._run(self._complete(tokens, parameters)).outputs[0]
        assert completion.logprobs is not None
        # vLLM always adds the token that it sampled.
        return {token: entry.logprob for token, entry in completion.logprobs[0].items() if (entry.rank or 0) <= most}

    def sleep(self) -> None:
        # Level 1 keeps the weights in the CPU's memory. Level 2 drops them, but not every wake brings new ones: a group
        # that replaces a dropped one is generated under the same version.
        self._run(self._llm.sleep(level=1))

    def wake(self) -> None:
        self._run(self._llm.wake_up())

    def close(self) -> None:
        # vLLM's own tasks first: they would report the end of its processes as a failure.
        self._call(_end_all_tasks()).result()
        self._llm.shutdown()
        if self._adapters is not None:
            self._adapters.close()
            self._adapters = None
        # It ends its core, which ends the workers, unless the core was killed.
        end(self._processes)
        # Its destructor shuts down once more. That fails at the interpreter's exit, so run it now.
        del self._llm
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        call = self._call(work)
        while not wait([call], timeout=_LOOK_SECONDS).done:
            self._check_alive()
        return call.result()

    def _check_alive(self) -> None:
        # When vLLM's core dies, vLLM's callers wait forever.
        if self._llm.errored:
            raise self._llm.dead_error

    def _next(self, seconds: float) -> Trajectory:
        """One that has ended. Raises queue.Empty if there is none within `seconds`, and what went wrong with it."""
        done = self._finished.get(timeout=seconds) if seconds else self._finished.get_nowait()
        if isinstance(done, Exception):
            raise done
        return done

    def _launch(self, requests: list[Request], sampling: Sampling) -> None:
        for request in requests:
            task = self._loop.create_task(self._sample(request, sampling))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _sample(self, request: Request, sampling: Sampling) -> None:
        t_started = time.time()
        try:
            parameters = self._parameters(sampling, request.seed, logprobs=0, num_given=len(request.response_tokens))
            # A response to continue is a new request with a longer prompt. Until the next update its blocks are in the
            # prefix cache.
            output = await self._complete([*request.prompt_tokens, *request.response_tokens], parameters)
            response = self._response(output.outputs[0], truncated=sampling.truncates)
            if self._adapters is not None:
                response = replace(response, version_spans=((self._adapters.version_of(output.lora_request), 0),))
            trajectory = Trajectory(request=request, response=response, t_started=t_started, t_finished=time.time())
        except Exception as error:  # noqa: BLE001 — raised again by `collect`, in the caller's thread
            self._finished.put(error)
        else:
            self._finished.put(trajectory)

    async def _complete(self, tokens: Sequence[int], parameters: SamplingParams) -> RequestOutput:
        self._num_requests += 1
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": str(self._num_updates)}
        newest: AbstractContextManager[LoRARequest | None]
        newest = nullcontext() if self._adapters is None else self._adapters.newest()
        with newest as adapter:
            outputs = self._llm.generate(prompt, parameters, request_id=str(self._num_requests), lora_request=adapter)
            (output,) = [output async for output in outputs]
        return output

    async def _update(self, tensors: dict[str, Any], version: str) -> None:
        # If one of these fails, generation stays paused: nothing is sampled from half-loaded weights.
        await self._pause()
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"tensors": tensors}))
        await self._llm.finish_weight_update(version)
        await self._llm.resume_generation()

    async def _pause(self) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=not self.keep_cache)
        self._num_updates += 1

    async def _give_up(self) -> None:
        # vLLM's workers end an update only by an error in it, or by its success.
        with suppress(Exception):
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info={}))

    async def _perform(self, method: str, argument: Any, version: str) -> None:
        if method == INIT:
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=argument))
        elif method == START:
            await self._llm.start_weight_update()
        elif method == UPDATE:
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=argument))
        else:
            await self._llm.finish_weight_update(version)

    async def _abort_all(self) -> None:
        # More than once: vLLM can't abort a request that is still on its way to it.
        while tasks := set(self._tasks):
            # Each gets its final output here, with the tokens that the core has reported. Any later ones are ignored.
            await self._llm.abort(list(self._llm.output_processor.request_states), internal=True)
            await asyncio.wait(tasks, timeout=_ABORT_SECONDS)

    def _parameters(self, sampling: Sampling, seed: int, logprobs: int, num_given: int = 0) -> SamplingParams:
        temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k or 0
        if self._returns_masks:
            # vLLM then wants a top_k, and no greedy requests: to keep one token is the same.
            greedy = temperature == 0
            temperature, top_p, top_k = (1.0, 1.0, 1) if greedy else (temperature, top_p, top_k or self.vocab_size)
        elif sampling.truncates:
            logprobs = -1
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=sampling.max_new_tokens - num_given,
            seed=seed,
            logprobs=logprobs,
            flat_logprobs=True,
            stop_token_ids=list(sampling.stop_token_ids) or self._ends,
            # vLLM looks for stop texts in the decoded text, so special tokens must be in it.
            stop=list(sampling.stop),
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _response(self, completion: CompletionOutput, *, truncated: bool) -> Response:
        flat = completion.logprobs
        assert isinstance(flat, FlatLogprobs)
        assert completion.weight_versions is not None
        kept = _kept_tokens(completion, flat) if truncated else []
        return Response(
            tokens=tuple(completion.token_ids),
            # The token that was sampled is the first entry of its position.
            rollout_logprobs=tuple(map(flat.logprobs.__getitem__, flat.start_indices)),
            version_spans=tuple((int(span.version), span.start) for span in completion.weight_versions),
            finish_reason=_FINISH_REASONS[str(completion.finish_reason)],
            kept_tokens=tuple(token for ids in kept for token in ids),
            kept_counts=tuple(len(ids) for ids in kept),
        )


async def _end_all_tasks() -> None:
    other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in other_tasks:
        task.cancel()
    await asyncio.gather(*other_tasks, return_exceptions=True)


def _kept_tokens(completion: CompletionOutput, flat: FlatLogprobs) -> list[list[int]]:
    """[R] the token ids that each token was drawn from, where top-p or top-k leave some out.

    vLLM returns masks on a GPU. On a CPU it returns the log-probabilities of the distribution it drew from: minus
    infinity for tokens that were not kept; `plugin.py` leaves most of them out.
    """
    if completion.sampling_mask is not None:
        masks: list[list[int]] = completion.sampling_mask.token_ids
        return masks
    return [
        # The first entry is the token that was sampled, which the others repeat.
        [flat.token_ids[i] for i in range(start + 1, end) if flat.logprobs[i] > -math.inf]
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]
