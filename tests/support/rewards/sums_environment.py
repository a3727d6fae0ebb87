"""A single-turn environment of `verifiers`, as an author writes one: `tests.support.rewards.sums_environment`."""

from typing import Any

import verifiers as vf
from datasets import Dataset


async def right(parser: Any, completion: Any, answer: str) -> float:
    return float(parser.parse_answer(completion) == answer)


def short(completion: Any) -> float:
    return float(len(completion[-1]["content"]) < 5)


def fails_at_boom(completion: Any, info: dict[str, Any]) -> float:
    if completion[-1]["content"] == "boom":
        raise ValueError(f"no verdict on {info['n']}")
    return 0.0


def load_environment(num: int = 4, turns: int = 1) -> Any:
    """Sums up to `num`; with more than one turn, an environment of another kind."""
    rows = [{"question": f"{n} + 1 = ?", "answer": str(n + 1), "info": {"n": n}} for n in range(num)]
    rubric = vf.Rubric(funcs=[right, short, fails_at_boom], weights=[1.0, 0.25, 0.0])
    if turns > 1:
        return vf.ToolEnv(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=turns)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]),
        system_prompt="Be brief.",
        rubric=rubric,
    )
