"""The built-in prompts: sums of two numbers, and chains of sums, whose responses are long.

    arithmetic   05+07=          the answer 12
    chains       04:7+5=                             four sums to go, the first of them 7+5
                 2 03:5+2=7 02:2+7=9 01:7+9=6        each adds the last two digits and keeps the last digit of the sum
                 7+9=6                               the answer: the last of them

The number of sums is log-normal, and so is the length of the responses: most are short, a few are many times as long.
"""

import math
import random
from collections.abc import Callable

from millrace.types import Prompt

ARITHMETIC, CHAINS = "arithmetic", "chains"
"""The names of these sources in configs and in `Prompt.source`."""
CHARACTERS_PER_SUM = 9
"""Of the response to a chain: `2 03:5+2=`. The last sum is its digit alone."""
# Stored runs depend on it: another seed draws other chains.
_SEED = 0
_NUM_DRAWN = 1500
_MEDIAN_SUMS, _MAX_SUMS = 3.0, 40
_SPREAD = 1.0
"""Standard deviation of the natural logarithm of the number of sums."""


def arithmetic_prompts(digits: int) -> list[Prompt]:
    """Every sum of `digits` digits of two such numbers, zero-padded: "05+07=" with the answer "12"."""
    limit = 10**digits
    return [
        Prompt(
            prompt_id=f"arith-{a:0{digits}d}+{b:0{digits}d}",
            text=f"{a:0{digits}d}+{b:0{digits}d}=",
            answer=f"{a + b:0{digits}d}",
            source=ARITHMETIC,
        )
        for a in range(limit)
        for b in range(limit - a)
    ]


def commuted(prompt: Prompt) -> str:
    """One identity for a+b and b+a, which have the same answer."""
    return "+".join(sorted(prompt.prompt_id.removeprefix("arith-").split("+")))


def chain_prompts() -> list[Prompt]:
    """Chains, each once, the same ones for every seed of a run."""
    rng = random.Random(_SEED)
    texts = [f"{_num_sums(rng):02d}:{rng.randrange(10)}+{rng.randrange(10)}=" for _ in range(_NUM_DRAWN)]
    return [
        Prompt(prompt_id=f"chain-{text}", text=text, answer=last_sum(written_out(text, last_digit)), source=CHAINS)
        for text in dict.fromkeys(texts)
    ]


def written_out(text: str, add: Callable[[int, int], int]) -> str:
    """The response to the prompt `text` of somebody who adds two digits with `add`, which returns a digit."""
    count, _, first = text.removesuffix("=").partition(":")
    a, b = (int(digit) for digit in first.split("+"))
    sums = []
    for to_go in reversed(range(int(count))):
        a, b = b, add(a, b)
        sums.append(f"{b} {to_go:02d}:{a}+{b}=" if to_go else str(b))
    return "".join(sums)


def last_sum(response: str) -> str:
    """The answer that a written-out chain gives."""
    return response[-len("7+9=6") :]


def last_digit(a: int, b: int) -> int:
    """The last digit of the sum of two digits."""
    return (a + b) % 10


def _num_sums(rng: random.Random) -> int:
    """Log-normal, at least 2, drawn again above the limit."""
    while (drawn := max(2, round(rng.lognormvariate(math.log(_MEDIAN_SUMS), _SPREAD)))) > _MAX_SUMS:
        pass
    return drawn
