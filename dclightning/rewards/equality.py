r"""Is an answer equal to the gold answer?

``judge`` goes through a few readings, from the plainest to the most general: the same text, whole numbers, letters and
words, several parts, matrices, relations, quantities with units, other notations, and at last formulas, which are
computed. The first reading that fits decides. What cannot be read, or would take too much work, is different.

Equal is not transitive: 50 may stand for 50%, and 50% is 0.5, but 50 is not.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from dclightning.rewards import arithmetic
from dclightning.rewards.normalise import clean, split, tokens
from dclightning.rewards.notations import based, plain_digits, time_of_day
from dclightning.rewards.structure import ascending, assigned, bounded, collection, matrix, parts, sides
from dclightning.rewards.units import measure
from dclightning.rewards.words import choice, is_prose, words

_LONGEST = 4_000  # characters; of longer answers only the text is compared, and whole numbers
_DEEPEST = 12  # readings inside each other
_MOST = 100  # parts whose order may differ
_LEAST_DIGITS = 3  # of a rounded number

_INTEGER = re.compile(r"([+-]?)([0-9]+)")
# 2e-1 is 0.2 to a programmer, and 2e - 1 to a mathematician.
_SMALL_POWER = re.compile(r"(?<![\d.])(\d+)e-(\d)(?![\d.])")
# A decimal number, with a power of ten or without.
_DECIMAL = re.compile(r"-?(\d*)\.(\d+)(?:\*10\^\{?(-?\d{1,3})\}?)?")


@dataclass(frozen=True)
class Conventions:
    """What counts as equal where the choice is open.

    Attributes:
        percent_is_number: "50%" may stand for 50. It always may for 0.5.
        ignore_units: A unit may be left out. Two units that differ are different all the same.
        ignore_variable: "x = 5" may stand for 5, and "f(x) = 2x" for 2x.
        lists_are_sets: The order of "1, 2" does not matter, as that of {1, 2}; that of (1, 2) always does.
        parentheses_optional: "1, 2" may stand for (1, 2), in this order.
        base_optional: "1011" may stand for 1011 in base 2.
        inequality_is_interval: "x > 3" may stand for the interval from 3 to infinity.
        column_is_tuple: A column or row of a matrix may stand for the tuple of its entries.
        rounded_is_equal: "0.333" may stand for 1/3: a decimal number of three digits or more for what is rounded to it.
        variables_positive: Variables stand for positive numbers, so that the square root of x^2 is x.
    """

    percent_is_number: bool = True
    ignore_units: bool = True
    ignore_variable: bool = True
    lists_are_sets: bool = True
    parentheses_optional: bool = True
    base_optional: bool = True
    inequality_is_interval: bool = True
    column_is_tuple: bool = True
    rounded_is_equal: bool = False
    variables_positive: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether two answers are equal, and why."""

    equal: bool
    reason: str
    failed: bool = False
    """Whether the comparison itself went wrong."""


def judge(gold: str, answer: str, conventions: Conventions = Conventions()) -> Verdict:
    """Whether an answer is equal to the gold answer. The order of the two does not matter.

    Args:
        gold: The right answer, in LaTeX or plain text, with or without dollar signs.
        answer: What is to be judged, in the same form: what stands in a box, and not a whole response.
        conventions: What counts as equal.
    """
    plain = judge_plain(gold, answer)
    if plain is not None:
        return plain
    try:
        return _judge(clean(gold), clean(answer), conventions, 0)
    except Exception as error:  # a fault in here must not end a training
        return Verdict(False, f"raised {type(error).__name__}", failed=True)


def judge_plain(gold: str, answer: str) -> Verdict | None:
    """The verdict where nothing has to be read, which takes no time: on whole numbers, and on what is too long."""
    one, other = _INTEGER.fullmatch(gold.strip()), _INTEGER.fullmatch(answer.strip())
    if one and other:  # as text, so that a million digits do no harm
        digits = [number[2].lstrip("0") for number in (one, other)]
        negative = [number[1] == "-" for number in (one, other)]
        same = digits[0] == digits[1] and (negative[0] == negative[1] or not digits[0])
        return Verdict(same, "same integer" if same else "different integers")
    if len(gold) + len(answer) > _LONGEST:
        return _same("same text") if gold == answer else _different("too long to compare")
    return None


def _same(reason: str) -> Verdict:
    return Verdict(True, reason)


def _different(reason: str) -> Verdict:
    return Verdict(False, reason)


