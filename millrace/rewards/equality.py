"""Whether two parsed expressions are equal. Imports sympy, which takes seconds.

two numbers  ─┬─ integers, fractions, finite decimals ─► exactly
              ├─ a decimal and 1/3, sqrt(2), pi, …    ─► to six significant digits
              └─ no decimal: sqrt(12) and 2*sqrt(3)   ─► to 30 digits
all else: sets, intervals, equations, terms           ─► math-verify, to six decimals
"""

import sys

from math_verify import verify
from sympy import Expr, Float, Rational, UnevaluatedExpr

_SIX_DIGITS = 5e-6
"""Largest relative error of a number that is rounded to six significant digits."""
_DIGITS = 30
_EXACT = 1e-25
_FRAMES = 10_000
"""Of Python's stack, while expressions are compared: there a library takes a full stack for "not equal"."""


def equal(gold: list[object], answer: list[object]) -> bool:
    """Whether `answer` equals `gold`, each as `math_verify.parse` returns it."""
    recursion_limit = sys.getrecursionlimit()
    sys.setrecursionlimit(_FRAMES)
    try:
        if _is_number(gold[0]) and _is_number(answer[0]):
            return _same_number(gold[0], answer[0])
        return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    finally:
        sys.setrecursionlimit(recursion_limit)


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
