"""The least time that a step could take on this machine: its operations over the rate of matrix products.

    operations of a step ─┬─ sampling   2 per weight and token; a prompt is read once per group
                          └─ training   6 per weight and token; a prompt is computed once per group
                                 ÷
    rate, all cores       ─┬─ of products as wide as the sampler's: one row per response in flight
                           └─ of products as wide as the trainer's: one row per token of the batch

Only the layers' weights are counted: attention over such short sequences, embeddings and an output layer of twenty
characters add a few per cent.
"""

import os
import time
from statistics import median

import torch

from benchmarks.trl.shapes import GROUP_SIZE, Shape

Figures = dict[str, float]

_SQUARE = 1024
"""Rows and columns of the product whose rate is the machine's."""
_SECONDS = 0.3
_ROUNDS = 5


def layer_weights(shape: Shape) -> int:
    """Weights of all layers' matrices."""
    model = shape.model
    attention = 4 * model.hidden_size**2
    return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


def step_flops(shape: Shape, response_tokens: float, *, prompts_once: bool) -> Figures:
    """Operations of a step with responses of that mean length; prompts are computed once per group or per response."""
    weights = layer_weights(shape)
    prompts = shape.prompt_tokens * shape.responses / (GROUP_SIZE if prompts_once else 1)
    tokens = prompts + shape.responses * response_tokens
    return {"sampling": 2.0 * weights * tokens, "training": 6.0 * weights * tokens}


def measured(shape: Shape, response_tokens: float) -> Figures:
    """Rates of products on all cores, operations per second, and the seconds of a step at these rates."""
    model = shape.model
    flops = step_flops(shape, response_tokens, prompts_once=True)
    batch = round(flops["training"] / 6 / layer_weights(shape))
    rates = {
        "square_flops_per_second": machine_rate(_SQUARE, _SQUARE, _SQUARE),
        "sampling_flops_per_second": machine_rate(shape.responses, model.hidden_size, model.intermediate_size),
        "training_flops_per_second": machine_rate(batch, model.hidden_size, model.intermediate_size),
    }
    return {
        **rates,
        "sampling_flops": flops["sampling"],
        "training_flops": flops["training"],
        "seconds": sum(flops[part] / rates[f"{part}_flops_per_second"] for part in ("sampling", "training")),
        "seconds_at_square_rate": sum(flops.values()) / rates["square_flops_per_second"],
    }


def machine_rate(rows: int, inner: int, columns: int) -> float:
    """As `product_rate`, of all cores: on one product together or on one each, whichever is faster."""
    cores = os.cpu_count() or 1
    rates = []
    for threads in (1, cores):
        torch.set_num_threads(threads)
        rates.append(cores // threads * product_rate(rows, inner, columns))
    return max(rates)


def product_rate(rows: int, inner: int, columns: int) -> float:
    """Operations per second of a float32 product [rows, inner] × [inner, columns]: the median of some rounds."""
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    rates = []
    for _ in range(_ROUNDS):
        started, products = time.perf_counter(), 0
        while (seconds := time.perf_counter() - started) < _SECONDS / _ROUNDS or not products:
            left @ right
            products += 1
        rates.append(2.0 * rows * inner * columns * products / seconds)
    return median(rates)
