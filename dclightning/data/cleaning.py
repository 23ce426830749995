"""Which problems had better not be trained on, and why."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from dclightning.data.problems import Problem
from dclightning.rewards.equality import judge

_NO_WORD = re.compile(r"[\W_]+")
# An operator behind an operand, with the numbers beside it; other hyphens join words.
_OPERATION = re.compile(r"(?<![^\W_])([^\W_]*)[)}]*(?<=[\w)}])\s*([+*/=<>]|-(?=\s*\d))\s*(\d*)")
_TIMES = re.compile(r"\\(?:times|cdot)|×")
_IMAGE = re.compile(
    r"\[asy\]|!\[|<im(?:g|age)\b|\\begin\{tikzpicture|\\includegraphics|\.(?:png|jpe?g|gif|svg)\b", re.IGNORECASE
)


def normalized(text: str) -> str:
    """The letters and digits of a text, small: what two printings of one problem have in common."""
    return _NO_WORD.sub("", unicodedata.normalize("NFKC", text).lower())


def operations(text: str) -> list[tuple[str, ...]]:
    """The operators in a text, each with what stands before it and the number behind it."""
    return _OPERATION.findall(_TIMES.sub("*", unicodedata.normalize("NFKC", text).replace("−", "-")))


def needs_an_image(text: str) -> bool:
    """Whether a text refers to an image or holds drawing code."""
    return _IMAGE.search(text) is not None


def script(text: str) -> str:
    """The script of most letters that are no Latin or Greek ones, such as ``cjk`` or ``cyrillic``; else ``latin``."""
    # Letters that Unicode keeps for mathematics have plain ones as compatible forms; but the aleph is Hebrew's.
    letters = [c for c in unicodedata.normalize("NFKC", text.replace("ℵ", "")) if not c.isascii() and _is_letter(c)]
    names = [unicodedata.name(letter, "unknown").split()[0] for letter in letters]
    found = Counter(name.lower() for name in names if name not in ("LATIN", "GREEK"))
    return found.most_common(1)[0][0] if found else "latin"


def _is_letter(character: str) -> bool:
    return unicodedata.category(character) in ("Lu", "Ll", "Lo")


def faults(
    problems: Sequence[Problem], benchmarks: Mapping[str, Sequence[Problem]], scripts: Sequence[str] | None = None
) -> dict[int, str]:
    """What is wrong with some of the problems.

    Args:
        problems: To be trained on.
        benchmarks: By name, what must not be trained on.
        scripts: Those that problems may be written in, as :func:`script` calls them; all of them by default.

    Returns:
        By position in the list, the reason: ``conflicting answers`` (the same question elsewhere with another answer),
        ``in NAME`` (a benchmark's), ``duplicate`` (the same question before), ``image``, or the script's name. The same
        are questions with the same letters and digits, and with the same answer or the same operations.
    """
    keys = [normalized(problem.problem) for problem in problems]
    answers = defaultdict(set)
    for key, problem in zip(keys, problems, strict=True):
        answers[key].add(problem.answer.strip())
    contradicted = {key for key, some in answers.items() if _differ(some)}
    # Where answers differ, the operations tell whether the questions do: x + 1 and x - 1.
    places = defaultdict(list)
    for place, (key, problem) in enumerate(zip(keys, problems, strict=True)):
        places[key, str(operations(problem.problem)) if key in contradicted else ""].append(place)
    held_out = {normalized(problem.problem): name for name, some in benchmarks.items() for problem in some}
    found = {}
    for same in places.values():
        conflict = keys[same[0]] in contradicted and _differ({problems[place].answer.strip() for place in same})
        for nth, place in enumerate(same):
            text = problems[place].problem
            if conflict:
                found[place] = "conflicting answers"
            elif keys[place] in held_out:
                found[place] = f"in {held_out[keys[place]]}"
            elif nth > 0:
                found[place] = "duplicate"
            elif needs_an_image(text):
                found[place] = "image"
            elif scripts is not None and (written := script(text)) not in scripts:
                found[place] = written
    return dict(sorted(found.items()))


def _differ(answers: set[str]) -> bool:
    first, *others = sorted(answers)
    return not all(judge(first, other).equal for other in others)
