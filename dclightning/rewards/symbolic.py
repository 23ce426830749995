"""Formulas that only math-verify can read: sums, integrals, limits, derivatives, operations on sets.

It reads them, but their values decide, at a few points if they have variables. Its own comparison rounds, drops tiny
differences, takes equations that it cannot solve for equal, and may simplify for minutes.
"""

import logging
import re
from functools import cache
from typing import Any

_DIGITS = 30  # to which values must agree
_POINTS = 3  # at which formulas with variables must agree
_LONGEST = 500  # characters of both formulas
# What could take forever: powers and factorials of powers and factorials, and numbers of five digits.
_HEAVY = re.compile(r"\^\s*\{[^{}]*[\^!]|\^\s*[^\s{]+\s*\^|\^[^!]*[)}]\s*!|![\s)}]*!|\d{5}|\d{4}\s*!")
# What it misreads: words as products, \gamma as Euler's constant, other commands it does not know as variables.
_FOREIGN = re.compile(r"\\(?:text|gamma|Re|Im|arg|bmod|pmod|mho|mapsto|dots)")
# Where it needs braces: \frac12, \frac{1}2, \sqrt2.
_BARE = re.compile(r"(\\frac|\\frac\s*\{[^{}]*\}|\\sqrt)\s*(\d)")


def same_by_math_verify(gold: str, answer: str) -> tuple[bool, str]:
    """Whether two cleaned formulas, as math-verify reads them, are equal by their values, and how that was found."""
    if len(gold) + len(answer) > _LONGEST or _HEAVY.search(gold) or _HEAVY.search(answer):
        return False, "too large to evaluate"
    letters = set(re.sub(r"\\[A-Za-z]+", "", gold + answer))
    mixed = any(letter.isupper() and letter.lower() in letters for letter in letters)
    if mixed or _FOREIGN.search(gold) or _FOREIGN.search(answer):  # it does not tell R from r either
        return False, "cannot be read"
    try:
        one, other = _read(gold), _read(answer)
        if one is None or other is None:
            return False, "cannot be read"
        equal = _agree(one, other)
    except Exception as error:
        return False, f"math-verify raised {type(error).__name__}"
    return equal, f"read by math-verify, {f'equal to {_DIGITS} digits' if equal else 'different'}"


@cache
def _reader() -> Any:
    from math_verify import LatexExtractionConfig, parse
    from math_verify.parser import NormalizationConfig

    # It warns if its alarms are off; they work in the main thread only, and interrupt too little.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    plain = NormalizationConfig(basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none")
    config = [LatexExtractionConfig(normalization_config=plain, boxed_match_priority=-1)]
    return lambda latex: parse(f"${latex}$", config, "no_fallback", parsing_timeout=None, raise_on_error=True)


def _read(text: str) -> Any:
    """What math-verify reads: a sympy object; None if it cannot."""
    text = _BARE.sub(r"\1{\2}", _BARE.sub(r"\1{\2}", text))
    found = _reader()(text.replace("*", r"\cdot ").replace("°", r"^{\circ}").replace("%", r"\%"))
    return found[0] if found else None


def _agree(one: Any, other: Any) -> bool:
    """Whether two sympy objects are equal: sets as sets, expressions by their values."""
    from sympy import Expr, Product, Rational, Set, Sum

    if isinstance(one, Set) and isinstance(other, Set):
        return bool(one == other or ((one - other).is_empty and (other - one).is_empty))
    if not isinstance(one, Expr) or not isinstance(other, Expr):
        return False
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    for point in range(_POINTS if symbols else 1):
        scale = 1 if one.has(Sum, Product) or other.has(Sum, Product) else 5
        place = {symbol: Rational(7 * point + 3 * index + 2, scale) for index, symbol in enumerate(symbols)}
        left, right = _value(one.subs(place)), _value(other.subs(place))
        if left is None or right is None:
            return False
        if left != right and abs(left - right) > max(abs(left), abs(right)) * Rational(1, 10**_DIGITS):
            return False
    return True


def _value(expression: Any) -> Any:
    """The value of an expression in numbers; None if it has none."""
    for unfinished in (expression, expression.doit()):
        found = unfinished.evalf(_DIGITS + 20)
        real, imaginary = found.as_real_imag()
        if real.is_Number and imaginary.is_Number:
            return found if found.is_finite else None
    return None
