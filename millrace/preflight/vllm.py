"""Checks whether vLLM can start with a config, before anything of a run exists.

    check_vllm ──stdin: Question──► python -m millrace.preflight.vllm ─► vLLM's own check of model and arguments
       ▲                                       │
       └──── stdout: null, or an InputError ───┘

The child process takes about ten seconds, most of it for importing vLLM. No weights are loaded; a GPU without room for
them is reported by the generator when it starts.
"""

import difflib
import json
import os
import re
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from configs.sources import key_in
from millrace.errors import InputError
from millrace.preflight.child import ask, serve

_LONGEST_REASON = 300
_KEY = "generation.engine_args."


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The requests of a source to vLLM."""

    max_new_tokens: int
    prompts: Sequence[Sequence[str]]
    """(text, answer) of each training prompt if bootstrap will make the model; empty otherwise."""
    longest_prompt: int | None
    """Tokens of the longest training prompt; None if bootstrap will make the tokenizer."""
    environment: str | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """The settings that vLLM will be started with."""

    folder: str | None
    """Hugging Face folder of the model; None if bootstrap will make it, by the recipe `tiny`."""
    tiny: Mapping[str, Any]
    dtype: str
    """Number format of the weights in generators."""
    engine_args: Mapping[str, Any]
    replicas: int
    requests: Mapping[str, Requests]
    """By source."""
    colocated: bool = False
    """Whether the trainer uses the device while vLLM sleeps."""
    truncates: bool = False
    """Whether `generation.top_p` or `top_k` of any source leave a part of the vocabulary out."""
    adapters: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's arguments for versions that are LoRA adapters; none if they are not."""


def check_vllm(question: Question) -> None:
    """Raises InputError about the first thing that keeps vLLM from starting.

    Takes about ten seconds and prints that. Raises StageDied with vLLM's last lines if it crashes without an answer.
    """
    if find_spec("vllm") is None:
        raise InputError(
            key="generation.engine",
            read="vllm, but the package vllm is not installed here",
            expected="`make vllm` or `make gpu` to have been run once, or another engine",
        )
    print("checking generation.engine_args with vLLM …", flush=True)
    started = time.monotonic()
    ask("millrace.preflight.vllm", asdict(question), "vLLM", fork=False)
    print(f"vLLM accepts them, after {time.monotonic() - started:.0f} s", flush=True)


def answer(values: Mapping[str, Any]) -> None:
    """The child process, for a Question as JSON. Raises InputError. Imports vLLM into this process."""
    from configs.recipe import Recipe
    from configs.task import EnvironmentConfig
    from millrace.bootstrap.tiny_model import Lesson, bootstrap
    from millrace.generation.engines.vllm.startup import ENVIRONMENT
    from millrace.types import Prompt

    requests = {name: Requests(**each) for name, each in values["requests"].items()}
    question = Question(**{**values, "requests": requests})
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(question.folder or temporary)
        if question.folder is None:
            recipe = Recipe(**{**question.tiny, "max_steps": 0})
            lessons = {
                name: Lesson(
                    prompts=[
                        Prompt(prompt_id=text, text=text, answer=answer, source="") for text, answer in each.prompts
                    ],
                    recipe=recipe,
                    max_new_tokens=each.max_new_tokens,
                    environment=EnvironmentConfig(name=each.environment),
                )
                for name, each in requests.items()
            }
            bootstrap(lessons, recipe, folder, seed=0, report=lambda step, line: print(line))
        for mistake in _mistakes(question, folder):
            raise mistake


