"""How good and how fast the verdicts on math answers are, on files of real problems.

Each gold answer is judged against itself in a box, and random pairs of golds that differ as text against each other:
all pairs called equal are listed, to be read by a person (1/2 and 0.5 are equal). Then verdicts are timed: the
comparison in this process, ``MathReward`` with its worker processes, and math-verify alone on the same pairs, in turns,
so that what else the machine does hits all.

    python benchmarks/math_verdicts.py --data DIR      # a folder of JSONL files with the keys id, problem, answer
"""

import argparse
import json
import logging
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

from dclightning import MathReward
from dclightning.rewards.answers import last_boxed
from dclightning.rewards.equality import judge

Pair = tuple[str, str]


def golds(folder: Path) -> dict[str, dict[str, str]]:
    """The gold answers of each file, by the problem's id."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        if rows and {"id", "problem", "answer"} <= rows[0].keys():
            found[path.stem] = {str(row["id"]): str(row["answer"]) for row in rows}
    return found


def boxed(gold: str) -> str:
    """A response that gives a gold answer in a box, without the dollar signs that may stand around its parts."""
    bare = re.sub(r"(?<!\\)[$]", "", gold)
    return f"So the answer is $\\boxed{{{bare}}}$."


def own_boxes(files: dict[str, dict[str, str]]) -> None:
    """Prints the share of golds that are equal to their own boxed form, and which are not."""
    right = wrong = 0
    for name, answers in files.items():
        bad = []
        for problem, gold in answers.items():
            answer = last_boxed(boxed(gold))
            reason = "no box" if answer is None else (verdict := judge(gold, answer)).reason
            if answer is None or not verdict.equal:
                bad.append(f"    {problem}: {gold!r}: {reason}")
        print(f"{name:20} {len(answers) - len(bad):6} of {len(answers):6} equal to their own boxed form")
        print(*bad, sep="\n", end="\n" if bad else "")
        right, wrong = right + len(answers) - len(bad), wrong + len(bad)
    print(f"{'all':20} {right:6} of {right + wrong:6}: {right / max(right + wrong, 1):.3%}\n")


def random_pairs(files: dict[str, dict[str, str]], number: int, seed: int) -> list[Pair]:
    """Pairs of golds of different problems that differ as text: half of them from one file, half from all distinct."""
    draw = random.Random(seed)
    lists = [list(answers.values()) for answers in files.values() if len(set(answers.values())) > 1]
    distinct = sorted({gold for answers in lists for gold in answers})
    pairs: list[Pair] = []
    while len(pairs) < number:
        one, other = draw.sample(draw.choice(lists) if len(pairs) % 2 else distinct, 2)
        if one != other:
            pairs.append((one, other))
    return pairs


def false_positives(pairs: list[Pair]) -> None:
    """Prints the pairs that are judged equal, and how long the slowest verdict took."""
    slowest, equal = (0.0, ("", "")), 0
    for one, other in pairs:
        start = time.perf_counter()
        verdict = judge(one, other)
        slowest = max(slowest, (time.perf_counter() - start, (one, other)))
        if verdict.equal:
            equal += 1
            print(f"    equal: {one!r} and {other!r}: {verdict.reason}")
    print(f"{equal} of {len(pairs)} random pairs judged equal; the slowest took {slowest[0]:.2f} s: {slowest[1]}\n")


def rewritten(gold: str) -> str:
    """The same answer in another spelling, where it has one."""
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\\dfrac{\1}{\2}", gold).replace("-", " - ")
    return text.replace("(", r"\left(").replace(")", r"\right)") if r"\left" not in text and "]" not in text else text


def timed_pairs(answers: list[str], number: int, seed: int) -> list[Pair]:
    """As many pairs: a third equal as text, a third in another spelling, a third of two different golds."""
    draw = random.Random(seed)
    pairs = []
    for i in range(number):
        gold = answers[i % len(answers)]
        pairs.append((gold, (gold, rewritten(gold), draw.choice(answers))[i % 3]))
    return pairs


def by_math_verify(gold: str, answer: str) -> bool:
    """math-verify's own verdict, without its alarms."""
    from math_verify import parse, verify

    one, other = (parse(f"${text}$", parsing_timeout=None) for text in (gold, answer))
    return bool(verify(one, other, timeout_seconds=None))


def speed(name: str, pairs: list[Pair], few: list[Pair], rounds: int) -> None:
    """Prints verdicts a second, the best of some rounds."""
    golds, responses = [gold for gold, _ in pairs], [boxed(answer) for _, answer in pairs]
    reward = MathReward()
    reward.verdict("1/2", boxed("0.5"))  # starts the processes

    def rate(count: int, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return count / (time.perf_counter() - start)

    measured = [
        (
            rate(len(pairs), lambda: [judge(*pair) for pair in pairs]),
            rate(len(pairs), lambda: reward.verdicts(golds, responses)),
            rate(len(few), lambda: [by_math_verify(*pair) for pair in few]),
        )
        for _ in range(rounds)
    ]
    reward.close()
    here, pool, theirs = map(max, zip(*measured, strict=True))
    equal = sum(judge(*pair).equal for pair in few), sum(by_math_verify(*pair) for pair in few)
    rates = f"{here:8.0f} verdicts a second here, {pool:8.0f} by MathReward, {theirs:6.0f} by math-verify"
    print(f"{name:10} {rates}; of {len(few)} pairs equal: {equal[0]} and {equal[1]}")


def main() -> None:
    """Runs all three parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of JSONL files with id, problem and answer")
    parser.add_argument("--pairs", type=int, default=10_000, help="how many random pairs")
    parser.add_argument("--rounds", type=int, default=3, help="how often speed is measured")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # math-verify warns that its alarms are off
    files = golds(args.data)
    own_boxes(files)
    false_positives(random_pairs(files, args.pairs, args.seed))
    judge("x", r"\sqrt{2}")  # imports everything
    whole = [gold for answers in files.values() for gold in answers.values() if re.fullmatch(r"-?\d+", gold)][:6_000]
    others = list(files.get("math500", {}).values())
    for name, answers, most in (("integers", whole, 300), ("MATH-500", others, 500)):
        if answers:
            pairs = timed_pairs(answers, max(len(answers), 1_500), args.seed)
            speed(name, pairs, pairs[:most], args.rounds)


if __name__ == "__main__":
    main()
