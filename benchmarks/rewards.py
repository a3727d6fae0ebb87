"""How fast rewards score, and how much hostile responses slow down the others: `python -m benchmarks.rewards`.

good responses alone                       ─► their rate                     ┐
the same with hostile ones among them      ─► the rate of the good ones      ├─► share that remains
each hostile one with a good one           ─► the seconds until its verdict  ┘   in deadlines

The rate of the good ones counts until the last of them has its verdict; hostile ones may still be in a worker then.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import finish, make_parser, median_ratio, print_table
from configs.scoring import ScoringConfig
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
            reward="benchmarks.rewards:quick" if name == "python" else name,
            prompt=Prompt(prompt_id=str(n), text="?", answer=str(n), source="benchmark"),
            response=str(n + n % 2) if name != "math" else f"So we get $x = {n}$, that is \\boxed{{{n + n % 2}}}.",
        )
        for n in range(num)
    ]


def good_rate(pool: Pool, good: Sequence[Task], hostile: Sequence[str]) -> float:
    """Measures good responses per second with the hostile ones spread evenly among them."""
    every = len(good) // (len(hostile) + 1)
    tasks: list[Task] = []
    for number, task in enumerate(good):
        turn, rest = divmod(number, every)
        if number and rest == 0 and turn <= len(hostile):
            tasks.append(Task(reward=task.reward, prompt=task.prompt, response=hostile[turn - 1]))
        tasks.append(task)
    bad = set(hostile)
    left = len(good)
    started = time.perf_counter()
    last = started
    for number, _ in pool.score(tasks):
        if tasks[number].response not in bad:
            left -= 1
            last = time.perf_counter()
    assert left == 0
    return len(good) / (last - started)


def measure(name: str, reward: Reward, limits: Limits, num: int, shares: Sequence[float]) -> dict[str, Any]:
    """Measures one reward: medians over the rounds, in each of which the shares of hostile responses take turns."""
    good, texts = good_tasks(name, num), _HOSTILE[name]
    rates: dict[float, list[float]] = {share: [] for share in (0.0, *shares)}
    with Pool([reward], limits) as pool:
        good_rate(pool, good[:50], [])
        for _ in range(_ROUNDS):
            for share, values in rates.items():
                hostile = [texts[turn % len(texts)] for turn in range(round(share * num))]
                values.append(good_rate(pool, good, hostile))
        waits = {text[:24]: _seconds_to_verdict(pool, good[0], text) for text in texts}
    return {
        "responses_per_second": statistics.median(rates[0.0]),
        "left": {f"{share:g}": median_ratio(rates[share], rates[0.0]) for share in shares},
        "seconds_to_verdict": waits,
        "deadlines_to_verdict": max(waits.values()) / limits.timeout_seconds,
    }


def _seconds_to_verdict(pool: Pool, good: Task, text: str) -> float:
    started = time.perf_counter()
    list(pool.score([Task(reward=good.reward, prompt=good.prompt, response=text), good]))
    return time.perf_counter() - started


def in_process_rate(num: int) -> float:
    """Measures responses per second of `exact_match` without a pattern, which needs no process."""
    pairs = [(task.prompt, task.response) for task in good_tasks("exact_match", num)]
    with Scorer(make_reward(ScoringConfig(reward="exact_match"))) as scorer:
        started = time.perf_counter()
        scorer.score_many(pairs)
        return num / (time.perf_counter() - started)


def main() -> None:
    """Measures, prints a table and writes the figures as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--responses", type=int, default=500, help="good ones in each measurement (default: 500)")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default: 1)")
    parser.add_argument("--timeout", type=float, default=2.0, help="deadline per response, seconds (default: 2)")
    parser.add_argument("--hostile", type=float, nargs="+", default=[0.002, 0.01], help="shares of hostile responses")
    arguments = parser.parse_args()
    limits = Limits(workers=arguments.workers, timeout_seconds=arguments.timeout, memory_mb=256)
    figures = {
        name: measure(name, reward, limits, arguments.responses, arguments.hostile)
        for name, reward in rewards().items()
    }
    local = in_process_rate(arguments.responses)
    rows = [
        [
            name,
            f"{values['responses_per_second']:,.0f}",
            *(f"{share:.0%}" for share in values["left"].values()),
            f"{values['deadlines_to_verdict']:.2f}",
        ]
        for name, values in figures.items()
    ]
    rows.append(["exact_match, no pattern", f"{local:,.0f}"])
    headings = ("", "responses/s", *(f"left with {share:.1%} hostile" for share in arguments.hostile), "deadlines")
    print_table("Rewards", headings, rows)
    settings = {"workers": limits.workers, "timeout_seconds": limits.timeout_seconds, "responses": arguments.responses}
    result = {"settings": settings, "rewards": figures, "exact_match_in_process_per_second": local}
    finish(arguments.json, result)


if __name__ == "__main__":
    main()
