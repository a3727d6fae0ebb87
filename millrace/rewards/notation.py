r"""Rewrites notation that math-verify misreads, in responses and in reference answers.

everywhere     −5, －５ ─► -5     12\,500 ─► 12500        1.5e-7, 1.5 × 10⁻⁷ ─► 1.5*10^(-7)      3 1/4 ─► 13/4
               1.5 million, 150万 ─► 1500000               a column vector ─► (1,2)
in a box       \approx 7, = 7, 7. ─► 7                     12.5 percent ─► 12.5\%          3 fifths ─► 3/5
in prose too   **42** ─► 42       4π, 2\sqrt{3}, 2:3, (1, 2), 4x ─► in $…$, read as a whole
               3 or 5 ─► $3,5$    42, not 43 ─► 42, not   the answer to part 2 is 7 ─► the answer is 7

Times, dates, ranges such as 10-15, and ratios of three or more are figures that are compared as text. Prose loses them:
`10:15` is neither 2/3 nor 10.
"""

import math
import re
from decimal import Decimal

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
_FULL_WIDTH = str.maketrans({0xFEE0 + code: code for code in range(0x21, 0x7F)})
_IN_SCRIPT = re.compile(r"(?<=[\u0370-\uffff])(?<=[^\W\d_]|[：，、。])(?=-?\d)")
_MULTIPLES = {
    name: power
    for power, names in {1: "十십", 2: "百백", 3: "千천", 4: "万萬만", 8: "亿億억", 12: "兆조"}.items()
    for name in names
} | {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "тыс": 3, "млн": 6, "млрд": 9}
_MULTIPLE = re.compile(
    r"(?<![\d.])(\d+(?:,\d{3})*(?:\.\d+)?)(?:\s|\\[,; ]|~)*(\\text\s*\{\s*)?"
    rf"((?:(?:{'|'.join(_MULTIPLES)})(?![a-zа-я克米瓦])\s?){{1,3}})"
)
_PERCENT = re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*)?per ?cent(?:age)?\s*\}?")
_NAMED = ("half|halves", "third", "quarter|fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_FRACTION = re.compile(
    rf"(?<![\d./])(\d+)[\s~-]*(?:\\text\s*\{{\s*)?\b(?:{'|'.join(f'({names})s?' for names in _NAMED)})\b\s*\}}?",
    re.IGNORECASE,
)
_MATRIX = r"(?:[pb]?matrix|array)\}"
_COLUMN = re.compile(
    rf"(?:\\left\s*[(\[]\s*)?\\begin\{{{_MATRIX}(?:\{{[clr]\}})?((?:(?!\\begin|\\end)[^&]){{1,300}})\\end\{{{_MATRIX}(?:\s*\\right\s*[)\]])?"
)
_ROW_END = re.compile(r"\s*\\\\(?:\[\w*\])?\s*")
_TUPLE_MARKS = re.compile(r"(?<=\))\s*\^\s*\{?(?:T|\\top|\\intercal)\b\}?")
_ABOUT = r"\\(?:approx|simeq|sim)(?![a-z])|(?:\\text\s*\{\s*)?(?:about|approximately)\b\s*\}?"
_AROUND = re.compile(rf"^(?:[\s=≈]|{_ABOUT})+|(?<=[^\s,;。])(?:[\s,;。]|(?<!\\right)\.|\\[,;:! ])+$")
_IN_DOLLARS = re.compile(r"(?<!\\)\$([^$]*)(?<!\\)\$")

_CLOCK = r"(?:[01]?\d|2[0-4]):[0-5]\d(?::[0-5]\d)?"
_HALF_OF_DAY = r"(?:\s|\\[ ,;]|~|\\(?:text|mathrm|mbox)\s*\{|\{)*([ap])\.?\s?m\b\.?[\s}]*"
_RANGE = r"(?<![-–+*/^=(])\d+(?:[-–]\d+)+(?!\s*[=+*/^\\(])"
_FIGURE = re.compile(
    rf"(?<![\w:.])(?:({_CLOCK})(?:{_HALF_OF_DAY})?|(\d+(?:\s?:\s?\d+){{2,}})|({_RANGE}|(?<!/)\d+(?:/\d+){{2,}}|\d+(?:\.\d+){{2,}}))"
    r"(?![\w:]|[-–./]\d)",
    re.IGNORECASE,
)
_TEXT = re.compile(r"(?<!\s)\s*\\(?:text|mathrm|mbox)\s*\{\s*(-|[^{}]*)\}\s*")

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


