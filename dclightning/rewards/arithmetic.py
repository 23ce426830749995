r"""The value of a formula in LaTeX: exact while it is rational, else to 150 digits.

Formulas without variables are compared by their values, those with variables at sample points, drawn once and for all.
The work is bounded: what would take too much raises ``TooLargeError`` before it is computed.
"""

import hashlib
import math
import operator
import re
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

from dclightning.rewards.normalise import tokens

_PRECISION = 500  # bits of a value that is not rational
_AGREE = 300  # leading bits that equal values have in common; the rest is for what is lost on the way
_POINTS = 16  # at which formulas with variables must agree
_WHOLE_POINTS = 41  # the same for formulas of whole numbers; a prime
_LARGEST = 1 << 16  # bits of an exact number: enough for 5000!
_LONGEST = 2_000  # characters of a formula
_DEEPEST = 80  # brackets, roots and powers inside each other
_WORK = 4_000_000  # bits computed for one value
_TERMS = 1_000  # of a sum or product over an index

_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega hbar ell infty"
)
_VARIABLE = re.compile(rf"[^\W\d_]|\\text\{{[^\W\d_]\}}|\\(?:{_GREEK.replace(' ', '|')})")
_ACCENT = re.compile(r"\\(?:vec|bar|overline|hat|widehat|tilde|d?dot|mathbb|mathcal|overrightarrow)")
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "|": "|"}
_NO_FACTOR = {*_CLOSING.values(), *",+-*/^_!'°&=<>", ""} - {"|"}


class UnreadableError(Exception):
    """The text is no formula with a value."""


class AmbiguousError(UnreadableError):
    """The text is a formula that people read in two ways."""


class TooLargeError(Exception):
    """The formula would take too much work, or adds numbers out of all proportion."""


class _UndefinedError(Exception):
    """The formula has no value at this point."""


class _NotNaturalError(_UndefinedError):
    """The formula has values for natural numbers only."""


_ERRORS = (_NotNaturalError, _UndefinedError, UnreadableError, TooLargeError, AmbiguousError)
"""From what may pass at another point to what settles the matter, whichever formula it is in."""


def same_value(gold: str, answer: str, positive: bool = False) -> tuple[bool, str]:
    """Whether two cleaned formulas are equal, and how that was found.

    Args:
        gold: One formula.
        answer: The other one.
        positive: Whether variables stand for positive numbers only.

    Raises:
        UnreadableError: If one of them is no formula, or has no value.
        TooLargeError: If comparing them would take too much work.
    """
    agreed = 0
    for one, other, names in _values(gold, answer, positive):
        equal = agree(one, other)
        if not names:
            exact = isinstance(one, Fraction) and isinstance(other, Fraction)
            return equal, ("same number" if exact else "equal to 90 digits") if equal else "different numbers"
        if not equal:
            return False, "different formulas"
        agreed += 1
    if agreed < _POINTS // 2:
        raise UnreadableError("has too few values")
    return True, f"equal at {agreed} points"


def proportion(gold: str, answer: str) -> Any:
    """The real factor from the values of the second formula to those of the first; None if there is none."""
    factors = []
    for one, other, _ in _values(gold, answer):
        if one or other:
            factors.append(_inexact(one) / _inexact(other) if one and other else None)
            if factors[-1] is None or not agree(factors[0], factors[-1]):
                return None
    return factors[0] if len(factors) >= _POINTS // 2 and is_real(factors[0]) else None


def value(text: str) -> Any:
    """The value of a cleaned formula without variables.

    Raises:
        UnreadableError: If it has variables, or is no formula, or has no value.
        TooLargeError: If it would take too much work.
    """
    found, _, names = next(_values(text, "0"), (None, None, {"a variable"}))
    if names:
        raise UnreadableError("has variables")
    return found


