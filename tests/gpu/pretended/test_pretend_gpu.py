"""The pretended GPU knows where tensors are, and counts copies to the host and waits."""

import pytest
import torch
from support.gpu.pretend_gpu import CPU, GPU, MixedDevices, pretend_gpu


def test_a_tensor_is_where_it_was_put_and_so_are_results_and_gradients() -> None:
    with pretend_gpu():
        layer, x = torch.nn.Linear(3, 2).to(GPU), torch.zeros(4, 3, device=GPU)
        y = layer(x).sum()
        y.backward()
        assert layer.weight.grad is not None
        assert {one.device for one in (x, y, layer.weight, layer.weight.grad, x[0], x.T)} == {GPU}
        assert torch.zeros(3).device == CPU
        layer.to(CPU)
        assert layer.weight.device == layer.weight.grad.device == CPU


def test_an_operation_on_both_devices_is_refused() -> None:
    with pretend_gpu():
        x = torch.zeros(3, device=GPU)
        with pytest.raises(MixedDevices):
            x + torch.zeros(3)
        with pytest.raises(TypeError):
            x.numpy()
        assert (x + torch.tensor(1.0)).is_cuda, "a number may come from the CPU"


def test_what_makes_a_gpu_wait_is_counted() -> None:
    with pretend_gpu() as gpu:
        x, mask = torch.ones(3, device=GPU), torch.ones(3, device=GPU) > 0
        for wait in (
            lambda: x[0].item(),
            lambda: bool(mask.all()),
            lambda: x.tolist(),
            lambda: x[mask],
            lambda: mask.nonzero(),
            lambda: x.repeat_interleave(x.long()),
        ):
            gpu.forget()
            wait()
            assert gpu.waits.total() == 1
        gpu.forget()
        x.repeat_interleave(x.long(), output_size=3)
        x[torch.zeros(2, dtype=torch.int64, device=GPU)]
        assert not gpu.waits


def test_bytes_that_are_copied_back_are_counted() -> None:
    with pretend_gpu() as gpu:
        x = torch.zeros(3, 2, device=GPU)
        host = torch.zeros(3, 2)
        for copy in (lambda: x.cpu(), lambda: x.to(CPU), lambda: host.copy_(x)):
            gpu.forget()
            copy()
            assert gpu.copied_to_host.total() == 24
        gpu.forget()
        x.copy_(host)
        host.to(GPU)
        assert not gpu.copied_to_host


def test_memory_is_in_use_as_long_as_a_tensor_lives() -> None:
    with pretend_gpu() as gpu:
        x = torch.zeros(8, device=GPU)
        view = x[2:]
        assert gpu.in_use == 32
        y = x + 1
        assert (gpu.in_use, gpu.peak) == (64, 64)
        del x, y
        assert (gpu.in_use, gpu.peak) == (32, 64), "a view keeps it"
        del view
        assert gpu.in_use == 0
