"""From a response to the answer it gives."""

import re

# A backslash before a brace makes it a character; two backslashes break a line, if they do not start a box.
# A box without braces, as in \boxed 5, holds a number or a letter.
_BRACE = re.compile(
    r"\\(?:boxed|fbox)\s*(\{|-?\d+(?:[.,/]\d+)*|(?<=\s)[A-Z](?![A-Za-z]))|\\\\(?!boxed|fbox)|\\[{}]|[{}]"
)
# A number that no name, exponent or subscript ends in: not the 2 of H2, m^2, x_2.
_NUMBER = re.compile(
    r"(?<![A-Za-z\d.^_])(?<![\^_]\{)(?<![\^_]-)(?<![\^_]\{-)"
    # A minus is a sign unless it stands behind an operand: 5-3 and 5 - 3 end in 3.
    r"(?:(?<![\w)}\]])(?<![\d)}\]]\s)[-−]\s?)?"
    r"(?:\\[dtc]?frac\s*(?:\{\s*-?\d+\s*\}\s*\{\s*\d+\s*\}|\d\s*\d)"
    # Digits in threes, with or without the braces or thin spaces of LaTeX; or any digits; and decimals.
    r"|(?:\d{1,3}(?:(?:,|\{,\}|,\\!|\\,)\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    # A denominator or a power of ten.
    r"(?:\s?/\s?\d+(?![\d.])|\s*(?:\\times|\\cdot|×|\*)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+)|[eE][-+]?\d+)?"
)


def last_boxed(response: str) -> str | None:
    r"""What stands in the last ``\boxed{}`` or ``\fbox{}`` whose braces are balanced; None if there is none."""
    opened: list[int | None] = []  # for each brace that is open, where its box's content starts
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(response):
        text = brace[0]
        if text == "}":
            if opened and (start := opened.pop()) is not None and (last is None or start > last[0]):
                last = (start, brace.start())
        elif text == "{":
            opened.append(None)
        elif brace[1] == "{":
            opened.append(brace.end())
        elif brace[1] and (last is None or brace.start() > last[0]):
            last = brace.span(1)
    return None if last is None else response[slice(*last)]


def last_number(response: str) -> str | None:
    """The last number of a response, as it is written there but for a percent sign; None if there is none."""
    last = None
    for number in _NUMBER.finditer(response):
        last = number[0]
    return last