def _mistakes(question: Question, folder: Path) -> Iterator[InputError]:
    """Yield mistakes in the arguments' names, then those that vLLM reports, then those that only a run would show."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    from millrace.generation.engines.vllm.startup import vllm_arguments
    from millrace.generation.environments.base import environment_class

    names = sorted(field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_"))
    for name in sorted(question.engine_args.keys() - set(names)):
        expected = " or ".join(difflib.get_close_matches(name, names)) or "one of its AsyncEngineArgs"
        yield InputError(f"no argument of vLLM {vllm.__version__}", key=f"{_KEY}{name}", expected=expected)
    if question.colocated and not current_platform.is_sleep_mode_available():
        read = f"true, and vLLM can't sleep on the device it finds here, {current_platform.device_name}"
        yield InputError(read, key="placement.colocated", expected="a GPU, or false")
    environments = [environment_class(each.environment) for each in question.requests.values()]
    arguments = vllm_arguments(
        folder,
        dtype=question.dtype,
        engine_args=question.engine_args,
        reads_text=any(environment is not None and environment.stop for environment in environments),
        sleeps=question.colocated,
        truncates=question.truncates,
        adapters=question.adapters,
    )
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
    except Exception as error:  # noqa: BLE001 — vLLM raises errors of any kind; each becomes a user error
        yield _refusal(error, question)
        return
    if config.model_config.runner_type != "generate":
        yield _unfit(question, "which vLLM does not generate text with", "a causal language model")
    if config.model_config.hf_config.model_type == "gpt_oss":
        # It copies them without the weight loaders that a reload waits for; on a CPU it has no kernel for them either.
        read = "a gpt_oss model, whose experts and sinks vLLM would keep at each update"
        yield _unfit(question, read, "generation.engine transformers (docs/models.md)")
    yield from _quantization(config)
    if question.adapters and not _serves_adapters(config.model_config):
        read = "set, and vLLM serves no adapters of this kind of model"
        expected = "null, weights.transport direct, which sends merged weights, or generation.engine transformers"
        yield InputError(read, key="training.lora.rank", expected=expected)
    yield from _attention(config, question)
    yield from _context(config, question, folder)
    yield from _memory(config, question)


def _serves_adapters(model_config: Any) -> bool:
    from vllm.model_executor.models import ModelRegistry, supports_lora

    model_class, _ = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
    return bool(supports_lora(model_class))


def _refusal(error: Exception, question: Question) -> InputError:
    """Make an error of vLLM's reason and its arguments. A pydantic error has several, each with its location."""
    from pydantic import ValidationError

    details = error.errors() if isinstance(error, ValidationError) else [{"loc": (), "msg": str(error), "input": None}]
    reasons = [
        (_named(detail, question.engine_args), str(detail["msg"]).removeprefix("Value error, ")) for detail in details
    ]
    names, text = next((reason for reason in reasons if reason[0]), reasons[0])
    # Only the first sentence: the rest may be pages of architectures and advice.
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z])|\n", text.strip())[0].rstrip(".")
    reason = textwrap.shorten(sentence, _LONGEST_REASON, placeholder=" …") or type(error).__name__
    if names:
        settings = [f"{_KEY}{name} is {json.dumps(question.engine_args[name])}" for name in names]
        key, _, read = " and ".join(settings).partition(" is ")
        return InputError(f"{read}, which vLLM refuses: {reason}", key=key)
    also = ", or one of generation.engine_args" if question.engine_args else ""
    return _unfit(question, f"which vLLM refuses{also}: {reason}", None)


def _named(detail: Mapping[str, Any], engine_args: Mapping[str, Any]) -> list[str]:
    """Return the user's arguments that an error concerns, by its location, its input value, or words of its message."""
    value = json.dumps(detail["input"], default=str)
    words = re.sub(r"[-_]", " ", detail["msg"].lower())
    return (
        [str(part) for part in detail["loc"] if part in engine_args]
        or [name for name, argument in engine_args.items() if detail["loc"] and value in json.dumps(argument)]
        or [name for name in engine_args if name.replace("_", " ") in words]
    )


def _quantization(config: Any) -> Iterator[InputError]:
    """Each version arrives in full precision, so vLLM has to quantize at each reload."""
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.platforms import current_platform

    if config.quant_config is None:
        return
    key, name = f"{_KEY}quantization", json.dumps(config.model_config.quantization)
    if not isinstance(config.quant_config, OnlineQuantizationConfig):
        read = f"{name}, which can't quantize the weights of an update"
        yield InputError(read, key=key, expected=f"one of {', '.join(ONLINE_QUANT_SHORTHAND_NAMES)}")
    elif current_platform.is_cpu():
        try:
            _quantize_one_layer(config)
        except Exception as error:  # noqa: BLE001 — vLLM raises errors of any kind for kernels that it does not have
            read = f"{name}, which vLLM does not compute on this CPU: {textwrap.shorten(str(error), _LONGEST_REASON)}"
            yield InputError(read, key=key, expected="fp8_per_channel, or a GPU")