def plain(text: str) -> str:
    """`text` with numbers in a notation that math-verify reads: an expression, or prose."""
    text = re.sub(r"\d", lambda match: str(int(match[0])), text.translate(MINUS_SIGNS).translate(_FULL_WIDTH))
    text = _MULTIPLE.sub(_multiplied, _SIGN.sub(r"\1-", text))
    text = _COLUMN.sub(lambda match: f"({','.join(_ROW_END.split(match[1].strip()))})", text)
    text = _TUPLE_MARKS.sub("", text.replace(r"\langle", "(").replace(r"\rangle", ")"))
    text = _SPACES.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _RAISED.sub(lambda match: f"^({match[0].translate(_RAISED_DIGITS)})", text)
    text = _E_NOTATION.sub(lambda match: f"{match[1]}*10^({int(match[2])})", text)
    text = _TIMES_TEN.sub(lambda match: f"*10^({match[1] or match[2] or match[3]})", text)
    return _MIXED.sub(_improper, text)


def plain_expression(text: str) -> str:
    """`text`, an expression alone: spaces may group its digits, and marks around it mean nothing."""
    text = _PERCENT.sub(r"\%", _AROUND.sub("", _IN_DOLLARS.sub(r"\1", plain(text))))
    text = _FRACTION.sub(lambda match: f"{match[1]}/{match.lastindex}", text)
    text = _PLAIN_SPACES.sub(lambda match: match[0].replace(" ", ""), text)
    return _SYMBOL.sub(lambda match: _COMMANDS.get(match[0], match[0]), text)


def plain_prose(text: str) -> str:
    """Rewrite prose whose last number is the answer, without marks of emphasis and numbers that it denies."""
    text = _MARKED.sub(r" \2", _CODE.sub(r" \1", re.sub(r'\\\$|["“”]', " ", text)))
    text = _DENIED.sub(r"\1", _SUBJECT.sub(r"\1 \2", _FIGURE.sub("h:mm", plain(_IN_SCRIPT.sub(" ", text)))))
    text = _CHOICE.sub(lambda match: "${},{}$".format(*(number.replace("$", "") for number in match.groups())), text)
    if "$" not in text and r"\(" not in text and r"\[" not in text:
        text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", _AREA.sub("", text))
        text = _SYMBOL.sub(lambda match: _COMMANDS.get(match[0], r"\pi "), text)
        text = _TERM.sub(lambda match: f"${match[0]}$" if _NO_NUMBER.search(match[0]) else match[0], text)
    return text


def figure(text: str) -> tuple[str, str] | None:
    """The time, date, range or ratio that `text` is, and `a`, `p` or nothing for its half of a day; None for others."""
    return _figure(
        _FIGURE.fullmatch(_TEXT.sub(lambda match: match[1] if match[1] == "-" else f" {match[1]}", text).strip())
    )


def last_figure(text: str) -> tuple[str, str] | None:
    """The last one in prose, as `figure` gives it."""
    figures = list(_FIGURE.finditer(text))
    chosen = figures and not text[: figures[-1].start()].rstrip().endswith(" or")
    return _figure(figures[-1]) if chosen else None


def _figure(match: re.Match[str] | None) -> tuple[str, str] | None:
    if match is None:
        return None
    time, half, ratio, other = match.groups("")
    terms = [int(term) for term in re.findall(r"\d+", ratio)]
    reduced = ":".join(str(term // (math.gcd(*terms) or 1)) for term in terms)
    return time.removeprefix("0") or reduced or other.replace("–", "-"), half.lower()


def _multiplied(match: re.Match[str]) -> str:
    power = sum(_MULTIPLES[name] for name in re.findall("|".join(_MULTIPLES), match[3]))
    number = Decimal(match[1].replace(",", "")).scaleb(power)
    return f"{number:f}{match[2] or ''}"


def _improper(match: re.Match[str]) -> str:
    whole, numerator, denominator = (int(digits) for digits in match.groups())
    return f"{whole * denominator + numerator}/{denominator}" if numerator < denominator else match[0]
