"""Whether two parsed expressions are equal. Imports sympy, which takes seconds.

two numbers  ─┬─ integers, fractions, finite decimals ─► exactly
              ├─ a decimal and 1/3, sqrt(2), pi, …    ─► to six significant digits
              └─ no decimal: sqrt(12) and 2*sqrt(3)   ─► to 30 digits
all else: sets, intervals, equations, terms           ─► math-verify, with more decimals where numbers are small
"""

import math
import re
import sys
from collections.abc import Iterator
from itertools import product, starmap

from math_verify import verify
from math_verify.grader import get_pct_val
from sympy import Basic, Eq, Expr, FiniteSet, Float, Interval, Rational, Tuple, UnevaluatedExpr
from sympy.logic.boolalg import Boolean

_SIX_DIGITS = 5e-6
"""Largest relative error of a number that is rounded to six significant digits."""
_DIGITS = 30
_EXACT = 1e-25
_DECIMALS, _PRECISION = 6, 15
"""What math-verify compares by default: absolute, so too few for numbers far below 1."""
_FRAMES = 10_000
"""Of Python's stack, while expressions are compared: there a library takes a full stack for "not equal"."""


def equal(gold: list[object], answer: list[object]) -> bool:
    """Whether `answer` equals `gold`, each as `math_verify.parse` returns it."""
    recursion_limit = sys.getrecursionlimit()
    sys.setrecursionlimit(_FRAMES)
    try:
        # 25 % is 25 as well as 0.25.
        a, b = (
            [value] if (percent := get_pct_val(value)) is None else [percent, percent / 100]
            for value in (gold[0], answer[0])
        )
        if all(map(_is_number, (*a, *b))):
            return any(starmap(_same_number, zip(a, b, strict=True) if len(a) == len(b) else product(a, b)))
        if _is_set_and_tuple(gold, answer):
            return False
        more = _decimals_below_one(gold[0], answer[0])
        return bool(
            verify(
                gold,
                answer,
                float_rounding=_DECIMALS + more,
                numeric_precision=_PRECISION + more,
                allow_set_relation_comp=True,
                timeout_seconds=None,
                raise_on_error=True,
            )
        )
    finally:
        sys.setrecursionlimit(recursion_limit)


def _is_set_and_tuple(gold: list[object], answer: list[object]) -> bool:
    r"""Whether one lists numbers in any order, as `\pm 1` does, and the other is a tuple or an interval.

    The parser reads `1,2` as a set too. As the reference answer, it may mean either.
    """
    values = [value.rhs if isinstance(value, Eq) else value for value in (gold[0], answer[0])]
    is_list, is_list_too = (isinstance(value, FiniteSet) and len(value) > 1 for value in values)
    is_tuple, is_tuple_too = (isinstance(value, (Interval, Tuple, Boolean)) for value in values)
    is_marked = re.search(r"\\{|\\pm|±", str(gold[-1])) is not None
    return (is_tuple and is_list_too) or (is_list and is_marked and is_tuple_too)


def _is_number(value: object) -> bool:
    """Whether `value` is a finite number. A percentage is none: math-verify takes 25 % for 25 and for 0.25."""
    return isinstance(value, Expr) and bool(value.is_number and value.is_finite) and not value.has(UnevaluatedExpr)


def _same_number(gold: Expr, answer: Expr) -> bool:
    a, b = gold.doit(), answer.doit()
    has_decimal = a.has(Float) or b.has(Float)
    exact = [Rational(str(value)) for value in (a, b) if value.is_Rational or value.is_Float]
    if len(exact) == 2 and (not has_decimal or all(map(_is_finite_decimal, exact))):
        return bool(exact[0] == exact[1])
    difference, size = abs((a - b).evalf(_DIGITS)), abs(a.evalf(_DIGITS))
    return bool(difference <= (_SIX_DIGITS if has_decimal else _EXACT) * size)


def _is_finite_decimal(number: Rational) -> bool:
    rest = int(number.q)
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _decimals_below_one(*values: object) -> int:
    """How many zeros follow the decimal point in the smallest number of `values`."""
    smallest = min((number for value in values for number in _sizes(value)), default=1.0)
    return max(0, -math.floor(math.log10(smallest)))


def _sizes(value: object) -> Iterator[float]:
    if not isinstance(value, Basic):
        return
    if not _is_number(value):
        for part in value.args:
            yield from _sizes(part)
    elif (size := float(abs(value.evalf()))) > 0:
        yield size
