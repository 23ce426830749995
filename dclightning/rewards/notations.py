"""Numbers that are written neither as decimals nor as formulas: times of day, and digits in a base."""

import re

from dclightning.rewards.words import NUMERALS

_TIME = re.compile(
    r"([01]?\d|2[0-4]):([0-5]\d)(?::([0-5]\d))?\s*(?:\\text\{)?\s*(?:([ap])\.?\s*m\.?)?\s*\}?", re.IGNORECASE
)
# 1011_2, (1011)_2, 1011_{two}, 1011 in base 2; \text{A5}_{11}.
_DIGITS = r"(-?)\s*(?:\\text\{)?\(?(\d[0-9A-Za-z]*|[A-Z][0-9A-Z]*\d[0-9A-Z]*)\)?\}?"
_BASE = r"\s*(?:_|(?:\\text\{)?\s*(?:in )?base\s*\}?)\s*\{?\s*(?:\\text\{)?\s*(\d+|[a-z]+)\s*\}?\s*\}?"
_BASED = re.compile(_DIGITS + _BASE)
_PLAIN = re.compile(_DIGITS)


def time_of_day(text: str) -> tuple[int, int, str] | None:
    """The seconds since midnight, the seconds as written, and a or p for the half of the day, if that is given."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    written = int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3] or 0)
    half = (found[4] or "").lower()
    return (written if not half else written % 43200 + 43200 * (half == "p")), written, half


def based(text: str) -> tuple[int, str] | None:
    """The value of digits in a base, and the digits."""
    found = _BASED.fullmatch(text)
    if found is None or len(found[2]) > 1_000:
        return None
    try:
        base = NUMERALS.index(found[3]) if found[3] in NUMERALS else int(found[3])
        return int(found[1] + found[2], base if base > 1 else 99), found[1] + found[2].lstrip("0")
    except ValueError:  # no base, or no digit in it
        return None


def plain_digits(text: str) -> str:
    """The digits of a number whose base is left out."""
    found = _PLAIN.fullmatch(text)
    return "" if found is None else found[1] + found[2].lstrip("0")
