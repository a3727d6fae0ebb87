r"""Rewrites notation that math-verify misreads, in responses and in reference answers.

everywhere     −5  ─► -5          12\,500 ─► 12500        1.5e-7, 1.5 × 10⁻⁷ ─► 1.5*10^(-7)      3 1/4 ─► 13/4
in prose too   **42** ─► 42       4π, 2\sqrt{3}, 2:3, (1, 2), 4x ─► in $…$, read as a whole
               3 or 5 ─► $3,5$    42, not 43 ─► 42, not   the answer to part 2 is 7 ─► the answer is 7

Clock times stay as they are, except that prose loses them: `10:15` is neither 2/3 nor 10.
"""

import re

from millrace.prompts.answers import MINUS_SIGNS

_SIGN = re.compile(r"(?<=[=:(])([ \t]*)[-–][ \t]*(?=\d)|(?<=\s)–(?=\d)")
_SPACES = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:(?:\\[,;: ]|\{,\}|[\u00a0\u2009\u202f])\d{3}){1,9})(?!\d)")
_PLAIN_SPACES = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?: \d{3}){1,9})(?![\d/])")
_RAISED = re.compile(r"(?<=[\dxyz)])[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_RAISED_DIGITS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_E_NOTATION = re.compile(r"(?<![\w.])(\d{1,99}(?:\.\d{1,99})?)[eE]([+-]?\d{1,3})(?!\w|\.\d)")
_TIMES_TEN = re.compile(
    r"(?<=\d)\s*(?:×|·|\*|x|\\times|\\cdot)\s*10\s*\^\s*(?:\{([+-]?\d+)\}|\(([+-]?\d+)\)|([+-]?\d+))"
)
_MIXED = re.compile(r"(?<![\w./^])(\d{1,9})[ \u00a0]+(\d{1,9})/(\d{1,9})(?![\w/])")
_CLOCK = r"(?:[01]?\d|2[0-4]):[0-5]\d(?::[0-5]\d)?"
_HALF_OF_DAY = r"(?:\s|\\[ ,;]|~|\\(?:text|mathrm|mbox)\s*\{|\{)*([ap])\.?\s?m\b\.?[\s}]*"
_CLOCK_TIME = re.compile(rf"(?<![\w:.])({_CLOCK})(?:{_HALF_OF_DAY}|(?![\w:]))", re.IGNORECASE)
_ONLY_CLOCK = re.compile(
    rf"\s*(?:\\(?:text|mathrm|mbox)\s*\{{)?\s*({_CLOCK})(?:{_HALF_OF_DAY})?\s*\}}?\s*", re.IGNORECASE
)

_MARKED = re.compile(r"(?<![\w*)\]}])(\*{1,3})(?=[^\s*])([^\n]{1,300}?)(?<=[^\s*])\1(?![\w*(])")
_CODE = re.compile(r"`+([^`]{1,300})`+")
_NUMBER = r"\\?\$?-?\d++(?:,\d{3})*+(?:[./]\d+)?+\$?"
_CHOICE = re.compile(rf"(?<![\w.,/$])({_NUMBER}(?:,\s+{_NUMBER}){{0,9}}),?\s+or\s+(?:[a-z]\s*=\s*)?({_NUMBER})(?!\w)")
_DENIED = re.compile(rf"(\bnot|n't|\binstead of|\brather than)\s+(?:equal to\s+)?{_NUMBER}(?!\w)")
_SUBJECT = re.compile(r"(answer)\b[^.\n:=$]{1,60}?\s(is)\b", re.IGNORECASE)
_ROOT = re.compile(r"(?:√|\bsqrt)\s?(?:(\d+)|\(([^()]{1,40})\))")
_COMMANDS = {"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup "}
_SYMBOL = re.compile(rf"[{''.join(_COMMANDS)}]|(?<![a-zA-Z\\])pi\b")
_AREA = re.compile(r"(?<=\d)\s(?:[kcdm]?m|ft|in)\^\(?[23]\b\)?")
_BRACKETS = r"\\?[(\[{](?:[^()\[\]{}\n]|\{[^{}\n]{0,40}\}|\([^()\n]{0,40}\)){1,80}[)\]}]"
_ATOM = rf"(?:{_BRACKETS}|\\[a-zA-Z]+|(?<![a-zA-Z\\])[b-hj-zA-Z](?![a-zA-Z])|\d+(?:[.,]\d+)*|[-+*/^_=<>:(){{}}\[\]|!])"
_TERM = re.compile(rf"(?<![\w\\$]){_ATOM}(?:\s{{0,2}}{_ATOM})*+")
_NO_NUMBER = re.compile(r"\\[a-z{]|\d\s?:\s?\d|[<>]|\d[a-z]\b|[a-z]\s*[-+^]|^[(\[].*,")
"""In a term: it is more than a number, so that no number in it is the answer."""

_LONGEST = 40
"""Characters of a time of day."""


def plain(text: str) -> str:
    """`text` with numbers in a notation that math-verify reads: an expression, or prose."""
    text = _SIGN.sub(r"\1-", text.translate(MINUS_SIGNS))
    text = _SPACES.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _RAISED.sub(lambda match: f"^({match[0].translate(_RAISED_DIGITS)})", text)
    text = _E_NOTATION.sub(lambda match: f"{match[1]}*10^({int(match[2])})", text)
    text = _TIMES_TEN.sub(lambda match: f"*10^({match[1] or match[2] or match[3]})", text)
    return _MIXED.sub(_improper, text)


def plain_expression(text: str) -> str:
    """`text`, an expression alone: spaces may group its digits."""
    return _PLAIN_SPACES.sub(lambda match: match[0].replace(" ", ""), plain(text)).replace("∞", r"\infty ")


def plain_prose(text: str) -> str:
    """Rewrite prose whose last number is the answer, without marks of emphasis and numbers that it denies."""
    text = _MARKED.sub(r" \2", _CODE.sub(r" \1", re.sub(r'\\\$|["“”]', " ", text)))
    text = _DENIED.sub(r"\1", _SUBJECT.sub(r"\1 \2", _CLOCK_TIME.sub("h:mm", plain(text))))
    text = _CHOICE.sub(lambda match: "${},{}$".format(*(number.replace("$", "") for number in match.groups())), text)
    if "$" not in text and r"\(" not in text and r"\[" not in text:
        text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", _AREA.sub("", text))
        text = _SYMBOL.sub(lambda match: _COMMANDS.get(match[0], r"\pi "), text)
        text = _TERM.sub(lambda match: f"${match[0]}$" if _NO_NUMBER.search(match[0]) else match[0], text)
    return text


def clock_time(text: str) -> tuple[str, str] | None:
    """The time of day that `text` is, and `a`, `p` or nothing for its half; None for anything else."""
    text = text.strip()
    return _time(_ONLY_CLOCK.fullmatch(text)) if len(text) <= _LONGEST else None


def last_clock_time(text: str) -> tuple[str, str] | None:
    """The last time of day in prose, as `clock_time` gives it."""
    times = list(_CLOCK_TIME.finditer(text))
    chosen = times and not text[: times[-1].start()].rstrip().endswith(" or")
    return _time(times[-1]) if chosen else None


def _time(match: re.Match[str] | None) -> tuple[str, str] | None:
    return None if match is None else (match[1].removeprefix("0"), (match[2] or "").lower())


def _improper(match: re.Match[str]) -> str:
    whole, numerator, denominator = (int(digits) for digits in match.groups())
    return f"{whole * denominator + numerator}/{denominator}" if numerator < denominator else match[0]
