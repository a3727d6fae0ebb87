r"""The unit of an answer. Two that name different units are not equal; one without a unit can equal any.

12 \text{ cm}^2, 12 square centimetres, 12 cm² ─► 12, cm2      $5, 5 dollars ─► 5, dollar      30°C ─► 30, degree c
1011_2, (1011)_2 ─► 1011, base2      36元 ─► 36, 元
"""

import re

_TABLE = """mm millimeter; cm centimeter; dm decimeter; m meter; km kilometer; in inch inche; ft foot feet; yd yard;
mi mile; mg milligram; g gram; kg kilogram; ton tonne; pound lb £; oz ounce; ml milliliter; l liter; gallon;
s sec second; min minute; h hr hour; day; week; month; year; cent; dollar $ \\$; euro €; yen ¥; rupee ₹; degree;
radian rad; mi/h mph; km/h kph kmh"""
_UNITS = {
    form: names[0] for names in map(str.split, _TABLE.split(";")) for name in names for form in (name, name + "s")
}
_POWERS = {"square": "2", "sq": "2", "²": "2", "cubic": "3", "cu": "3", "³": "3"}
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}|\\[,;:! ]|~")
_DEGREE = re.compile(r"\^?\{?\\circ\}?|°")
_POWER = r"(?:\^?\{?([23²³])\}?)?"
_UNIT = re.compile(
    rf"(?<=[\d)}}])[$*]*(\s*)(?:(square|sq|cubic|cu)\.?\s+)?(?!in\s+[a-z])([a-z]+){_POWER}"
    rf"(?:\s*(?:/|\bper\b)\s*([a-z]+){_POWER})?(?:(?<=degree|egrees)\s+(celsius|fahrenheit|[cf]))?(?![a-z])\.?",
    re.IGNORECASE,
)
_BASE = re.compile(r"\(?\b(?=[A-F]*\d)([\dA-F]+)\)?_\{?(\d+)\}?\W*$")
_SIGN = re.compile(r"(\\?\$|[€£¥₹])\s?\.?\d[\d.,]*[^\d$]*$")
_FOREIGN = re.compile(
    r"(?<=\d)\s*(?:\\text\s*\{\s*)?(?!分之|半|成|割|折|打|分の|분의|мил|लाख|करोड|ألف|مليون|مليار|ล้าน|พัน|หมื่น|แสน)"
    r"((?:(?![a-zA-Z\u00aa-\u03ff])[^\W\d_])+)\.?\s*\}?$"
)
"""Words in other scripts than Latin and Greek, but for those that are part of the number."""
_WORDS = re.compile(
    r"(?<=\d)\s+(?!(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|alpha|beta|gamma|delta|theta|lambda)h?\b)"
    r"[a-z]{4,}(?:\s+[a-z]+)*$"
)


def split_unit(text: str, gold: frozenset[str] | None = None, *, prose: bool = False) -> tuple[str, frozenset[str]]:
    """Return an expression without its unit, and the words that name the unit; in prose, the last number's.

    Words that are not a known unit, as in "3 fifths", are part of the value unless the `gold` unit has them too.
    """
    flat = _DEGREE.sub(" degree ", _TEXT.sub(r" \1", text))
    if base := _BASE.search(flat):
        # As a product of letters, 2A would equal A2.
        digits = base[1] if base[1].isdigit() else rf"\text{{{base[1]}}}"
        return flat[: base.start()] + digits, frozenset([f"base{base[2]}"])
    for match in [match for match in _UNIT.finditer(flat) if _words(match)][-1:]:
        if not re.search(r"\d" if prose else r"\S", flat[match.end() :]):
            # In 5m, the letter may be a variable.
            value = flat[: match.start()] if match[1] or len(match[0]) > 1 else text
            return value, frozenset(_words(match))
    if sign := _SIGN.search(flat):
        return text, frozenset([_UNITS[sign[1]]])
    if not prose and (foreign := _FOREIGN.search(text)):
        return text[: foreign.start()], frozenset([foreign[1]])
    if (other := _WORDS.search(text)) and (gold is None or other[0] in gold):
        return text[: other.start()], frozenset([other[0]])
    return text, frozenset()


def _words(match: re.Match[str]) -> list[str]:
    """The words for a unit, such as `degree c` or `m/s2`; none if they are not those of a unit."""
    _, scale, name, raised, per, per_raised, temperature = match.groups("")
    unit, divisor = (_UNITS.get(re.sub("tre(?=s?$)", "ter", word.lower())) for word in (name, per))
    if unit is None or (per and divisor is None):
        return []
    power = scale.lower() or raised
    unit += _POWERS.get(power, power) + (f"/{divisor}{_POWERS.get(per_raised, per_raised)}" if per else "")
    return f"{unit} {temperature[:1].lower()}".split()
