"""The benchmark of plans adds up, and its times follow from the hops."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from millrace.planning.costs.known_models import model_named
from millrace.planning.costs.model_shape import tensor_dims

from benchmarks.weight_plan.__main__ import main, targets_met
from benchmarks.weight_plan.costs import Case, Links, cost
from benchmarks.weight_plan.simulation import simulated_span
from millrace.weights.transfer.generator_layouts import vllm_layout
from millrace.weights.transfer.plan import plan_transfer
from millrace.weights.transfer.trainer_layouts import fsdp_layout

_LINKS = Links(nvlink=450.0, network=50.0, message_us=20.0, copy_us=5.0)


@pytest.mark.parametrize(
    ("data", "tensor", "generators", "workers"),
    [(1, 1, 1, 1), (1, 1, 4, 1), (4, 1, 2, 1), (2, 2, 2, 2), (4, 2, 1, 8), (8, 1, 4, 4), (3, 1, 1, 2)],
)
def test_the_time_follows_from_the_hops(data: int, tensor: int, generators: int, workers: int) -> None:
    specs = replace(model_named("llama-8b"), layers=4).tensors()
    plan = plan_transfer(
        fsdp_layout(specs, data=data, tensor=tensor, tensor_dims=tensor_dims(specs)),
        [vllm_layout(specs, tensor=workers, num_heads=32, num_kv_heads=8)] * generators,
        bucket_bytes=8 << 20,
    )
    assert 0.99 * plan.span <= simulated_span(plan) <= 1.25 * plan.span
    assert plan.span >= max(*plan.sent, *plan.received)


def test_a_row_counts_each_copy_once() -> None:
    case = Case(model=model_named("llama-8b"), trainer_ranks=8, trainer_tensor=1, generators=4, workers=2)
    row = cost(case, _LINKS, bucket_bytes=64 << 20, dtype="bfloat16")
    assert row["model_gb"] == pytest.approx(16.06, abs=0.01)
    assert row["worker_receives_gb"] == pytest.approx(row["model_gb"] / 2, rel=0.001)
    assert row["trainer_sends_gb"] == pytest.approx(row["model_gb"] / 8 * row["chains"], rel=0.001)
    assert row["trainer_extra_gb"] == pytest.approx(row["model_gb"] / 8 + 2 * (64 << 20) / 1e9, rel=0.001)
    assert row["over_network"] > row["worker_receives_gb"] / 50
    assert all(targets_met([row]).values())


def test_the_command_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    grid = ["--models", "8b", "--trainers", "2", "--generators", "1", "2", "--workers", "2"]
    monkeypatch.setattr("sys.argv", ["weight_plan", *grid, "--network", "25", "--json", str(path)])
    main()
    written = json.loads(path.read_text())
    assert [row["generators"] for row in written["rows"]] == [1, 2]
    assert written["links"]["network"] == 25.0
    assert "LlamaRL" in capsys.readouterr().out


def test_a_trainer_that_can_not_be_divided_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--models", "70b", "--trainers", "12", "--generators", "1", "--workers", "8"]
    monkeypatch.setattr("sys.argv", ["weight_plan", *grid])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "12 trainer ranks can't be divided into rows of 8\n"
