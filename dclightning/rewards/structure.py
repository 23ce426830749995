r"""How a cleaned answer is built: of parts, in brackets, of rows, of sides."""

import re
from fractions import Fraction
from itertools import pairwise

from dclightning.rewards import arithmetic
from dclightning.rewards.normalise import split, unwrap
from dclightning.rewards.units import measure

_CONJUNCTION = re.compile(r"\\text\{[^{}]*\}|,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_SIGN = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
# 1,234 and 12,345,678: digits in threes.
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")


def parts(text: str, thousands: bool = True) -> list[str]:
    """The parts of a list, or the text alone. What has a plus-minus sign is two parts.

    Args:
        text: A cleaned answer.
        thousands: Whether "1,234" is one number.
    """
    text = _CONJUNCTION.sub(lambda m: m[0] if m[0][0] == "\\" else ",", text)
    if thousands:
        text = _THOUSANDS.sub(lambda m: m[0] if _is_inside(text, m.start()) else m[0].replace(",", ""), text)
    groups = split(text, ";")
    if len(groups) > 1 and any(len(split(group, ",")) > 1 for group in groups):
        return [f"({group})" for group in groups]
    found = []
    for part in split(text, ",;"):
        if part:
            found += _signed(part)
    return found or [text]


def _signed(part: str) -> list[str]:
    r"""The values of what has \pm signs: each has its own sign, but for those that a \mp ties together."""
    if r"\mp" in part:
        return [part.replace(r"\pm", one).replace(r"\mp", other) for one, other in ("+-", "-+")]
    if not 0 < part.count(r"\pm") < 4:
        return [part]
    return [value for sign in "+-" for value in _signed(part.replace(r"\pm", sign, 1))]


def _is_inside(text: str, end: int) -> bool:
    """Whether a bracket is open at a place; the braces of commands are none."""
    before = text[:end]
    return any(before.count(one) > before.count(other) for one, other in (("(", ")"), ("[", "]"), (r"\{", r"\}")))


def collection(text: str) -> tuple[str, list[str]]:
    """The brackets around a tuple, an interval or a set, and its parts; no brackets for a list or a lone answer."""
    if text in (r"\mathbb{R}", r"\mathbb R"):
        return "()", [r"-\infty", r"\infty"]
    opening, inside, closing = unwrap(text)
    if opening in ("(", "[") and _SIGN.search(inside):
        return "", parts(text)
    if opening in ("(", "[", r"\{") and closing in (")", "]", r"\}"):
        found = parts(inside, thousands=False)
        if len(found) > 1 or opening == r"\{":
            return opening + closing, found
    return "", parts(text)


# A factor or none, brackets or none, and the rows.
_MATRIX = re.compile(
    r"([^&]*?)[(\[]?\s*\\begin\{(?:[pb]|small)?(?:matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\w+\}\s*[)\]]?"
)


def matrix(text: str) -> list[list[str]]:
    """The rows of a matrix; none if the text is no matrix."""
    found = _MATRIX.fullmatch(text) if r"\begin" in text else None
    if found is None or r"\begin" in found[2]:
        return []
    rows = [split(row, "&") for row in split(found[2], [r"\\"]) if row]
    return [[f"({found[1]})*({cell})" if found[1].strip() else cell for cell in row] for row in rows]


EQUAL = ("=", r"\equiv", r"\approx", r"\in")
ORDER = ("<", ">", r"\le", r"\ge", r"\ne")
_SUBSCRIPT = r"(?:_(?:[A-Za-z0-9]|\{[^{}]*\}|\\[a-z]+))?'*"
_SYMBOL = rf"(?:[A-Za-z]|\\(?!frac|sqrt|pi\b|infty)[a-z]+ ?){_SUBSCRIPT}"
# What a value is given to: x, x_1, y', \theta, f(x), P(A); (x, y); \text{Area}, Area, \overline{AB}, \angle ABC.
_NAME = re.compile(
    rf"{_SYMBOL}(?:\([^()]*\))?|\({_SYMBOL}(?:\s*,\s*{_SYMBOL})+\)|{_SYMBOL}(?:\s*:\s*{_SYMBOL})+"
    r"|\\(?:text|overline)\{[^{}]*\}|[A-Za-z]{4,}|m?\s*\\angle\s*[\w{} ]+"
)
# AB, |AB|, [ABC]: names too, if a number is given to them; RS = UV is an equation between products.
_SEGMENT = re.compile(r"\|?[A-Z]{2,3}\|?(?:\s*[:/]\s*[A-Z]{2,3})*|\[[A-Z]{3,4}\]|\\frac\{[A-Z]{2}\}\{[A-Z]{2}\}")
_INFINITY = r"\infty "


def sides(text: str) -> list[str]:
    """The sides of a relation, with its signs between them."""
    return split(text, (*EQUAL, *ORDER), keep=True)


def assigned(text: str) -> tuple[str, str] | None:
    """The name and the value in "x = 5", "x = 2 + 3 = 5", "x is in S"; the value, without a name, in "2 + 3 = 5"."""
    found = sides(text)
    if len(found) == 1 or not set(ORDER).isdisjoint(found[1::2]) or len(parts(_SIGN.sub("", text))) > 1:
        return None
    if len(found) == 3 and found[1] == "=" and re.fullmatch(_SYMBOL, found[2]) and not re.fullmatch(_SYMBOL, found[0]):
        found.reverse()
    # What follows "is about" is a rounded value of what comes before.
    exact = found[: found.index(r"\approx", 2)] if r"\approx" in found[2:] else found
    if not found[0] or _NAME.fullmatch(found[0]) or (_SEGMENT.fullmatch(found[0]) and re.search(r"\d", exact[-1])):
        return (found[0], exact[-1]) if _agree(exact[2::2]) is not False else None
    if found[1] == r"\approx":
        return ("", found[0]) if _about(found[0], found[2]) else None
    return ("", exact[-1]) if _agree(exact[::2]) else None


def _agree(formulas: list[str]) -> bool | None:
    """Whether formulas have one value; None if that cannot be found out."""
    values = [number if unit != "%" else f"({number})/100" for number, unit in map(measure, formulas)]
    try:
        return all(arithmetic.same_value(one, other)[0] for one, other in pairwise(values))
    except (arithmetic.UnreadableError, arithmetic.TooLargeError):
        return None


def _about(exact: str, rounded: str) -> bool:
    """Whether a number is about another one: within a hundredth of it."""
    try:
        value = arithmetic.value(exact)
        return not arithmetic.is_real(value) or arithmetic.is_near(
            exact, rounded, abs(Fraction(str(float(value)))) / 100
        )
    except (arithmetic.UnreadableError, arithmetic.TooLargeError, OverflowError):
        return True


def ascending(found: list[str]) -> list[str]:
    """The sides of a relation with the smaller ones first, if it is one from greater to smaller."""
    if set(found[1::2]) <= {">", r"\ge"}:
        return [{">": "<", r"\ge": r"\le"}.get(side, side) for side in reversed(found)]
    return found


def bounded(text: str) -> tuple[str, str] | None:
    r"""The name and the set in "a < x", "x \ge b", "a < f(x) \le b", "x \ne a" and "x \in S"."""
    found = ascending(sides(text))
    if len(found) == 3 and found[1] == r"\in" and _NAME.fullmatch(found[0]):
        return found[0], found[2]
    if len(found) == 3 and found[1] == r"\ne" and _NAME.fullmatch(found[0]):
        return found[0], rf"(-\infty,{found[2]})\cup({found[2]},\infty)"
    if len(found) == 3 and _NAME.fullmatch(found[0]):
        found = [f"-{_INFINITY}", "<", *found]
    elif len(found) == 3:
        found = [*found, "<", _INFINITY]
    if len(found) != 5 or not set(found[1::2]) <= {"<", r"\le"} or not _NAME.fullmatch(found[2]):
        return None
    return found[2], f"{'(' if found[1] == '<' else '['}{found[0]},{found[4]}{')' if found[3] == '<' else ']'}"
