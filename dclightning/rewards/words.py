"""Answers in words: names, yes and no, numbers up to a hundred, letters of a multiple choice."""

import re

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'.-]+[^\W\d_]+)*")
_ARTICLE = re.compile(r"^(?:the|an?) (?=\w)")
# Letters in a row are a word if they are many, or no ASCII, or nothing but capitals, as in "ACB"; "abc" is a product.
_PROSE = re.compile(r"(?<![A-Za-z\\{])[A-Za-z]{4,}|[^\x00-\x7f°]")
_SHORT = {"yes", "no", "odd", "all", "may", "one", "two", "six", "ten"}
_SYNONYMS = {"dne": "does not exist"}
_EMPTY = {r"\emptyset", r"\{\}", "no solution", "no solutions", "empty set", "the empty set"}

NUMERALS = [
    *["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
    *["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"],
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NUMBERS = {word: number for number, word in enumerate(NUMERALS)} | {
    f"{ten} {unit}".strip(): 20 + 10 * tens + units
    for tens, ten in enumerate(_TENS)
    for units, unit in enumerate(["", *NUMERALS[1:10]])
}

_CHOICE = re.compile(r"\(?(?:\\text\{)?\(?([A-Z])\)?\}?\)?")
# (A) 12: a letter and what it stands for; but (A)(B) and (A) + 1 are formulas.
_LABELLED = re.compile(r"(?:\\text\{)?(?:\(([A-J])\)(?:\}\s*|\s+)|([A-J])[.)]\}?\s+)([^\s()*/^+=-].*)")
_OTHER_LABEL = re.compile(r"(?<![A-Za-z\\])(?:[A-J]|or|and|maybe)(?![A-Za-z])")


def is_prose(text: str) -> bool:
    r"""Whether a cleaned answer holds words outside ``\text{}``."""
    return _PROSE.search(_TEXT.sub("", text)) is not None


def words(text: str) -> str:
    """A cleaned answer as words in small letters, or as a number if they name one; nothing if it is no words."""
    plain = _TEXT.sub(r" \1 ", text).strip().lower()
    if {plain, text.replace(" ", "")} & _EMPTY:
        return "empty set"
    capitals = text.isalpha() and text.isupper() and len(text) > 1
    if not _WORDS.fullmatch(plain) or not (is_prose(text) or r"\text" in text or capitals or plain in _SHORT):
        return ""
    plain = _ARTICLE.sub("", re.sub(r"[\s'.-]+", " ", plain).strip())
    return str(_NUMBERS.get(plain, _SYNONYMS.get(plain, plain)))


def choice(text: str) -> tuple[str, str]:
    """The letter of a multiple choice, and what is chosen, as far as a cleaned answer says so."""
    if (letter := _CHOICE.fullmatch(text)) is not None:
        return letter[1], ""
    labelled = _LABELLED.fullmatch(text)
    if labelled is not None and not _OTHER_LABEL.search(labelled[3]):  # several choices are no choice
        return labelled[1] or labelled[2], labelled[3]
    return "", text
