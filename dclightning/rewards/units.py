r"""What an answer measures: its number and its unit.

A unit is any words in ``\text{}`` behind a number or a formula, a currency, a degree sign, or plain words behind a
number that are no product of variables: known units of two letters and more, or prose.
"""

import re

# The names of each known unit; the first stands for all of them.
_NAMES = """
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|ft foot feet
yd yard|mi mile|ms millisecond|s sec second|min minute|h hr hour|day|week wk|month|year yr|mg milligram|g gram gm
kg kilogram|lb pound|oz ounce|ton tonne|l liter litre|ml milliliter millilitre|gal gallon|usd dollar buck|cent
eur euro|gbp|cny yuan rmb|inr rupee|degree deg|radian rad|mph mi/h|kph km/h kmh|hz hertz|n newton|j joule|w watt
v volt|a ampere amp|k kelvin|celsius c degreecelsius degreec|fahrenheit f degreefahrenheit degreef|erg|mol mole
"""
_UNITS = {name: names.split()[0] for names in _NAMES.replace("\n", "|").split("|") for name in names.split()}
_LETTERS = set("msghlLNJWVAKCF")  # other single letters are variables
_CURRENCIES = {"\\usd": "usd", "€": "eur", "£": "gbp", "¥": "cny", "₹": "inr"}
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cu": "^3", "cubed": "^3"}
_SCALES = {"dozen": "12", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}", "billion": "10^{9}"}
_SCALES |= {"trillion": "10^{12}", "lakh": "10^{5}", "crore": "10^{7}", "万": "10^{4}", "亿": "10^{8}"}
# Words that make another number of the one before, or say when it holds.
_NO_UNIT = re.compile(
    "and|or|if|when|where|for|with|unless|otherwise|modulo|mod|base|not|except|plus|minus|times|over|factorial|more|fewer|"
    "less|than|least|most|half|halves|thirds?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|"
    "cannot|be|may|maybe|perhaps|wait|no|wrong|right|negative|below|inverse|reciprocal|root|pi|gross|score|is|are|only|.*[半倍之百千兆第几约多成折].*"
)
_MOST_WORDS = 2  # of an unknown unit
_DIGIT = re.compile(r"(?<![\^{-])\d")  # that is no exponent: it belongs to another number

_SCALE = re.compile(r"(?<=\d)\s*(\\text\{)?\s*(" + "|".join(_SCALES) + ")(?![A-Za-z])", re.IGNORECASE)
_CURRENCY = re.compile(r"^(-?)\s*(\\usd|[€£¥₹])\s*|\s*(\\usd|[€£¥₹])$")
_PERCENT = re.compile(r"\s*(?:%|(?:\\text\{)?\s*(?:percent|percentage|pct)\.?\s*\}?)$", re.IGNORECASE)
_DEGREES = re.compile(r"\s*°\s*(?:\\text\{\s*([CF])\s*\}|([CF]))?$")
# The sine of 30° is not the sine of 30.
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
# \text{...}, with powers, products and quotients.
_WORDS = re.compile(r"(?:[\s*/]*\\text\{[^{}]*\}(?:\s*\^\s*(?:\{-?\d\}|-?\d))?)+$")
# Plain words; one letter alone is a variable, but m/s is a unit. The last kind are Chinese words.
_BARE = re.compile(
    r"(?<=[\d}) °])\s*(?:[a-z]/[a-z](?:\^(?:\{\d\}|\d))?|[A-Za-z]{2}[A-Za-z./ ]*(?:\^(?:\{\d\}|\d))?|[㐀-鿿]+)$"
)


def measure(text: str) -> tuple[str, str]:
    """A cleaned answer without its unit, and the unit: ``%``, a name, unknown words behind a "?", or nothing."""
    text = _SCALE.sub(lambda m: f"*{_SCALES[m[2].lower()]}{m[1] or ''}", text).replace(r"\text{}", "")
    unit = ""
    if (found := _CURRENCY.search(text)) is not None:
        unit = _CURRENCIES[found[2] or found[3]]
        text = (found[1] or "") + text[found.end() :] if found[2] else text[: found.start()]
    if (found := _PERCENT.search(text)) is not None and found.start() > 0:
        return text[: found.start()], "%"
    if (found := _DEGREES.search(text)) is not None and found.start() > 0 and not _ANGLE.search(text):
        return text[: found.start()], _UNITS[(found[1] or found[2] or "degree").lower()]
    if (found := _WORDS.search(text) or _BARE.search(text)) is not None and found.start() > 0:
        name = _name(found[0])
        if name and (name[0] != "?" or "\\text" in found[0] or _is_prose(found[0])):
            return text[: found.start()], name
    return text, unit


def _is_prose(words: str) -> bool:
    """Whether plain words are no product of variables."""
    return not words.isascii() or (words[0] == " " and len(words.split()[0]) >= 4)


def _name(words: str) -> str:
    """The unit's one name; the words with a question mark if it is unknown; nothing if they are no unit."""
    pieces = re.findall(r"[A-Za-z]+|\^\s*\{?-?\d|/|[^\x00-\x7f]+", words.replace("\\text", " "))
    lone = len(pieces) == 1 and len(pieces[0]) == 1 and pieces[0].isascii() and pieces[0] not in _LETTERS
    if not pieces or lone or _DIGIT.search(words) or any(_NO_UNIT.fullmatch(piece.lower()) for piece in pieces):
        return ""
    name = power = ""
    for piece in pieces:
        word = piece.lower() if piece.lower() in _UNITS else piece.lower().removesuffix("s")
        if word in _POWERS and not name:
            power = _POWERS[word]
        elif word in _UNITS:
            name, power = name + _UNITS[word] + power, ""
        elif word in _POWERS or word in ("per", "/") or word[0] == "^":
            name += {"per": "/", "/": "/"}.get(word) or _POWERS.get(word) or f"^{word.strip('^{ ')}"
        elif len(pieces) <= _MOST_WORDS and "," not in words:
            return "?" + " ".join(pieces).lower()
        else:
            return ""
    return _UNITS.get(name, name)
