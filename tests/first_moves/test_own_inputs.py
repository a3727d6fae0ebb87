"""A stranger's own model, prompts, reward and chat model train; a missing extra is named in one line."""

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.campaigns.first_moves import SHORT, Checkout
from support.chat.model_folder import chat_model_folder

QUESTIONS = [{"prompt": f"{a}+{a + 2}=", "answer": str(2 * a + 2)} for a in range(10, 60)]
PRESET = "configs/presets/tiny-cpu.yaml"


def _as_csv(rows: list[dict[str, str]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _as_parquet(rows: list[dict[str, str]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


FORMATS = {
    "jsonl": lambda rows: "\n".join(map(json.dumps, rows)).encode(),
    "csv": _as_csv,
    "parquet": _as_parquet,
}


def test_own_prompts_in_each_format_train_an_own_model(checkout: Checkout, exported: str) -> None:
    for suffix, write in FORMATS.items():
        checkout.write(f"own.{suffix}", write(QUESTIONS))
    sources = json.dumps({suffix: {"prompts": {"source": f"own.{suffix}"}} for suffix in FORMATS})
    settings = f"model.path={exported} 'sources={sources}'"
    checkout.millrace(f"run {PRESET} --run-id own {SHORT} {settings}").succeeded()
    summary = json.loads((checkout.folder / "runs" / "own" / "summary.json").read_text())
    assert all(summary["sources"][suffix]["groups_trained"] for suffix in FORMATS)


def test_an_own_reward_trains_an_own_chat_model(checkout: Checkout) -> None:
    chat_model_folder(checkout.folder / "chat-model")
    checkout.own("chat-model")
    checkout.write(
        "my_reward.py", "def score(prompt, response, answer, meta):\n    return {'score': len(response) / 100}\n"
    )
    asked = [{"messages": [{"role": "user", "content": f"say {n}"}], "answer": "a"} for n in range(40)]
    checkout.write("chat.jsonl", "\n".join(map(json.dumps, asked)))
    settings = (
        "model.path=chat-model prompts.source=chat.jsonl scoring.reward=my_reward:score generation.max_new_tokens=16"
    )
    checkout.millrace(f"run {PRESET} --run-id chat {SHORT} {settings}").succeeded()


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (f"run {PRESET} --set prompts.source=reasoning_gym:chain_sum scoring.reward=reasoning_gym", "reasoning-gym"),
        (f"run {PRESET} --set prompts.source=verifiers:gsm8k scoring.reward=verifiers", "verifiers"),
        (f"run {PRESET} --set training.lora.rank=4", "lora"),
        (f"run {PRESET} --set model.path=chat-model model.renderer=qwen3 prompts.chat=true", "chat"),
        (f"run {PRESET} --set generation.engine=vllm", "make vllm"),
        ("import model.gguf --to imported", "import"),
        ("mirror {demo} --tensorboard boards", "tensorboard"),
        ("mirror {demo} --wandb project", "wandb"),
        ("mirror {demo} --otlp http://localhost:4318", "otlp"),
        ("plan configs/presets/qwen3-8b-8gpu.yaml --model llama-8b --hardware h100 --gpus 32", "plan"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(checkout: Checkout, demo: str, arguments: str, extra: str) -> None:
    checkout.write("model.gguf", "GGUF")
    assert extra in checkout.millrace(arguments.format(demo=demo)).refused()
