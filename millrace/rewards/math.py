r"""Mathematics: whether two expressions are equal, by `math-verify`.

response ─► after the last </think> ─► in the last <answer> ─► the last whole \boxed{…}, else $…$, else a number
                                                                 ├─ none, or no mathematics ─► 0
                                                                 └─ an expression ─┐ equal? ─► 1 or 0
prompt's answer ─► an expression ──────────────────────────────────────────────────┘
brackets nested too deep, or a parser that gives up ─► error

Two answers of several letters, such as the order of three runners, are compared as text: as products, ABC and BAC would
be equal.
"""

import logging
import re
from importlib import metadata

from millrace.prompts.answers import after_thoughts
from millrace.prompts.messages import shown
from millrace.rewards.base import Reward, Score
from millrace.rewards.notation import figure, last_figure, plain, plain_expression, plain_prose
from millrace.rewards.units import split_unit
from millrace.types import Prompt

_LIBRARIES = ("math-verify", "latex2sympy2_extended", "sympy")
_DEEPEST = 200
"""Nested brackets. The parser recurses. It would skip brackets that it can't read, and take something within them."""
_BRACKET = re.compile(r"[{(\[})\]]")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX_CHOICE = re.compile(r"\\boxed\{([^{}\n]{1,100})\}[\s$]*,?\s*(?:or|and)[\s$]*\\boxed\{([^{}\n]{1,100})\}")
_FONT = r"\\(?:text|math)(?:bf|rm|it)?"
_LETTERS = re.compile(rf"(?:{_FONT}\s*\{{)?\s*(?:(?:option|choice)\s+)?\(?([A-Za-z]+)\)?\.?\s*\}}?", re.IGNORECASE)
_CHOICE = re.compile(
    rf"(?:{_FONT}\s*\{{)?\s*(?:\(([A-HJ])\)|([A-HJ])\s*[).:])(?:(?:[\s}}~:.]|\\[ ,;]|\\q?quad)+|(?=[\d$({{\\-]))"
    r"(?![+*/^=<>]|\\(?:cdot|times|c[au]p|[lg]e)\b)(.+)",
    re.DOTALL,
)
_CHOSEN = re.compile(
    rf"(?i:(?:answer|option|choice)[\s*]*(?:\bis|:)(?:[\s*:$({{\[]|{_FONT}|option\b|choice\b)*)"
    r"(A(?!\s+[a-z])|[B-HJ])(?![\w'’-]|[\s*)}$]*,?\s*(?:or|and|[A-HJ])\b)"
)
_OTHER_LETTER = re.compile(r"(?<!not )(?<!not \()\b(?:[B-HJ]\b|A\b(?!\s+[a-z]))")
_AROUND = " \n*`\"'"
_SPACING = re.compile(r"\\(?:q?quad|text(?:bf|it|rm)?|math(?:bf|it|rm)|[,;:! ])")
_SIGN = re.compile(r"[^\W_]|[∞∅]")
"""A letter, a digit or a symbol that is an answer alone. An expression has one."""
_PROSE = re.compile(r"[^\W\d_]+(?:[\s'’-]+[^\W\d_]+)+[.!?]?")
_WORD = re.compile(r"[^\W\d_]{2,}")
"""Prose has two of these. In "sin x" and "x y" there are fewer."""
_SAMPLES = (
    ("42", r"So the answer is \boxed{43}."),
    (r"\frac{x^2-1}{2}", r"$\boxed{\frac{1}{2}x^2-\sqrt{4}}$"),
    ("1,000", "That is 1000.5 in all."),
)


class MathReward(Reward):
    r"""Reward 1 for an expression that equals the prompt's answer, as 1/2 does 0.5; 0 for any other, and for none.

    Components: `math` (the reward) and `extracted` (1.0 if the response held an answer at all). The prompt's answer is
    LaTeX or plain text, with or without `\boxed{…}` around it.
    """

    name = "math"
    isolated = True

    def load(self) -> None:
        """Imports math-verify, which takes seconds."""
        import math_verify

        from millrace.rewards import equality

        self.version = "6 " + " ".join(f"{name}-{metadata.version(name)}" for name in _LIBRARIES)
        # It warns that its own time limit is off; the pool has one.
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._library = math_verify
        self._equal = equality.equal
        # The parser caches its grammar, which every forked process then has from the start.
        self.warm_up()

    def warm_up(self) -> None:
        """A forked process copies each page of the libraries that it first touches: tens of milliseconds in all."""
        for answer, response in _SAMPLES:
            self.score(Prompt(prompt_id="", text="", answer=answer, source=""), response)

    def check_answer(self, answer: str) -> None:
        """Raises ValueError if the answer is empty, or prose, and holds no expression."""
        expected = _expected(answer)
        is_prose = len(_WORD.findall(expected)) > 1 and _PROSE.fullmatch(expected.strip()) is not None
        if _SIGN.search(_SPACING.sub("", expected)) is None or is_prose:
            raise _unreadable(answer)

    def score(self, prompt: Prompt, response: str) -> Score:
        """Call in the main thread. Raises ValueError if the response or the prompt's answer can't be parsed."""
        _check_depth(response)
        self.check_answer(prompt.answer)
        letter, expected = _choice(_expected(prompt.answer))
        expected, gold_unit = split_unit(expected)
        gold = [] if figure(expected) or not expected else self._parse(rf"\boxed{{{expected}}}")
        if not gold and expected and figure(expected) is None:
            raise _unreadable(prompt.answer)
        answer = _answer_part(response)
        if answer is None:
            return _scored(equal=False, extracted=False)
        box = _last_box(answer)
        chosen, given = _choice(plain_expression(box)) if box is not None else _chosen(answer)
        if letter and chosen and (letter != chosen or not expected or not given):
            return _scored(equal=letter == chosen, extracted=True)
        box, unit = (
            split_unit(given, gold_unit) if box is not None else (None, split_unit(plain(answer), prose=True)[1])
        )
        verdict = _compare_as_text(expected or letter, answer, box)
        if verdict is not None:
            return verdict
        from sympy import SympifyError

        try:
            parsed = self._parse(plain_prose(answer) if box is None else rf"\boxed{{{box}}}")
        except SympifyError:
            # A bare "-07", which sympy refuses: a wrong answer, not a failure of the judge.
            parsed = []
        same_unit = gold_unit <= unit or unit <= gold_unit
        return _scored(equal=bool(gold and parsed) and same_unit and self._equal(gold, parsed), extracted=bool(parsed))

    def _parse(self, text: str) -> list[object]:
        # Only the first match: where the last box can't be read, a number elsewhere in the text is not the answer.
        parsed: list[object] = self._library.parse(
            text, extraction_mode="first_match", parsing_timeout=None, raise_on_error=True
        )
        if len(parsed) == 1 and isinstance(parsed[0], str):
            _raise_if_exhausted(parsed[0])
        return parsed


