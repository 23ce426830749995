"""One spelling for one answer: LaTeX, Unicode and programming notation brought together, the meaning left alone."""

import re
import unicodedata
from collections.abc import Collection

# The spelling that is kept, and the LaTeX commands that say the same; the last ones say nothing.
_COMMANDS = {
    r"\frac": r"\dfrac \tfrac \cfrac",
    r"\ge ": r"\geq \geqslant",
    r"\le ": r"\leq \leqslant",
    r"\ne ": r"\neq",
    r"\cup ": r"\bigcup",
    r"\dots ": r"\ldots \cdots \dotsc \dotsb",
    r"\emptyset ": r"\varnothing",
    r"\epsilon ": r"\varepsilon",
    r"\approx ": r"\approxeq \simeq",
    r"\usd ": r"\$",
    r"\{": r"\lbrace",
    r"\}": r"\rbrace",
    "(": r"\langle \lparen",
    ")": r"\rangle \rparen",
    "[": r"\lbrack",
    "]": r"\rbrack",
    "|": r"\vert \lvert \rvert \mid",
    "<": r"\lt",
    ">": r"\gt",
    "*": r"\cdot \times \ast",
    "/": r"\div",
    ":": r"\colon",
    "%": r"\%",
    "°": r"\degree",
    " or ": r"\lor",
    " and ": r"\land",
    " ": r"\, \; \: \> ~ \quad \qquad \enspace \thinspace",
    "": r"\! \( \) \[ \] \left \right \big \bigl \bigr \Big \Bigl \Bigr \bigg \Bigg \tiny \small \normalsize \large "
    r"\Large \huge \displaystyle \textstyle \limits "
    r"\boxed \fbox \underline \rm \bf \it",
}
_SPELLINGS = {command: kept for kept, commands in _COMMANDS.items() for command in commands.split()} | {r"\ ": " "}
# The same for characters.
_CHARACTERS = {
    r"\le ": "≤⩽",
    r"\ge ": "≥⩾",
    r"\ne ": "≠",
    r"\approx ": "≈",
    r"\pm ": "±",
    r"\mp ": "∓",
    r"\infty ": "∞",
    r"\cup ": "∪",
    r"\cap ": "∩",
    r"\in ": "∈",
    r"\emptyset ": "∅",
    r"\sqrt ": "√",
    r"\sqrt[3] ": "∛",
    r"\lfloor ": "⌊",
    r"\rfloor ": "⌋",
    r"\lceil ": "⌈",
    r"\rceil ": "⌉",
    r"\mathbb{R}": "ℝ",
    r"\mathbb{Z}": "ℤ",
    "(": "⟨",
    ")": "⟩",
    "-": "−–—",
    "*": "×⋅·∙∗",
    "/": "÷∕⁄",
    "'": "′’",
    "°": "º˚",
    ",": "、",
    ".": "。",
    "": "“”„",
    " and ": "∧和",
    " or ": "∨或",
}
_UNICODE = {character: kept for kept, characters in _CHARACTERS.items() for character in characters}

