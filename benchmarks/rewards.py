"""How fast rewards score, and how soon hostile responses are ended: `python -m benchmarks.rewards`.

good responses                             ─► their rate
each hostile one with a good one           ─► the seconds until its verdict, in deadlines
"""

import statistics
import time
from typing import Any

from benchmarks.harness import finish, make_parser, print_table
from configs.stored import DEFAULT_SOURCE
from configs.task import ScoringConfig
from millrace.rewards.base import Reward
from millrace.rewards.factory import make_reward
from millrace.rewards.isolation.pool import Pool
from millrace.rewards.isolation.sandbox import Limits
from millrace.rewards.isolation.worker import Task
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt

_ROUNDS = 3
_BAD_PATTERN = r"^(([a-z0-9 ])+)+$"
_HOSTILE = {
    "math": ["9**9**9**9", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{" * 200_000],
    "exact_match": ["a" * 40 + "!"],
    "python": ["while True: pass", "x = []\nwhile True: x.append(bytearray(2**20))", "import os; os._exit(0)"],
}


def quick(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> float:
    """A reward function: runs the response if it looks like a program."""
    if response.startswith(("while", "import", "x =")):
        exec(response, {})
    return float(response.strip() == answer)


def rewards() -> dict[str, Reward]:
    """Makes the rewards that run in the pool."""
    return {
        "exact_match": make_reward(ScoringConfig(reward="exact_match", answer_pattern=_BAD_PATTERN)),
        "math": make_reward(ScoringConfig(reward="math")),
        "python": make_reward(ScoringConfig(reward="benchmarks.rewards:quick")),
    }


def good_tasks(name: str, num: int) -> list[Task]:
    """Makes responses as a model writes them, half of them right."""
    return [
        Task(
            reward=0,
            prompt=Prompt(prompt_id=str(n), text="?", answer=str(n), source="benchmark"),
            response=str(n + n % 2) if name != "math" else f"So we get $x = {n}$, that is \\boxed{{{n + n % 2}}}.",
        )
        for n in range(num)
    ]


def measure(name: str, reward: Reward, limits: Limits, num: int) -> dict[str, Any]:
    """Measures one reward: the median rate of the rounds, and the wait for each hostile response's verdict."""
    good, rates = good_tasks(name, num), []
    with Pool([reward], limits) as pool:
        list(pool.score(good[:50]))
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            list(pool.score(good))
            rates.append(num / (time.perf_counter() - started))
        waits = {text[:24]: _seconds_to_verdict(pool, good[0], text) for text in _HOSTILE[name]}
    return {
        "responses_per_second": statistics.median(rates),
        "seconds_to_verdict": waits,
        "deadlines_to_verdict": max(waits.values()) / limits.timeout_seconds,
    }


def _seconds_to_verdict(pool: Pool, good: Task, text: str) -> float:
    started = time.perf_counter()
    list(pool.score([Task(reward=good.reward, prompt=good.prompt, response=text), good]))
    return time.perf_counter() - started


def in_process_rate(num: int) -> float:
    """Measures responses per second of `exact_match` without a pattern, which needs no process."""
    items = [(DEFAULT_SOURCE, task.prompt, task.response) for task in good_tasks("exact_match", num)]
    with Scorer({DEFAULT_SOURCE: make_reward(ScoringConfig(reward="exact_match"))}) as scorer:
        started = time.perf_counter()
        scorer.score_many(items)
        return num / (time.perf_counter() - started)


def main() -> None:
    """Measures, prints a table and writes the figures as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--responses", type=int, default=500, help="good ones in each measurement (default: 500)")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default: 1)")
    parser.add_argument("--timeout", type=float, default=2.0, help="deadline per response, seconds (default: 2)")
    arguments = parser.parse_args()
    limits = Limits(workers=arguments.workers, timeout_seconds=arguments.timeout, memory_mb=256)
    figures = {name: measure(name, reward, limits, arguments.responses) for name, reward in rewards().items()}
    local = in_process_rate(arguments.responses)
    rows = [
        [name, f"{values['responses_per_second']:,.0f}", f"{values['deadlines_to_verdict']:.2f}"]
        for name, values in figures.items()
    ]
    rows.append(["exact_match, no pattern", f"{local:,.0f}"])
    print_table("Rewards", ("", "responses/s", "deadlines"), rows)
    settings = {"workers": limits.workers, "timeout_seconds": limits.timeout_seconds, "responses": arguments.responses}
    result = {"settings": settings, "rewards": figures, "exact_match_in_process_per_second": local}
    finish(arguments.json, result)


if __name__ == "__main__":
    main()
