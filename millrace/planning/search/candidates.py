"""Configs that a search looks at: the given one with other splits, sizes, places and bounds.

layouts     GPUs of the trainer (data × tensor) and of the generators (replicas × tensor), or both on the same
schedules   places per generator, staleness bound, of a layout that is worth it
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from configs.schema import RunConfig
from configs.stored import put_key
from millrace.planning.costs.campaign import generator_gpus, num_gpus
from millrace.planning.search.machine import Machine

_GENERATOR_TENSORS = (1, 2, 4, 8, 16, 32)
_TRAINER_TENSORS = (1, 2, 4, 8)
_LEAST_RESPONSES = 4
"""Of the greatest length, that a microbatch has room for."""
_EVEN = 4
"""A trainer of more GPUs than a host has takes a multiple of so many, so that its hosts have as many each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A config, and in which keys it differs from the given one."""

    config: RunConfig
    overrides: Mapping[str, Any]
    """Dotted key → value."""

    @property
    def trainer_gpus(self) -> int:
        """One per rank."""
        parallel = self.config.training.parallel
        return parallel.data * parallel.tensor

    @property
    def generator_tensor(self) -> int:
        """GPUs of one generator."""
        return generator_gpus(self.config)

    @property
    def generator_gpus(self) -> int:
        """Of all generators."""
        return self.config.generation.replicas * self.generator_tensor

    @property
    def gpus(self) -> int:
        """Colocated stages share theirs."""
        return num_gpus(self.config)

    @property
    def layout(self) -> tuple[object, ...]:
        """What distinguishes its use of the machine from another's; places, bound and batch aside."""
        config, parallel = self.config, self.config.training.parallel
        return (
            config.pipeline.mode,
            config.placement.colocated,
            parallel.data,
            parallel.tensor,
            config.generation.replicas,
            self.generator_tensor,
        )