_COMMAND = re.compile(r"\\\\|\\[A-Za-z]+|\\.|~", re.DOTALL)
# \left. and \right. draw nothing, and so does \phantom{...}: what they are given goes with them.
_INVISIBLE = re.compile(r"\\(?:left|right)\s*\.|\\(?:[hv]?phantom|(?:text)?color)\s*(?:\{[^{}]*\}|.)")
# The space below a row of a matrix: \\[4pt].
_ROW_SPACE = re.compile(r"\\\\\[-?[\d.]+\s*(?:pt|em|ex|mm|cm)\]")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}")
# What some models put into the box before the answer.
_PREFIX = re.compile(
    r"^(?:\\text\{)?\s*(?:(?:the )?(?:(?:final|correct) )?answer(?: is\b|\s*[:=])|答案[是为:]*"
    r"|(?:option|choice|选项?)(?=\s*\(?[A-J]\b))\s*:?\s*\}?",
    re.IGNORECASE,
)
_REALS = re.compile(r"(?:the set of )?all (?:real numbers|reals)", re.IGNORECASE)
# The real numbers without some, and those that satisfy an inequality.
_WITHOUT = re.compile(r"\\mathbb\s*(?:R|\{R\})\s*\\(?:setminus|backslash)\s*\\\{([^{}\\,]*)\\\}")
_BUILDER = re.compile(
    r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*(?:R|\{R\})\s*)?[|:]\s*([^|:{}]*(?:<|>|\\[gl]e)[^|:{}]*)\\\}"
)
# Digits in threes, with a space between that is none: 10\,000 and 10,\!000.
_THIN_SPACE = re.compile(r"(?<=[\d,])\\[,!]\s*(?=\d{3})")
_BRACED_SIGN = re.compile(r"(?<!\\)\{\s*([,:])\s*\}")
# Digits that go on for ever: 0.1666...
_REPEATED = re.compile(r"(\.\d*?)(\d)\2{2,}(?:\.\.\.|…|\\[lc]?dots(?![A-Za-z]))")
_SPACED = re.compile(r"-?[1-9]\d{0,2}(?: \d{3})+")
_STYLED = re.compile(
    r"\\(text\w*|mbox|hbox|math(?:rm|bf|it|sf|tt|up)|operatorname\*?|boldsymbol|bm)\s*"
    r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
)
_DEGREE = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_PRIME = re.compile(r"\^\s*(?:\\prime(?![A-Za-z])|\{((?:\s*\\prime)+)\s*\})")
# A root without braces, as in √12 or sqrt12, reaches over all its digits; names of functions need no backslash.
_BARE_ROOT = re.compile(r"(?:√|(?<![A-Za-z\\])sqrt)\s*(\d+(?:\.\d+)?)")
_BARE_NAME = re.compile(r"(?<![A-Za-z\\])(sqrt|pi|(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|ln|exp|infty)(?![A-Za-z])")
_BARE_INFINITY = re.compile(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])")
# "4.5 x 10^33": here x is a cross.
_CROSS = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
_TOKEN = re.compile(
    r"\\text\{[^{}]*\}|\\[A-Za-z]+|\\.|\d+\.?\d*(?:[eE][+-]?\d+(?![\d.]))?|\.\d+(?:[eE][+-]?\d+(?![\d.]))?|\S",
    re.DOTALL,
)

_PIECE = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING = {"(", "[", "{", r"\{", r"\lfloor", r"\lceil"}
_CLOSING = {")", "]", "}", r"\}", r"\rfloor", r"\rceil"}
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "gcd", "lcm", "max", "min"}


