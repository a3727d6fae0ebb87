"""A judge's model in the scorer's own process, in the place of a service.

submit ─► waiting ─► engine, as many requests at once as `in_flight` ─► answers, in the form of chat completions

One thread owns the engine. Its error is that of every later answer, so the scorer ends with it.
"""

import sys
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.generation import GenerationConfig
from configs.schema import ModelConfig
from configs.task import EndpointConfig, JudgeConfig, PromptsConfig
from millrace.errors import ChatError, ModelFolderError
from millrace.models.weight_files import read_object
from millrace.rewards.services.endpoint import Answer
from millrace.rewards.services.meter import Meter, Prices, Usage
from millrace.types import Prompt, Request, Sampling, Trajectory

if TYPE_CHECKING:
    from millrace.chat.encoder import PromptEncoder
    from millrace.generation.engines.base import Engine

_WAIT_SECONDS = 0.05


class _Asked(NamedTuple):
    body: Mapping[str, Any]
    answer: "Future[Answer]"


class ServedModel:
    """Answers chat completions with the model in `folder`; it has the methods of `Endpoint`.

    Raises ModelFolderError unless the folder has files of a chat model.
    """

    def __init__(self, folder: Path, device: str, judge: JudgeConfig, in_flight: int) -> None:
        _check_folder(folder)
        self.folder = folder
        self._device, self._judge, self._in_flight = device, judge, in_flight
        self._lock = Lock()
        self.meter = Meter(EndpointConfig(), Prices())
        self._waiting: SimpleQueue[_Asked | None] = SimpleQueue()
        """Requests to compute; None ends the thread."""
        self._error: Exception | None = None
        self._num_requests = 0

    def open(self) -> None:
        """Loads the model and starts the thread. Raises ModelFolderError, or ChatError without a chat template."""
        # torch and transformers take seconds to import, and no other reward needs a chat model.
        from millrace.chat.encoder import load_encoder

        encoder = load_encoder(self.folder, ModelConfig(), PromptsConfig(), (), chat=True)
        self._context = self._longest_text()
        self._engine = self._make_engine(encoder)
        self._thread = Thread(target=self._serve, args=(encoder,), name="served model", daemon=True)
        self._thread.start()

    def _make_engine(self, encoder: "PromptEncoder") -> "Engine":
        import torch

        from millrace.generation.engines.factory import make_engine
        from millrace.generation.engines.transformers import TransformersEngine
        from millrace.models.loading import load_model
        from millrace.models.modules import move

        dtype = "bfloat16" if self._device == "cuda" else "float32"
        if self._judge.engine == "vllm":
            config = GenerationConfig(engine="vllm", engine_args=self._judge.engine_args)
            return make_engine(config, self.folder, encoder.tokenizer, dtype=dtype)
        model = load_model(self.folder, dtype)
        move(model, torch.device(self._device))
        return TransformersEngine(model, encoder.tokenizer)

    def _longest_text(self) -> int:
        """Tokens of prompt and answer together, at most."""
        limits = (
            read_object(self.folder / "config.json").get("max_position_embeddings"),
            self._judge.engine_args.get("max_model_len"),
        )
        return min((limit for limit in limits if isinstance(limit, int)), default=sys.maxsize)

    def close(self) -> None:
        """Gives up the requests in flight and ends the thread."""
        self._waiting.put(None)
        self._thread.join()
        self._engine.close()

    def submit(self, path: str, body: Mapping[str, Any]) -> "Future[Answer]":
        """Asks for the completion that `body` describes. The future raises the error that ended the engine."""
        del path
        asked = _Asked(body, Future())
        with self._lock:
            if self._error is None:
                self._waiting.put(asked)
            else:
                asked.answer.set_exception(self._error)
        return asked.answer

    def _serve(self, encoder: "PromptEncoder") -> None:
        computing: dict[int, _Asked] = {}
        try:
            while self._admit(encoder, computing):
                for done in self._engine.collect(_WAIT_SECONDS):
                    # Until it has a result it is among those that get the thread's error.
                    computing[done.request.group_id].answer.set_result(self._completion(encoder, done))
                    del computing[done.request.group_id]
        except Exception as error:  # noqa: BLE001 - it is raised where answers are collected
            with self._lock:
                self._error = error
                waiting = [self._waiting.get() for _ in range(self._waiting.qsize())]
            for asked in (*computing.values(), *filter(None, waiting)):
                asked.answer.set_exception(error)

    def _admit(self, encoder: "PromptEncoder", computing: dict[int, _Asked]) -> bool:
        """Submits waiting requests up to `in_flight`; waits for one while nothing is computed. False once closed."""
        while len(computing) < self._in_flight:
            try:
                asked = self._waiting.get(block=not computing)
            except Empty:
                return True
            if asked is None:
                return False
            self.meter.count_request()
            number = self._num_requests = self._num_requests + 1
            computing[number] = asked
            try:
                self._submit(encoder, number, asked.body)
            except ChatError as error:
                computing.pop(number).answer.set_result(Answer(values=None, status="error", error=str(error)))
        return True

    def _submit(self, encoder: "PromptEncoder", number: int, body: Mapping[str, Any]) -> None:
        """Raises ChatError if the conversation can't be written, or exceeds the context."""
        messages = tuple(body["messages"])
        prompt = Prompt(prompt_id=str(number), text="", answer="", source="judge", messages=messages)
        tokens, longest = encoder.encode(prompt).tokens, self._context - self._judge.max_tokens
        if len(tokens) > longest:
            raise ChatError(f"{len(tokens):,} tokens", expected=f"at most {longest:,}")
        sampling = Sampling(
            temperature=self._judge.temperature or 0.0,
            top_p=1.0,
            max_new_tokens=self._judge.max_tokens,
            stop_token_ids=encoder.stop_token_ids,
        )
        self._engine.submit([Request(group_id=number, sample_index=0, prompt_tokens=tokens, seed=0)], sampling)

    def _completion(self, encoder: "PromptEncoder", done: Trajectory) -> Answer:
        num_read, written = len(done.request.prompt_tokens), done.response.tokens
        self.meter.count_tokens(Usage(input_tokens=num_read, output_tokens=len(written)))
        text = encoder.tokenizer.decode(list(written), skip_special_tokens=True)
        values = {
            "choices": [
                {"message": {"role": "assistant", "content": text}, "finish_reason": done.response.finish_reason}
            ],
            "usage": {"prompt_tokens": num_read, "completion_tokens": len(written)},
        }
        return Answer(values=values, seconds=done.t_finished - done.t_started)


def _check_folder(folder: Path) -> None:
    names = ("config.json", "tokenizer_config.json")
    missing = [name for name in names if not (folder / name).is_file()]
    is_chat = missing or (folder / "chat_template.jinja").is_file() or "chat_template" in read_object(folder / names[1])
    if missing or not is_chat:
        read = f"'{folder}', which has no {missing[0] if missing else 'chat template'}"
        raise ModelFolderError(read, key="scoring.model", expected="the folder of a chat model")