def differing(base: RunConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Of `overrides`, those that change something in `base`."""
    return {key: value for key, value in overrides.items() if _value(base, key) != value}


def values_of(config: RunConfig) -> dict[str, Any]:
    """What was set of a config, as JSON: what a file with it would hold."""
    return config.model_dump(mode="json", exclude_unset=True)


def changed(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Candidate | None:
    """The config of `values` with `overrides`; None if they can't be combined."""
    found = copy.deepcopy(dict(values))
    for key, value in overrides.items():
        put_key(found, key, value)
    try:
        return Candidate(config=RunConfig.model_validate(found), overrides=overrides)
    except ValidationError:
        return None


def layouts(config: RunConfig, machine: Machine, gpus: int | None, batches: Sequence[int]) -> Iterator[Candidate]:
    """Every split of the machine: asynchronous if the config is, synchronous, and by turns on the same GPUs."""
    values = values_of(config)
    modes = dict.fromkeys((config.pipeline.mode, "sync"))
    for batch in dict.fromkeys((config.training.groups_per_step, *batches)):
        splits = _splits(machine, gpus, batch) if gpus is not None else _replicas(batch)
        for split in splits:
            for mode in modes:
                colocated = bool(split.get("placement.colocated"))
                if colocated and mode != "sync":
                    continue
                share = max(1, batch // int(str(split["generation.replicas"])))
                overrides = {
                    "training.groups_per_step": batch,
                    "pipeline.mode": mode,
                    "generation.groups_per_batch": share,
                    "placement.colocated": colocated,
                    **split,
                }
                candidate = changed(values, _places(config, overrides))
                if candidate is not None:
                    yield candidate


def schedules(config: RunConfig, layout: Candidate, bounds: Sequence[int]) -> Iterator[Candidate]:
    """A layout with other places per generator and other staleness bounds; in sync mode there is nothing to choose."""
    if layout.config.pipeline.mode == "sync":
        yield layout
        return
    values = values_of(config)
    share = max(1, layout.config.training.groups_per_step // layout.config.generation.replicas)
    for bound in bounds:
        # More places than groups that the bound admits would stay empty.
        factors = dict.fromkeys((1.0, 2.0, 1.5, 0.5, float(bound + 1)))
        places = dict.fromkeys(max(1, round(share * factor)) for factor in factors if factor <= bound + 1)
        for number in places:
            overrides = {
                **layout.overrides,
                "staleness.max_staleness": bound,
                "generation.groups_per_batch": number,
            }
            candidate = changed(values, _places(config, overrides))
            if candidate is not None:
                yield candidate


def smaller_trainer(config: RunConfig, candidate: Candidate) -> Candidate | None:
    """The candidate with less memory per trainer rank: with activation checkpointing, then with microbatches of half
    the tokens. None if there is no more to be had."""
    training = candidate.config.training
    if not training.activation_checkpointing:
        return changed(values_of(config), {**candidate.overrides, "training.activation_checkpointing": True})
    tokens = training.max_tokens_per_microbatch // 2
    if tokens < _LEAST_RESPONSES * candidate.config.generation.max_new_tokens:
        return None
    return changed(values_of(config), {**candidate.overrides, "training.max_tokens_per_microbatch": tokens})


def smaller_generator(config: RunConfig, candidate: Candidate) -> Candidate | None:
    """The candidate with half the places; None if it has one."""
    places = candidate.config.generation.groups_per_batch // 2
    if not places:
        return None
    overrides = {**candidate.overrides, "generation.groups_per_batch": places}
    return changed(values_of(config), _places(config, overrides))


def bounds_up_to(asked: int) -> list[int]:
    """Staleness bounds to try, descending from the one asked for."""
    return sorted({bound for bound in (1, 2, 4, 8, 16) if bound < asked} | {asked}, reverse=True)


def _value(config: RunConfig, key: str) -> object:
    found: object = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else getattr(found, name)
    return found


def _splits(machine: Machine, gpus: int, batch: int) -> Iterator[dict[str, Any]]:
    common = {"training.device": "cuda", "generation.engine": "vllm"}
    for engines, tensor in _engines(machine, gpus, batch):
        for data, ranks in _ranks(machine, gpus - engines * tensor):
            yield {**common, **_layout(engines, tensor, data, ranks)}
        if engines * tensor == gpus:
            for data, ranks in _ranks(machine, gpus):
                if data * ranks == gpus:
                    yield {**common, **_layout(engines, tensor, data, ranks), "placement.colocated": True}


def _engines(machine: Machine, gpus: int, batch: int) -> Iterator[tuple[int, int]]:
    """(replicas, GPUs of each): as many groups a step for each of them, and at most all GPUs."""
    for tensor in _GENERATOR_TENSORS:
        if machine.allows_generator_tensor(tensor):
            for replicas in range(1, min(batch, gpus // tensor) + 1):
                if batch % replicas == 0:
                    yield replicas, tensor


def _ranks(machine: Machine, gpus: int) -> Iterator[tuple[int, int]]:
    """(data, tensor) on all of `gpus`, and on a half and a quarter of them, which may be cheaper."""
    for some in dict.fromkeys((gpus, gpus // 2, gpus // 4)):
        whole = some - some % _EVEN if some > 2 * _EVEN else some
        for tensor in _TRAINER_TENSORS:
            if whole >= tensor and machine.allows_trainer_tensor(tensor) and whole % tensor == 0:
                yield whole // tensor, tensor


def _layout(replicas: int, tensor: int, data: int, ranks: int) -> dict[str, Any]:
    return {
        "training.parallel.data": data,
        "training.parallel.tensor": ranks,
        "generation.replicas": replicas,
        "generation.engine_args.tensor_parallel_size": tensor,
    }


def _replicas(batch: int) -> Iterator[dict[str, Any]]:
    """Without GPUs to divide: up to four generators."""
    return ({"generation.replicas": number} for number in (1, 2, 3, 4) if batch % number == 0)


def _places(config: RunConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides`, in which an engine that is limited to a number of requests has as many as it has places."""
    if "max_num_seqs" not in config.generation.engine_args:
        return dict(overrides)
    places = int(overrides["generation.groups_per_batch"]) * config.generation.group_size
    return {**overrides, "generation.engine_args.max_num_seqs": places}