def _judge(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict:
    """The verdict of the first reading that fits two cleaned answers."""
    if not gold or not answer:
        return _different("empty")
    if tokens(gold) == tokens(answer):
        return _same("same text" if depth == 0 else "the same, written otherwise")
    if depth > _DEEPEST:
        return _different("too deep to compare")
    for reading in _READINGS:
        verdict = reading(gold, answer, conventions, depth + 1)
        if verdict is not None:
            return verdict
    return _formulas(gold, answer, conventions)


def _choices(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict | None:
    """Letters of a multiple choice: (A) or A, with or without what is chosen."""
    (one, chosen), (other, also) = choice(gold), choice(answer)
    if one and other and not (one == other and chosen and also):
        return _same("same letter") if one == other else _different("different letters")
    return _judge(chosen, also, conventions, depth) if (one or other) and chosen and also else None


def _words(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict | None:
    """Words, and numbers in words."""
    one, other = words(gold), words(answer)
    if one.isdecimal() or other.isdecimal():
        return _judge(one or gold, other or answer, conventions, depth)
    if one and other:
        return _same("same words") if one == other else _different("different words")
    return _different("words and a formula") if one or other else None


def _assignments(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict | None:
    """Values that have a name, or that a chain of equations ends in."""
    one, other = assigned(gold), assigned(answer)
    if one and other:
        same_name = not one[0] or not other[0] or tokens(one[0]) == tokens(other[0])
        return _judge(one[1], other[1], conventions, depth) if same_name else None
    named = one or other
    if named is None or len(sides(answer if one else gold)) > 1 or (named[0] and not conventions.ignore_variable):
        return None
    return _judge(one[1] if one else gold, other[1] if other else answer, conventions, depth)


def _unions(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict | None:
    r"""Unions of sets, in any order; "x < 1 or x > 2" is one too."""
    both = [split(text, [r"\cup"]) for text in (gold, answer)]
    if max(map(len, both)) == 1:
        return None
    for i, found in enumerate(both):
        bounds = [bounded(part) for part in parts(found[0])]
        if len(found) == 1 and len(bounds) > 1 and None not in bounds and conventions.inequality_is_interval:
            both[i] = [bound[1] for bound in bounds if bound]
    if 1 in map(len, both):
        return None
    return _match(both[0], both[1], conventions, depth, ordered=False)


def _collections(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict | None:
    """Lists, sets, tuples and intervals."""
    (kind, one), (other_kind, other) = collection(gold), collection(answer)
    kinds = {kind, other_kind}
    if len(one) == len(other) == 1 and r"\{\}" not in kinds:
        return None if (one, other) == ([gold], [answer]) else _judge(one[0], other[0], conventions, depth)
    if len(one) != len(other):
        # 100,200 is a number, unless the other one says that it is a list.
        same_digits = kinds == {""} and gold.replace(" ", "") == answer.replace(" ", "")
        return _same("same digits") if same_digits else _different("not as many parts")
    if len(one) == 1:
        kinds = {r"\{\}"}  # {5} may stand for 5
    as_sets = kinds <= {"", r"\{\}"} and (conventions.lists_are_sets or "" not in kinds)
    as_sequences = kinds <= {"", "()", "[]"} and (len(one) > 2 or "[]" not in kinds)
    if as_sets or kind == other_kind or (as_sequences and ("" not in kinds or conventions.parentheses_optional)):
        return _match(one, other, conventions, depth, ordered=not as_sets)
    return _different("different brackets")


def _matrices(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict | None:
    """Matrices, and columns as tuples."""
    both = [matrix(gold), matrix(answer)]
    if both == [[], []]:
        return None
    for i, text in enumerate((gold, answer)):
        kind, found = collection(text)
        rows = both[1 - i]
        if conventions.column_is_tuple and not both[i] and kind == "()" and 1 in (len(rows), len(rows[0])):
            both[i] = [found] if len(rows) == 1 else [[part] for part in found]
    if [len(row) for row in both[0]] != [len(row) for row in both[1]]:
        return _different("different shapes")
    one, other = ([cell for row in rows for cell in row] for rows in both)
    return _match(one, other, conventions, depth, ordered=True)


def _match(gold: list[str], answer: list[str], conventions: Conventions, depth: int, ordered: bool) -> Verdict:
    """Whether each part has an equal one of its own."""
    if len(gold) != len(answer):
        return _different("not as many parts")
    left = list(answer)
    for part in gold:
        candidates = left[:1] if ordered or len(gold) > _MOST else left
        found = next((other for other in candidates if _judge(part, other, conventions, depth).equal), None)
        if found is None:
            return _different("different parts")
        left.remove(found)
    return _same("same parts" if ordered else "same parts in some order")


def _relations(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict | None:
    """Equations and inequalities: as intervals, or the same up to a factor."""
    one, other = sides(gold), sides(answer)
    if len(one) == len(other) == 1 or len(parts(gold)) > 1 or len(parts(answer)) > 1:
        return None
    bounds, other_bounds = bounded(gold), bounded(answer)
    if bounds and other_bounds:
        same_name = tokens(bounds[0]) == tokens(other_bounds[0])
        return _judge(bounds[1], other_bounds[1], conventions, depth) if same_name else _different("different names")
    if 1 in (len(one), len(other)):
        found = bounds or other_bounds
        if not found or not conventions.inequality_is_interval:
            return _different("a relation and no relation")
        return _judge(bounds[1] if bounds else gold, other_bounds[1] if other_bounds else answer, conventions, depth)
    one, other = ascending(one), ascending(other)
    signs = [found[1] for found in (one, other)]
    if len(one) != 3 or len(other) != 3 or signs[0] != signs[1] or signs[0] not in ("=", "<", r"\le", r"\ne"):
        return _different("different relations")
    try:
        factor = arithmetic.proportion(*(f"({found[0]})-({found[2]})" for found in (one, other)))
    except (arithmetic.UnreadableError, arithmetic.TooLargeError) as error:
        return _different(f"relations that cannot be compared: {error}")
    if factor is None or (factor < 0 and signs[0] in ("<", r"\le")):
        return _different("different relations")
    return _same("the same relation up to a factor")


def _quantities(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict | None:
    """Numbers and formulas with units."""
    (one, unit), (other, other_unit) = measure(gold), measure(answer)
    if (one, other) == (gold, answer):
        return None
    units = {unit, other_unit}
    one_left_out = "" in units and (conventions.ignore_units or "%" in units)
    if len(units) == 2 and not one_left_out:
        return _different("different units")
    if len(units) == 1 or "%" not in units:
        return _judge(one, other, conventions, depth)
    hundredths = [f"({text})/100" if has == "%" else text for text, has in ((one, unit), (other, other_unit))]
    verdict = _judge(hundredths[0], hundredths[1], conventions, depth)
    return verdict if verdict.equal or not conventions.percent_is_number else _judge(one, other, conventions, depth)


def _times(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict | None:
    """Times of day, and ratios."""
    time, other_time = time_of_day(gold), time_of_day(answer)
    if time and other_time:
        half_left_out = conventions.ignore_units and not (time[2] and other_time[2])
        same = time[0] == other_time[0] or (half_left_out and time[1] == other_time[1])
        return _same("same time") if same else _different("different times")
    one, other = split(gold, ":"), split(answer, ":")
    if len(one) == len(other) == 1:
        return None
    if {len(one), len(other)} <= {1, 2}:
        quotients = [f"({found[0]})/({found[1]})" if len(found) == 2 else found[0] for found in (one, other)]
        return _judge(quotients[0], quotients[1], conventions, depth)
    return _match(one, other, conventions, depth, ordered=True)


def _bases(gold: str, answer: str, conventions: Conventions, depth: int) -> Verdict | None:
    """Digits in a base."""
    one, other = based(gold), based(answer)
    if one and other:
        return _same("same number") if one[0] == other[0] else _different("different numbers")
    if not one and not other:
        return None
    digits = [found[1] if found else plain_digits(text) for found, text in ((one, gold), (other, answer))]
    if conventions.base_optional and digits[0] == digits[1]:
        return _same("same digits")
    return _different("different numbers")


def _formulas(gold: str, answer: str, conventions: Conventions) -> Verdict:
    """Formulas, by their values."""
    if is_prose(gold) or is_prose(answer) or r"\text{" in gold + answer:
        return _different("words that differ")
    try:
        positive = conventions.variables_positive
        equal, reason = arithmetic.same_value(gold, answer, positive)
        if not equal and (_SMALL_POWER.search(gold) or _SMALL_POWER.search(answer)):
            gold, answer = (_SMALL_POWER.sub(r"\1e - \2", text) for text in (gold, answer))
            equal, reason = arithmetic.same_value(gold, answer, positive)
        if not equal and conventions.rounded_is_equal and (_rounds_to(gold, answer) or _rounds_to(answer, gold)):
            return _same("same number when rounded")
    except arithmetic.AmbiguousError as error:
        return _different(f"ambiguous: {error}")
    except arithmetic.TooLargeError:
        return _different("too large to evaluate")
    except arithmetic.UnreadableError as error:
        return _different(f"cannot be read: {error}")
    return Verdict(equal, reason)


def _rounds_to(exact: str, rounded: str) -> bool:
    """Whether a number is rounded to a decimal number, with digits enough to tell it from others."""
    digits = _DECIMAL.fullmatch(rounded.replace(" ", ""))
    if digits is None or len((digits[1] + digits[2]).lstrip("0")) < _LEAST_DIGITS:
        return False
    return arithmetic.is_near(exact, rounded, Fraction(10) ** (int(digits[3] or 0) - len(digits[2])) / 2)


_READINGS = (
    _choices,
    _words,
    _assignments,
    _relations,
    _unions,
    _matrices,
    _collections,
    _times,
    _bases,
    _quantities,
)