def agree(left: Any, right: Any) -> bool:
    """Whether two values are equal: exactly if both are rational, else in their leading bits."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    one, other = _inexact(left), _inexact(right)
    return bool(abs(one - other) <= _mp().ldexp(max(abs(one), abs(other)), -_AGREE))


def is_near(left: str, right: str, distance: Fraction) -> bool:
    """Whether the values of two cleaned formulas without variables are no farther apart than that."""
    return bool(abs(_inexact(value(f"({left})-({right})"))) <= _inexact(distance))


def is_real(number: Any) -> bool:
    """Whether a value is a real number."""
    return not isinstance(number, _mp().mpc)


def _values(left: str, right: str, positive: bool = False) -> Iterator[tuple[Any, Any, set[str]]]:
    """The values of two formulas and their variables, at the points where both have values."""
    pieces = tokens(left), tokens(right)
    try:
        yield from _values_at(pieces, _rational(positive), _POINTS)
    except _NotNaturalError:  # n! and the like: the variables stand for natural numbers
        yield from _values_at(pieces, _natural, _WHOLE_POINTS)


def _values_at(
    pieces: tuple[list[str], list[str]], sample: "_Sample", most: int
) -> Iterator[tuple[Any, Any, set[str]]]:
    yielded = 0
    for point in range(_WHOLE_POINTS):
        names: set[str] = set()
        found, errors = [], []
        for some in pieces:
            try:
                found.append(_Reader(some, partial(sample, point=point), names).formula())
            except _ERRORS as error:
                errors.append(error)
        if errors:
            gravest = max(errors, key=lambda error: _ERRORS.index(type(error)))
            if isinstance(gravest, _NotNaturalError) and names and sample is not _natural:
                raise gravest
            if isinstance(gravest, TooLargeError) and names and yielded and _scale(point) > 1:
                continue
            if not names or not isinstance(gravest, _UndefinedError) or (not yielded and point == _WHOLE_POINTS - 1):
                raise UnreadableError("has no value") if isinstance(gravest, _UndefinedError) else gravest
            continue  # it may have a value at another point
        yield found[0], found[1], names
        yielded += 1
        if not names or yielded == most:
            return


_Sample = Callable[..., Fraction]
"""What a variable, by its name, stands for at a point: always the same for the same name."""


def _natural(name: str, point: int) -> Fraction:
    """Each of the numbers from 1 to 41, in an order of its own."""
    start, step = hashlib.sha256(name.encode()).digest()[:2]
    return Fraction(1 + (start + point * (1 + step % (_WHOLE_POINTS - 1))) % _WHOLE_POINTS)


def _rational(positive: bool) -> _Sample:
    """Small numbers first and larger ones then, of all combinations of signs unless they must be positive."""
    places: dict[str, int] = {}

    def sample(name: str, point: int) -> Fraction:
        place = places.setdefault(name, len(places))  # of the variable, in the order in which they are met
        drawn = int.from_bytes(hashlib.sha256(f"{point} {name}".encode()).digest()[:4])
        negative = (point >> place if place < 3 else drawn) & 1
        size = Fraction(30 + (drawn >> 1) % 240, 89) * _scale(point)
        return -size if negative and not positive else size

    return sample


def _scale(point: int) -> int:
    """What is true near 0 only must not pass for true: |x - 5| is 5 - x there."""
    return 1 if point < 8 else 30 if point < 12 else 1000


_of_thread = threading.local()  # for mpmath's functions change the precision of their context for a while


def _mp() -> Any:
    """mpmath at our precision."""
    if not hasattr(_of_thread, "mp"):
        import mpmath  # type: ignore[import-untyped]

        mp = _of_thread.mp = mpmath.MPContext()
        mp.prec = _PRECISION
        angles = ["sin", "cos", "tan", "cot", "sec", "csc"]
        found = {f"\\{name}": getattr(mp, name) for name in [*angles, "sinh", "cosh", "tanh", "exp", "ln"]}
        found |= {f"\\arc{name}": getattr(mp, f"a{name}") for name in angles}
        _of_thread.functions = found | {"\\log": mp.ln, "\\lg": mp.log10}
    return _of_thread.mp


def _functions() -> dict[str, Callable[[Any], Any]]:
    """What has a name and one argument."""
    _mp()
    return _of_thread.functions  # type: ignore[no-any-return]


def _inexact(number: Any) -> Any:
    return _mp().mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else number


class _Reader:
    """Reads a formula from left to right and computes as it goes (recursive descent).

    Args:
        pieces: The formula's tokens.
        sample: What each variable stands for.
        names: Gets the names of the variables met.
    """

    def __init__(self, pieces: list[str], sample: Callable[[str], Fraction], names: set[str]) -> None:
        if sum(map(len, pieces)) > _LONGEST:
            raise TooLargeError
        self.pieces, self.sample, self.names = [*pieces, ""], sample, names
        self.indices: dict[str, Fraction] = {}
        self.at = self.depth = self.bars = self.work = self.powered = 0

    def formula(self) -> Any:
        """The value of the whole formula."""
        found = self.terms()
        if self.ahead:
            raise UnreadableError(repr(self.ahead[:20]) if self.ahead else "it ends too early")
        return found

    @property
    def ahead(self) -> str:
        """The token to be read; empty at the end."""
        return self.pieces[self.at]

    def take(self) -> str:
        """Read a token."""
        piece = self.ahead
        self.at += bool(piece)
        return piece

    def skip(self, piece: str) -> bool:
        """Read a token if it is this one."""
        found = self.ahead == piece
        self.at += found
        return found

    def close(self, opening: str, found: Any) -> Any:
        """What stood in brackets, once they are closed."""
        if not self.skip(_CLOSING[opening]):
            raise UnreadableError(f"{opening!r} is not closed")
        return found

    # Sums of products of powers of atoms.

    def terms(self) -> Any:
        """A sum."""
        total = self.factors()
        while self.ahead in ("+", "-"):
            total = self.add(total, self.factors())
        return total

    def factors(self) -> Any:
        """A product, with signs or without."""
        product, divided = self.signed_power(), False
        while True:
            if self.skip("*"):
                product, divided = self.combine(operator.mul, product, self.signed_power()), False
            elif self.skip("/"):
                product, divided = self.combine(operator.truediv, product, self.signed_power()), True
            elif self.at_factor():
                if divided:
                    raise AmbiguousError("a/bc")
                product = self.combine(operator.mul, product, self.power())
            else:
                return product

    def at_factor(self) -> bool:
        """Whether a factor follows without a sign."""
        if self.ahead[:1].isdecimal() and self.pieces[self.at - 1] != ")" and self.at != self.powered:
            raise AmbiguousError("a number behind a factor")
        return self.ahead not in _NO_FACTOR and not (self.ahead == "|" and self.bars)

    def signed_power(self) -> Any:
        """A power, with any number of signs."""
        sign = Fraction(1)
        while self.ahead in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        return self.combine(operator.mul, sign, self.power())

    def power(self) -> Any:
        """An atom with what is written above or behind it."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise TooLargeError
        found = self.atom()
        if self.skip("!"):
            found = self.factorial(found)
        if self.skip("^"):
            found = self.raised(found, self.signed_power())
            self.powered = self.at
        if self.skip("°"):
            found = self.combine(operator.mul, found, _mp().pi / 180)
        self.depth -= 1
        return found

    def atom(self) -> Any:
        """A number, a variable, a group, or a command with what it takes."""
        piece = self.take()
        if piece[:1].isdecimal() or (piece[:1] == "." and len(piece) > 1):
            return self.mixed(piece, self.numeral(piece))
        if piece in ("(", "[", "{"):
            return self.close(piece, self.terms())
        if piece in ("\\lfloor", "\\lceil"):
            return self.rounded(self.close(piece, self.terms()), up=piece == "\\lceil")
        if piece == "|":
            self.bars += 1
            found = self.terms()
            self.bars -= 1
            return abs(self.close(piece, found))
        if piece in ("e", "i") and self.ahead not in ("_", "'"):
            return +_mp().e if piece == "e" else _mp().mpc(0, 1)
        if piece == "\\pi":
            return +_mp().pi
        if _VARIABLE.fullmatch(piece):
            return self.variable(piece[6] if piece.startswith("\\text") else piece)
        if _ACCENT.fullmatch(piece):
            return self.variable(f"{piece} {self.name()}")
        if piece == "\\frac":
            return self.fraction()
        if piece == "\\sqrt":
            degree = self.close("[", self.terms()) if self.skip("[") else Fraction(2)
            return self.raised(self.argument(), self.combine(operator.truediv, Fraction(1), degree))
        if piece == "\\binom":
            return self.choose(self.argument(), self.argument())
        if piece in ("\\sum", "\\prod"):
            return self.series(piece)
        if piece in _functions():
            return self.function(piece)
        raise UnreadableError(repr(piece[:20]) if piece else "it ends too early")

    def numeral(self, piece: str) -> Fraction:
        """A decimal number."""
        if len(piece) > 4_000 or len(piece.lower().partition("e")[2]) > 5:
            raise TooLargeError
        if self.ahead == "_":
            raise UnreadableError("a number in another base")
        found = Fraction(piece)
        if "." in piece and (self.skip("\\overline") or self.skip("\\dot")):  # digits that repeat for ever
            digits = self.name()
            if not digits.isdecimal():
                raise UnreadableError("no digits to repeat")
            found += Fraction(int(digits), (10 ** len(digits) - 1) * 10 ** len(piece.partition(".")[2]))
        return found

    def mixed(self, piece: str, found: Fraction) -> Fraction:
        r"""The number itself, or with the fraction that follows it: 2\frac{1}{2}, 2 1/2."""
        start = self.at
        if not piece.isdecimal():
            return found
        if self.ahead == "\\frac":
            part = self.power()
        elif self.ahead.isdecimal() and self.pieces[self.at + 1] == "/" and self.pieces[self.at + 2].isdecimal():
            above, _, below = self.take(), self.take(), self.take()
            part = self.combine(operator.truediv, Fraction(above), Fraction(below))
        else:
            return found
        if any(not (token.isdecimal() or token in "\\frac{}/") for token in self.pieces[start : self.at]):
            self.at = start  # a product, as in 2\frac{\pi}{3}
            return found
        if not 0 < part < 1:
            raise AmbiguousError("a mixed number or a product")
        return found + Fraction(part)

    def variable(self, name: str) -> Fraction:
        """The sample value of a variable, or of a function such as f(x) or I(0), which is no product."""
        if self.skip("_"):
            name += f"_{self.name()}"
        while self.skip("'"):
            name += "'"
        if name in self.indices:
            return self.indices[name]
        lone = self.pieces[self.at + 2 : self.at + 3] == [")"]
        if self.ahead == "(" and (name[0] in "fgh" or name[-1] == "'" or lone):
            found = (number if isinstance(number, Fraction) else _mp().nstr(number, 60) for number in self.bracketed())
            name += f"({', '.join(map(str, found))})"
        self.names.add(name)
        return self.sample(name)

    def name(self) -> str:
        """The tokens of the next group, or the next token, as they stand."""
        if not self.skip("{"):
            return self.take()
        start = self.at
        while self.take() not in ("}", ""):
            pass
        return "".join(self.pieces[start : self.at - 1])

    def fraction(self) -> Any:
        """A quotient; but the d's of a derivative are no factors."""
        first, above = self.pieces[self.at + (self.ahead == "{")], self.argument()
        if {first, self.pieces[self.at + (self.ahead == "{")]} <= {"d", "\\text{d}", "\\partial"}:
            raise UnreadableError("a derivative")
        return self.combine(operator.truediv, above, self.argument())

    def argument(self) -> Any:
        """What a command takes: the next group, or the next single character."""
        if self.ahead.isdecimal():
            digit, rest = self.ahead[0], self.ahead[1:]
            self.pieces[self.at : self.at + 1] = [digit, rest] if rest else [digit]
            return Fraction(self.take())
        return self.atom() if self.ahead in ("{", "(") or len(self.ahead) == 1 else self.power()

    def series(self, name: str) -> Any:
        r"""\sum_{k=1}^{9} or \prod over the product that follows, which is read again for each value of the index."""
        if not (self.skip("_") and self.skip("{")):
            raise UnreadableError("a series without an index")
        index = self.take()
        if not _VARIABLE.fullmatch(index) or index in self.indices or not self.skip("="):
            raise UnreadableError("a series without an index")
        (first,) = self.natural(self.close("{", self.terms()))
        if not self.skip("^"):
            raise UnreadableError("a series without an end")
        (last,) = self.natural(self.argument())
        if last - first >= _TERMS:
            raise TooLargeError
        body, found = self.at, Fraction(name == "\\prod")
        for value in range(first, max(first, last) + 1):
            self.at, self.indices[index] = body, Fraction(value)
            term = self.factors()
            if value <= last:  # a series without terms is read once all the same
                found = self.add(found, term) if name == "\\sum" else self.combine(operator.mul, found, term)
        del self.indices[index]
        return found

    def bracketed(self) -> list[Any]:
        """Values in brackets, with commas between them."""
        opening = self.take()
        if opening not in ("(", "{", "\\{"):
            raise UnreadableError("a function without arguments")
        found = [self.terms()]
        while self.skip(","):
            found.append(self.terms())
        return list(self.close(opening, found))

    def function(self, name: str) -> Any:
        """A function of one argument, which may have a base or a power between its name and its argument."""
        base = Fraction(10) if name == "\\log" else None
        if base and self.skip("_"):
            base = self.numeral(self.take()) if self.ahead.isdecimal() else self.argument()
        exponent = self.signed_power() if self.skip("^") else Fraction(1)
        if exponent == -1 and f"\\arc{name[1:]}" in _functions():
            name, exponent = f"\\arc{name[1:]}", Fraction(1)
        found = self.computed(name, self.function_argument())
        if base is not None:
            found = self.combine(operator.truediv, found, self.computed("\\ln", base))
        return self.raised(found, exponent)

    def function_argument(self) -> Any:
        """A group; or, without brackets, the factors up to the next sign or function."""
        if self.ahead in ("(", "{", "["):
            return self.atom()
        found = self.signed_power()
        while self.at_factor() and self.ahead != "(" and self.ahead not in _functions():
            found = self.combine(operator.mul, found, self.power())
        if self.ahead in ("/", "("):
            raise AmbiguousError("where a function's argument ends")
        return found

    # Arithmetic: exact while it can be, bounded always.

    def spend(self, bits: int) -> None:
        """Charge the work for a number of so many bits."""
        self.work += bits + _PRECISION
        if bits > _LARGEST or self.work > _WORK:
            raise TooLargeError

    def checked(self, found: Any) -> Any:
        """A number, once it is paid for."""
        exact = isinstance(found, Fraction)
        self.spend(found.numerator.bit_length() + found.denominator.bit_length() if exact else _PRECISION)
        if not exact and not _mp().isfinite(found):
            raise _UndefinedError
        return found

    def combine(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """A product or a quotient."""
        if operation is operator.truediv and not right:
            raise _UndefinedError
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return self.checked(operation(left, right))
        return self.checked(operation(_inexact(left), _inexact(right))) if left else Fraction(0)

    def add(self, left: Any, right: Any) -> Any:
        """A sum."""
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return self.checked(left + right)
        one, other = _inexact(left), _inexact(right)
        large, small = max(abs(one), abs(other)), min(abs(one), abs(other))
        # A term may not drown in the other one: e^1000 + 1 is not e^1000.
        if small and large > _mp().ldexp(small, _PRECISION - _AGREE - 50):
            raise TooLargeError
        total = one + other
        return Fraction(0) if abs(total) < _mp().ldexp(large, 80 - _PRECISION) else self.checked(total)

    def raised(self, base: Any, exponent: Any) -> Any:
        """A power or a root."""
        if not base:
            if not isinstance(exponent, Fraction) or exponent < 0:
                raise _UndefinedError
            return Fraction(exponent == 0)
        if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
            if abs(base) == 1:
                return base if exponent.numerator % 2 else Fraction(1)
            self.spend(abs(exponent.numerator) * max(base.numerator.bit_length(), base.denominator.bit_length()))
            return self.checked(base**exponent.numerator)
        one, power = _inexact(base), _inexact(exponent)
        if abs(power) * (1 + abs(_mp().ln(abs(one)))) > _LARGEST:
            raise TooLargeError
        # An odd root of a negative number is the real one.
        if isinstance(exponent, Fraction) and exponent.denominator % 2 and is_real(one) and one < 0:
            return self.checked(abs(one) ** power * (-1 if exponent.numerator % 2 else 1))
        return self.checked(one**power)

    def computed(self, name: str, argument: Any) -> Any:
        """The value of a function."""
        argument = _inexact(argument)
        if name != "\\ln" and abs(argument) > _LARGEST:
            raise TooLargeError
        try:
            found = _functions()[name](argument)
        except (ZeroDivisionError, ValueError, OverflowError):
            raise _UndefinedError from None
        # The sine of what is pi but for the last bits is 0.
        tiny = _mp().ldexp(1, 80 - _PRECISION)
        return Fraction(0) if abs(found) < tiny and abs(argument) > 1 else self.checked(found)

    def natural(self, *numbers: Any) -> list[int]:
        """The numbers, if they are all natural."""
        if any(not isinstance(n, Fraction) or n.denominator != 1 or n < 0 for n in numbers):
            raise _NotNaturalError
        return [n.numerator for n in numbers]

    def factorial(self, number: Any) -> Fraction:
        """n!"""
        if self.ahead == "!":
            raise AmbiguousError("a double factorial")
        (n,) = self.natural(number)
        self.spend(n * n.bit_length())
        return Fraction(math.factorial(n))

    def choose(self, above: Any, below: Any) -> Fraction:
        """The binomial coefficient."""
        n, k = self.natural(above, below)
        self.spend(min(k, max(n - k, 0)) * n.bit_length())
        return Fraction(math.comb(n, k))

    def rounded(self, number: Any, up: bool) -> Fraction:
        """The next whole number below or above."""
        if not isinstance(number, Fraction):
            if not is_real(number) or abs(number) > _mp().ldexp(1, _AGREE):
                raise _UndefinedError
            nearest = Fraction(int(_mp().nint(number)))
            if agree(number, nearest):  # the cube root of 8 is 2, also where it comes out a trifle less
                return nearest
            number = Fraction(int(_mp().floor(number))) + Fraction(1, 2)
        return Fraction(math.ceil(number) if up else math.floor(number))