def _scored(*, equal: bool, extracted: bool) -> Score:
    return Score(reward=float(equal), components={"math": float(equal), "extracted": float(extracted)})


def _expected(answer: str) -> str:
    box = _last_box(answer)
    return plain_expression(answer if box is None else box)


def _choice(expression: str) -> tuple[str, str]:
    """Split the letter of a choice from its value; either may be empty."""
    match = _CHOICE.fullmatch(expression)
    if match is not None:
        return match[1] or match[2], plain_expression(match[3])
    alone = _LETTERS.fullmatch(expression.strip(_AROUND))
    return (alone[1], "") if alone and re.fullmatch("[A-HJ]", alone[1]) else ("", expression)


def _chosen(prose: str) -> tuple[str, str]:
    """The letter that prose calls the answer, and the value in its line; none if another letter follows."""
    last = max(_CHOSEN.finditer(prose), key=re.Match.end, default=None)
    if last is None or _OTHER_LETTER.search(prose, last.end()):
        return "", ""
    return last[1], "".join(re.findall(r"\d.*", prose[last.end() :].partition("\n")[0]))


def _compare_as_text(expected: str, answer: str, box: str | None) -> Score | None:
    """The score where times of day or words are compared; None for mathematics.

    A reference time without a half of the day takes either.
    """
    gold, time = figure(expected), last_figure(plain(answer)) if box is None else figure(box)
    if gold is not None:
        equal = time is not None and gold[0] == time[0] and gold[1] in ("", time[1])
        return _scored(equal=equal, extracted=time is not None)
    if box is not None and time is not None:
        return _scored(equal=False, extracted=True)
    words = [_LETTERS.fullmatch(text.strip(_AROUND)) for text in (expected, answer if box is None else box)]
    if words[0] and words[1]:
        return _scored(equal=words[0][1].casefold() == words[1][1].casefold(), extracted=True)
    return None


def _unreadable(answer: str) -> ValueError:
    return ValueError(
        f"the prompt's answer {shown(answer)} can't be read; expected an expression, or words within \\text{{…}}"
    )


def _answer_part(response: str) -> str | None:
    """Return the text after the model's thoughts or, within it, the last `<answer>…</answer>`.

    None if the thoughts do not end. Two boxes with "or" or "and" between them become one.
    """
    text = after_thoughts(response)
    if text is None:
        return None
    marked = _ANSWER.findall(text)
    return _BOX_CHOICE.sub(r"\\boxed{\1,\2}", marked[-1] if marked else text)


def _last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` that is closed, the innermost if they are nested; None if there is none."""
    last: tuple[int, int] | None = None
    # Where the content of each box begins that is not closed yet; None for other braces.
    opened: list[int | None] = []
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            opened.append(match.end() if match[0] != "{" else None)
        elif opened and (begin := opened.pop()) is not None and (last is None or begin > last[0]):
            last = begin, match.start()
    return None if last is None else text[last[0] : last[1]]


def _check_depth(text: str) -> None:
    """Counts brackets that are closed; one that is not, as in a smiley, nests nothing."""
    heights = [0]
    for bracket in _BRACKET.findall(text):
        if bracket in "{([":
            heights.append(0)
        elif len(heights) > 1:
            inner = heights.pop()
            heights[-1] = max(heights[-1], inner + 1)
    deepest = max(heights)
    if deepest > _DEEPEST:
        raise ValueError(f"brackets are nested {deepest:,} deep; at most {_DEEPEST} are judged")


def _raise_if_exhausted(text: str) -> None:
    """Raise the parser's RecursionError or MemoryError, which the library hides. Other errors mean a wrong answer."""
    from latex2sympy2_extended import latex2sympy

    try:
        latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=None)
    except (RecursionError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 — a wrong answer: 0
        return
