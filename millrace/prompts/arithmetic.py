"""The built-in prompts: every sum of two numbers of a few digits."""

from millrace.types import Prompt

ARITHMETIC = "arithmetic"
"""The name of this source in configs and in `Prompt.source`."""


def arithmetic_prompts(digits: int, max_sum: int) -> list[Prompt]:
    """Every sum up to `max_sum` of two numbers of `digits` digits, zero-padded: "05+07=" with the answer "12"."""
    width, limit = len(str(max_sum)), 10**digits
    return [
        Prompt(
            prompt_id=f"arith-{a:0{digits}d}+{b:0{digits}d}",
            text=f"{a:0{digits}d}+{b:0{digits}d}=",
            answer=f"{a + b:0{width}d}",
            source=ARITHMETIC,
        )
        for a in range(min(limit, max_sum + 1))
        for b in range(min(limit, max_sum - a + 1))
    ]


def commuted(prompt: Prompt) -> str:
    """One identity for a+b and b+a, which have the same answer."""
    return "+".join(sorted(prompt.prompt_id.removeprefix("arith-").split("+")))
