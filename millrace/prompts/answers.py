r"""Finds the reference answer in the answer field of a data set.

text    the whole field                        any file of bare answers
gsm8k   "She pays 2 × 600 = 1,200.\n#### 1,200"  ─► 1200    Cobbe et al., arXiv 2110.14168
boxed   "… so $x = \boxed{\frac{1}{2}}$."        ─► \frac{1}{2}    MATH: Hendrycks et al., arXiv 2103.03874
"""

import re
from collections.abc import Callable

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BRACE_OR_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s{$]+)")

_DIGITS = re.compile(r"-?\d[\d.,]*")
_BEGUN = re.compile(r"\d[.,:/]?$|(?:^|[\s=(:])-$")
_REST = re.compile(r"(?:[.,:/\u00a0\u2009\u202f]?\d)*(?:[eE][+-]?\d+)?")
_GROUPED = re.compile(r"-?\d{1,3}(?:[,\u00a0\u2009\u202f]\d{3})+(?:\.\d+)?")
_MARKED = re.compile(r"(\*{1,3}|`{1,3})([^*`]+)\1")
MINUS_SIGNS = str.maketrans(dict.fromkeys("−﹣－‑", "-"))
"""For `str.translate`: the minus signs of Unicode, and the hyphens that stand for them."""


def reference_answer(text: str, answer_format: str) -> str | None:
    """The answer in an answer field, in `answer_format` (`text`, `gsm8k` or `boxed`); None where there is none."""
    return _FINDERS[answer_format](text)


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` or `\fbox{…}` with balanced braces, in time linear in the text.

    None where there is none, or where it is empty. A few solutions of MATH write `\boxed 5`, which counts where no box
    has braces.
    """
    opened: list[int | None] = []
    last, content = -1, ""
    for match in _BRACE_OR_BOX.finditer(text):
        token = match.group()
        if token == "}":
            start = opened.pop() if opened else None
            if start is not None and start > last:
                last, content = start, text[start : match.start()].strip()
        elif token == "{":
            opened.append(None)
        elif token.endswith("{") and len(token) > 2:
            opened.append(match.end())
    if last < 0:
        bare = _BARE_BOX.findall(text)
        content = bare[-1].rstrip(".") if bare else ""
    return content or None


def _whole(text: str) -> str | None:
    return text if text.strip() else None


def _after_hashes(text: str) -> str | None:
    """The text after the last `####`, without commas between thousands."""
    _, hashes, answer = text.rpartition("####")
    return _THOUSANDS.sub("", answer.strip()) if hashes and answer.strip() else None


_FINDERS: dict[str, Callable[[str], str | None]] = {"text": _whole, "gsm8k": _after_hashes, "boxed": boxed}

EXPECTED = {
    "text": "text that is not blank",
    "gsm8k": 'a worked solution that ends in "####" and the answer',
    "boxed": r"a solution with the answer in \boxed{…}, its braces balanced",
}
"""The content expected of an answer field, by format, for error messages."""


def after_thoughts(response: str) -> str | None:
    """The text after the last `</think>`; None where a `<think>` is not closed: the answer has not begun."""
    text = response.rpartition("</think>")[2]
    return None if "<think>" in text else text


def last_group(text: str, pattern: str | re.Pattern[str]) -> str | None:
    """The first group of the last match of `pattern`; None without a match.

    A number is read to its end: `#### ([0-9]+)` finds 12.5 in "#### 12.5" and 1,234 in "#### 1,234". Where the pattern
    leaves out the beginning of a number, or its minus sign, the result is None.
    """
    text = text.translate(MINUS_SIGNS)
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    last = matches[-1]
    answer: str | None = last[1]
    if answer is None or not _DIGITS.fullmatch(answer):
        return answer
    start, end = last.span(1)
    # Text that the pattern itself matches around the group is meant.
    if start == last.start() and answer[0] != "-" and _BEGUN.search(text[max(0, start - 2) : start]):
        return None
    rest = _REST.match(text, end) if end == last.end() else None
    return (answer if rest is None else answer + rest[0]).rstrip(".,")


def comparable(answer: str) -> str:
    """`answer` without whitespace or marks of emphasis around it; a number has no separators of thousands."""
    text = answer.strip().translate(MINUS_SIGNS)
    if marked := _MARKED.fullmatch(text):
        text = marked[2].strip()
    return re.sub(r"[^-\d.]", "", text) if _GROUPED.fullmatch(text) else text