def _quantize_one_layer(config: Any) -> None:
    """Quantize and compute a layer. vLLM's CPU build reports some missing kernels only then."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.utils.torch_utils import set_default_torch_dtype

    model = config.model_config
    size = model.get_hidden_size()
    with (
        tempfile.TemporaryDirectory() as folder,
        set_current_vllm_config(config),
        set_default_torch_dtype(model.dtype),
        torch.no_grad(),
    ):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        try:
            parallel_state.initialize_model_parallel()
            layer = ReplicatedLinear(size, size, bias=False, quant_config=config.quant_config, prefix="mlp.down_proj")
            layer.weight.weight_loader(layer.weight, torch.ones(size, size))
            layer(torch.ones(1, size))
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _attention(config: Any, question: Question) -> Iterator[InputError]:
    """CPU attention kernels support few head sizes, and fail only at the first token."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    if model.is_attention_free:
        return
    head_size, block_size = model.get_head_size(), question.engine_args.get("block_size")
    with set_current_vllm_config(config):
        backend = get_attn_backend(head_size, model.dtype, config.cache_config.cache_dtype, use_mla=model.use_mla)
    attention = f"vLLM's attention {backend.get_name()}"
    if not backend.supports_head_size(head_size):
        supported = ", ".join(map(str, backend.get_supported_head_sizes()))
        read = f"with attention heads of {head_size} features, which {attention} does not know"
        yield _unfit(question, read, f"one of {supported}")
    if block_size is not None and not backend.supports_block_size(block_size):
        supported = ", ".join(map(str, backend.get_supported_kernel_block_sizes()))
        yield InputError(block_size, key=f"{_KEY}block_size", expected=f"what {attention} knows: {supported}")


def _context(config: Any, question: Question, folder: Path) -> Iterator[InputError]:
    from millrace.models.loading import load_tokenizer

    context = config.model_config.max_model_len
    for source, requests in question.requests.items():
        longest = requests.longest_prompt
        if longest is None:
            texts = [text for text, _ in requests.prompts]
            longest = max(len(tokens) for tokens in load_tokenizer(folder)(texts)["input_ids"])
        needed = longest + requests.max_new_tokens
        if needed > context:
            limit = key_in(source, "generation.max_new_tokens")
            read = f"{context} tokens, the longest prompt has {longest} and {limit} is {requests.max_new_tokens}"
            key = f"{_KEY}max_model_len" if "max_model_len" in question.engine_args else "the model's context"
            yield InputError(read, key=key, expected=f"room for both, {needed} tokens")


def _memory(config: Any, question: Question) -> Iterator[InputError]:
    """On a CPU the cache competes with all other processes for memory. On a GPU vLLM checks the memory itself."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    if not current_platform.is_cpu():
        return
    cache, node = config.cache_config, get_memory_node_info(get_visible_memory_node()[0])
    workers = question.replicas * config.parallel_config.world_size
    share, needed = cache.gpu_memory_utilization, cache.kv_cache_memory_bytes
    name, read = "kv_cache_memory_bytes", ""
    if needed is None:
        needed = share * node.total_memory
        name, read = "gpu_memory_utilization", f"{share} of all memory: "
    if workers * needed > node.available_memory:
        each = f" for each of {workers} workers" if workers > 1 else ""
        read += f"{needed / 2**30:.2f} GiB{each}, and {node.available_memory / 2**30:.2f} GiB are free"
        yield InputError(read, key=f"{_KEY}{name}", expected=f"{_KEY}kv_cache_memory_bytes of less")


def _unfit(question: Question, read: str, expected: str | None) -> InputError:
    """Make the error about the model."""
    subject = "null, which makes a model" if question.folder is None else f"{question.folder},"
    return InputError(f"{subject} {read}", key="model.path", expected=expected)


if __name__ == "__main__":
    serve(answer)
