"""A GPU that is not there: tensors compute on the CPU, and count as being on `cuda:0` wherever Python asks.

    x.to(GPU), zeros(…, device=GPU)   ─► a CPU tensor whose storage is noted as the GPU's
    x.device, x.is_cuda               ─► the noted device
    any operation, backward included  ─► checks that its tensors share a device; its results get it

torch's FakeTensorMode knows devices as well, but a build of torch without CUDA refuses the backward pass of its `cuda`
tensors: autograd's engine asks for the accelerator's stream. It also has no values. Here numbers are real: a step on
this GPU is that of a CPU, bit for bit. Kernels that only CUDA has are replaced (`cuda_kernels.py`), and so are streams
(`cuda_streams.py`).
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch
from weakref import finalize

import torch
from support.gpu.cuda_kernels import KERNELS
from support.gpu.cuda_streams import cuda_streams
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

import millrace

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

_ATEN = torch.ops.aten
_PACKAGE = Path(millrace.__file__).parent
_GROUPED = torch._C._group_tensors_by_device_and_dtype
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default}
_UNKNOWN_SIZE = {_ATEN.nonzero.default, _ATEN.masked_select.default, _ATEN._unique2.default, _ATEN.bincount.default}
"""Their result's shape depends on values: CUDA waits for the device to learn it."""
_READ = {_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default}
"""Their result is a number in Python."""


class MixedDevices(Exception):
    """An operation got tensors of both devices."""


class PretendGpu:
    """The device's memory, and the copies and waits since `pretend_gpu` made it."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        """How often the CPU waited for a value of the device, by `file:function` of Millrace."""
        self.copied_to_host: Counter[str] = Counter()
        """Bytes copied from the device to the CPU's memory, by place."""
        self.cuda_only: Counter[str] = Counter()
        """How often a kernel that only CUDA has was asked for, by the operation's name."""
        self.in_use = 0
        """Bytes of the device's memory that live tensors take."""
        self.peak = 0
        """The most bytes in use at once; set it to `in_use` to measure anew."""
        self.heading: torch.device | None = None
        """Where the copy, or the empty tensor like another, that is being made is going; None if none is."""
        self._nbytes = WeakIdKeyDictionary()
        """The device's storages, and a list of one: the bytes that each is counted with."""

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where `tensor` counts as being."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.is_meta:
            return torch.device("meta")
        return GPU if tensor.untyped_storage() in self._nbytes else CPU

    def place(self, tensor: torch.Tensor) -> None:
        """Counts the storage of `tensor` as the device's."""
        storage = tensor.untyped_storage()
        if not tensor.is_meta and storage not in self._nbytes:
            counted = self._nbytes[storage] = [0]
            self._count(counted, storage.nbytes())
            finalize(storage, self._count, counted, 0)

    def resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """`resize` of torch's storages, by which FSDP2 frees gathered weights."""

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            done = resize(storage, nbytes)
            if (counted := self._nbytes.get(storage)) is not None:
                self._count(counted, nbytes)
            return done

        return resized

    def grouped(self, group: Callable[..., Any]) -> Callable[..., Any]:
        """`group` of torch, with the device that tensors count as being on."""

        def answer(lists: Any, with_indices: bool) -> dict[Any, Any]:
            result = group(lists, with_indices)
            return {(self.device_of(some[0][0]), dtype): (some, at) for (_, dtype), (some, at) in result.items()}

        return answer

    def forget(self) -> None:
        """Empties both counts."""
        self.waits.clear()
        self.copied_to_host.clear()

    def _count(self, counted: list[int], nbytes: int) -> None:
        self.in_use += nbytes - counted[0]
        counted[0] = nbytes
        self.peak = max(self.peak, self.in_use)


@contextmanager
def pretend_gpu() -> Iterator[PretendGpu]:
    """A GPU for the `with` block."""
    gpu = PretendGpu()
    # On the class: a mode would not see what hooks of saved tensors ask.
    seen = {"device": property(gpu.device_of), "is_cuda": property(lambda tensor: gpu.device_of(tensor) == GPU)}
    with (
        patch.multiple(torch.Tensor, create=True, **seen),
        # torch's own grouping by device, which gradient clipping and AdamW use, is written in C++.
        patch.object(torch._C, "_group_tensors_by_device_and_dtype", gpu.grouped(_GROUPED)),
        patch.object(torch.UntypedStorage, "resize_", gpu.resizing(torch.UntypedStorage.resize_), create=True),
        cuda_streams(),
        _Operations(gpu),
        _Python(gpu),
    ):
        yield gpu