def clean(answer: str) -> str:
    r"""The answer in its plainest spelling.

    Left over are: ``\frac``, ``\sqrt`` and other commands with a meaning; ``\text{...}`` for words; ``*`` for every
    product; ``°`` and ``%``; ``\usd`` for a dollar sign that is money; and single spaces.
    """
    text = answer if answer.isascii() else _to_ascii(answer)
    text = text.strip()
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        text = text[2:-2]
    text = text.replace("**", "^").replace(" != ", r"\ne ").replace("<=", r"\le ").replace(">=", r"\ge ")
    if r"\begin" not in text:  # where it starts no row, a doubled backslash is one too many
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", _THIN_SPACE.sub("", text))
    text = _REPEATED.sub(r"\1\\overline{\2}", text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", _ROW_SPACE.sub(r"\\\\", text))
    text = _PRIME.sub(lambda m: "'" * max(1, (m[1] or "").count("prime")), _DEGREE.sub("°", text))
    text = _COMMAND.sub(lambda m: _SPELLINGS.get(m[0], m[0]), _INVISIBLE.sub("", text))
    for _ in range(3):  # the innermost first
        text, found = _STYLED.subn(_restyle, text)
        if not found:
            break
    text = text.replace("$", r"\usd " if text.count("$") == 1 else "").replace('"', "")
    text = _BRACED_SIGN.sub(r"\1", text).replace(r"\text{}", "")
    text = _BARE_INFINITY.sub(r"\\infty", _BARE_NAME.sub(r"\\\1", _CROSS.sub("*", text)))
    text = _strip(_PREFIX.sub("", _strip(text)))
    if _REALS.fullmatch(text):
        return r"\mathbb{R}"
    text = _WITHOUT.sub(r"(-\\infty,\1)\\cup(\1,\\infty)", text)
    if (condition := _BUILDER.fullmatch(text)) is not None and condition[1] in condition[2]:
        text = condition[2].strip()
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


def tokens(text: str) -> list[str]:
    r"""The smallest pieces of a cleaned answer: numbers, letters, signs, commands, and each ``\text{...}`` whole."""
    return _TOKEN.findall(text)


def split(text: str, separators: Collection[str], keep: bool = False) -> list[str]:
    """The parts of a cleaned answer between separators that stand in no bracket.

    Args:
        text: The answer.
        separators: Characters and commands.
        keep: Whether the separators stand between the parts, as in ``re.split``.
    """
    parts, depth, start = [], 0, 0
    for match in _PIECE.finditer(text):
        piece = match[0]
        if piece in _OPENING:
            depth += 1
        elif piece in _CLOSING:
            depth -= 1
        elif depth == 0 and piece in separators:
            parts += [text[start : match.start()].strip(), piece] if keep else [text[start : match.start()].strip()]
            start = match.end()
    return [*parts, text[start:].strip()]


def unwrap(text: str) -> tuple[str, str, str]:
    """The bracket around the whole of a cleaned answer, what it holds, and the bracket that closes it."""
    match = _PIECE.match(text)
    if match is None or match[0] not in _OPENING:
        return "", text, ""
    depth = 0
    for piece in _PIECE.finditer(text):
        depth += (piece[0] in _OPENING) - (piece[0] in _CLOSING)
        if depth == 0:
            if piece.end() < len(text):
                return "", text, ""
            return match[0], text[match.end() : piece.start()].strip(), piece[0]
    return "", text, ""


def _strip(text: str) -> str:
    """The text without the spaces, full stops and braces around it."""
    for _ in range(20):
        stripped = re.sub(r"\s+", " ", text).strip(" ,;:").removesuffix("\\\\").rstrip(".").lstrip("=").strip()
        opening, inside, closing = unwrap(stripped)
        if opening == "{" or (opening == "(" and closing == ")" and len(split(inside, ",;")) == 1 and inside[1:]):
            stripped = inside
        elif (whole := re.fullmatch(r"\\text\{([^{}]*)\}", stripped)) is not None:
            stripped = whole[1]
        if stripped == text:
            break
        text = stripped
    return text


def _restyle(styled: re.Match[str]) -> str:
    r"""Words as ``\text{...}``; a number, a conjunction or a single letter of a formula without its style."""
    style, content = styled[1], styled[2].strip()
    bold = style in ("mathbf", "boldsymbol", "bm", "textbf")
    if "{" in content or (bold and re.search(r"[\\^_+=*/<>|\d]", content)):  # a formula
        return f"{{{content}}}"
    if content in ("min", "max") and re.search(r"\d\s*$", styled.string[: styled.start()]):
        return f"\\text{{{content}}}"
    if re.fullmatch(r",?\s*(?:and|or)", content) or re.fullmatch(r"[\d.,/ -]*", content):
        return f" {content} " if content else " "
    if style.startswith("operatorname") or (style.startswith("math") and content in _FUNCTIONS):
        return f"\\{content} " if content.isalpha() else content
    if content in ("e", "i") or (len(content) == 1 and style.startswith(("math", "b")) and style != "mathrm"):
        return f"{content} "
    return f"\\text{{{content}}}"


def _to_ascii(text: str) -> str:
    """The text in LaTeX where it was in Unicode; letters of other alphabets stay."""
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = _SUPERSCRIPTS.sub(lambda m: f"^{{{_digits(m[0])}}}", text)
    text = _SUBSCRIPTS.sub(lambda m: f"_{{{_digits(m[0])}}}", text)
    return "".join(character if character.isascii() else _character(character) for character in text)


def _digits(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def _character(character: str) -> str:
    if character in _UNICODE:
        return _UNICODE[character]
    name = unicodedata.name(character, "")
    if name.startswith("VULGAR FRACTION"):
        above, _, below = unicodedata.normalize("NFKC", character).partition("⁄")
        return f"\\frac{{{above}}}{{{below}}}"
    if greek := re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", name):
        return f"\\{greek[2].lower() if greek[1] == 'SMALL' else greek[2].capitalize()} "
    return unicodedata.normalize("NFKC", character)
