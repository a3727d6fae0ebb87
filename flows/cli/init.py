"""`millrace init`: a first config for a file of questions and answers.

columns ─► prompt, answer and its format, reward ┐
rows ────► number held out                       ├─► a YAML file, with the reason behind each guess
lengths in the model's tokens ─► room for both  ┘
"""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.cli.command_line import Command, option
from flows.display.tables import echo
from millrace.errors import InputError, ModelFolderError, one_line, writing

_PROMPTS = ("prompt", "messages", "question", "problem", "instruction", "input", "query")
_ANSWERS = ("answer", "final_answer", "solution", "target", "label", "expected_answer", "ground_truth", "output")
_CHARACTERS_PER_TOKEN = 3
"""Assumed without a tokenizer."""
_LEAST_NEW_TOKENS = 64
_TEMPLATE = """\
# Written by `millrace init {data}`. Check it with `millrace run {file} --check`, then run it.

name: {name}

model:
  path: {path}

prompts:
  source: {data}  # {num_rows:,} rows
  prompt_field: {prompt}
  answer_field: {answer}
  answer_format: {format}  # where the answer is in that field
  num_eval: {num_eval}  # held out, never trained on
  chat: {chat}  # whether a text is a user's message in the model's chat template

generation:
  engine: {engine}
  dtype: auto
  max_new_tokens: {max_new_tokens}  # longest in tokens: prompt {longest_prompt:,}, answer {longest_answer:,}

scoring:
  reward: {reward}

training:
  max_steps: 200
  groups_per_step: 16
  learning_rate: 1.0e-6
  compute_dtype: auto
  checkpoint_every: 20

evaluation:
  every: 20
"""


def _init(arguments: argparse.Namespace) -> int:
    from configs.load import load_config

    file: Path = arguments.to or Path(f"{Path(arguments.data).stem}.yaml")
    if file.exists():
        raise InputError("there already", file=file, expected="a new file, by --to")
    text = _TEMPLATE.format(file=file, **_guesses(arguments.data, arguments.model))
    with writing(file):
        file.write_text(text, encoding="utf-8")
    load_config(file)
    echo(f"written: millrace run {file} --check")
    return 0


def _guesses(data: str, model: str | None) -> dict[str, Any]:
    """Values for the template. Raises InputError for data without a column of prompts or answers."""
    from millrace.prompts.files import read_rows

    rows = read_rows(data)
    prompt, answer = _column(data, rows[0], _PROMPTS, "prompts"), _column(data, rows[0], _ANSWERS, "answers")
    answers = [str(row.get(answer, "")) for row in rows]
    answer_format = _format(answers)
    lengths = _Lengths(model)
    longest_prompt = lengths.longest([_text(row.get(prompt)) for row in rows])
    longest_answer = lengths.longest(answers)
    room = max(_LEAST_NEW_TOKENS, 2 * longest_answer)
    is_mathematics = answer_format != "text" or all(any(c.isdigit() for c in text) for text in answers)
    return {
        "name": json.dumps(Path(data).stem),
        "data": json.dumps(data),
        "path": "null  # the folder of a model, or its ORG/NAME on a hub" if model is None else json.dumps(model),
        "num_rows": len(rows),
        "prompt": json.dumps(prompt),
        "answer": json.dumps(answer),
        "format": answer_format,
        "num_eval": min(256, max(1, len(rows) // 10)),
        "chat": json.dumps(lengths.has_template and isinstance(rows[0][prompt], str)),
        "engine": "vllm" if importlib.util.find_spec("vllm") is not None else "transformers",
        "max_new_tokens": room if lengths.context is None else max(1, min(room, lengths.context - longest_prompt)),
        "longest_prompt": longest_prompt,
        "longest_answer": longest_answer,
        "reward": "math" if is_mathematics else "exact_match",
    }


def _column(data: str, row: dict[str, Any], names: Sequence[str], what: str) -> str:
    found = next((name for name in names if row.get(name) is not None), None)
    if found is None:
        expected = f"one of {', '.join(names)}"
        raise InputError(f"no column of {what} among {', '.join(row)}", file=data, expected=expected)
    return found


def _format(answers: Sequence[str]) -> str:
    """The first format in which every answer is found."""
    from millrace.prompts.answers import reference_answer

    return next((name for name in ("gsm8k", "boxed") if all(reference_answer(text, name) for text in answers)), "text")


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class _Lengths:
    """Lengths in tokens of the model in a folder; by a rule of thumb without one."""

    def __init__(self, model: str | None) -> None:
        from tokenizers import Tokenizer

        from millrace.models.weight_files import read_object

        folder = Path(model or "").expanduser()
        file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
        self._tokenizer: Tokenizer | None = None
        self.context: int | None = None
        self.has_template = False
        if model is None or not file.is_file():
            return
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises nothing more exact.
            raise ModelFolderError(one_line(error), file=file, expected="a tokenizer") from error
        self.context = read_object(folder / "config.json").get("max_position_embeddings")
        in_settings = settings.is_file() and "chat_template" in read_object(settings)
        self.has_template = in_settings or (folder / "chat_template.jinja").is_file()

    def longest(self, texts: Sequence[str]) -> int:
        """Tokens of the longest text: of the ten with the most characters."""
        candidates = sorted(texts, key=len)[-10:]
        if self._tokenizer is None:
            return len(candidates[-1]) // _CHARACTERS_PER_TOKEN + 1
        return max(len(encoded.ids) for encoded in self._tokenizer.encode_batch(candidates))


COMMANDS = [
    Command(
        "init",
        _init,
        "write a first config for a file of questions and answers: columns, reward and lengths are guessed from it",
        [
            option("data", metavar="DATA", help="a .jsonl, .json, .csv or .parquet file, or a folder of `datasets`"),
            option("--model", metavar="M", help="the folder of the model to train, or its ORG/NAME on a hub"),
            option("--to", type=Path, metavar="FILE", help="the config to write (default: DATA's name with .yaml)"),
        ],
    )
]