class _Python(TorchFunctionMode):
    """Answers Python's questions about tensors, and places those that Python makes."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, gpu = dict(kwargs or {}), self._gpu
        if func is torch.Tensor.backward:
            return self._backward(args[0])
        if func is torch._C._nn._parse_to:
            return func(*args, **kwargs)
        if func is torch.Tensor.numpy and gpu.device_of(args[0]) == GPU:
            raise TypeError("can't convert a tensor of a GPU to numpy; use Tensor.cpu() first")
        if func is torch.Tensor.tolist and gpu.device_of(args[0]) == GPU:
            # It reads memory without an operation.
            gpu.waits[_place()] += 1
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cpu:
            func, args = torch.Tensor.to, (*args, CPU)
        asked = next((one for one in (*args, kwargs.get("device")) if isinstance(one, torch.device)), None)
        if asked not in (GPU, CPU):
            return func(*args, **kwargs)
        args, kwargs = tree_map(lambda one: CPU if one == GPU else one, (tuple(args), kwargs))
        if func is torch.Tensor.to:
            here = gpu.device_of(args[0])
            return func(*args, **kwargs) if here == asked else self._moved(here, asked, func, args, kwargs)
        if func is torch.empty_like:
            return self._heading(asked, func, args, kwargs)
        made = func(*args, **kwargs)
        if asked == GPU:
            gpu.place(made)
        return made

    def _backward(self, total: torch.Tensor) -> None:
        start = torch.ones_like(total)
        # Straight to the engine, because its callers in Python would come back here. Its own calls of Python ask for
        # devices too, and a mode is off while it answers.
        with self:
            torch.autograd.Variable._execution_engine.run_backward(
                (total,), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _moved(
        self, here: torch.device, there: torch.device, func: Callable[..., Any], args: Any, kwargs: Any
    ) -> torch.Tensor:
        moved = self._heading(there, func, args, kwargs | {"copy": True})
        if here == GPU and there == CPU:
            self._gpu.copied_to_host[_place()] += moved.nbytes
        return moved

    def _heading(self, there: torch.device, func: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
        self._gpu.heading = there
        try:
            made: torch.Tensor = func(*args, **kwargs)
        finally:
            self._gpu.heading = None
        return made


class _Operations(TorchDispatchMode):
    """Checks and counts torch's operations, the backward pass included."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            # It calls the same for its part of the tensor.
            return NotImplemented
        kwargs, gpu = dict(kwargs or {}), self._gpu
        if gpu.heading is not None and func in (_ATEN._to_copy.default, _ATEN.empty_like.default):
            moved = func(*args, **kwargs)
            if gpu.heading == GPU:
                gpu.place(moved)
            return moved
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_gpu = [tensor for tensor in tensors if gpu.device_of(tensor) == GPU]
        if not on_gpu:
            return func(*args, **kwargs)
        if func is _ATEN.copy_.default:
            if gpu.device_of(args[0]) == CPU:
                gpu.copied_to_host[_place()] += args[0].nbytes
            return func(*args, **kwargs)
        # A number on the CPU may take part anywhere.
        strangers = [tensor for tensor in tensors if gpu.device_of(tensor) == CPU and tensor.dim() > 0]
        if strangers:
            raise MixedDevices(f"{func} at {_place()} gets tensors of {GPU} and of the CPU")
        if func in _READ or func in _UNKNOWN_SIZE or _is_masked(func, args) or _is_unsized_repeat(func, args, kwargs):
            gpu.waits[_place()] += 1
        if func in KERNELS:
            gpu.cuda_only[str(func)] += 1
        made = KERNELS.get(func, func)(*args, **kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                gpu.place(leaf)
        return made


def _is_masked(func: Any, args: Sequence[Any]) -> bool:
    """Whether `func` indexes by a mask, for which CUDA has to count its elements."""
    return func in _INDEXED and any(arg is not None and arg.dtype == torch.bool for arg in args[1])


def _is_unsized_repeat(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return func is _ATEN.repeat_interleave.Tensor and kwargs.get("output_size") is None


def _place() -> str:
    """The innermost function of Millrace that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_PACKAGE):
            return f"{file.relative_to(_PACKAGE)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
