"""Two-operand arithmetic with worked answers: the problems of the quickstart's tiny model."""

from collections.abc import Iterator
from random import Random
from zlib import crc32

from dclightning.data.problems import Problem

HELD_OUT_SHARE = 0.2
"""Share of all pairs of operands that no training problem uses."""


def arithmetic_problems(split: str, count: int | None = None, seed: int = 0) -> list[Problem]:
    """Distinct sums, differences and products, in random order.

    Args:
        split: ``"train"`` or ``"test"``. The two never share a pair of operands: ``3 + 5`` and ``5 + 3`` are on the
            same side.
        count: How many problems; all there are by default.
        seed: Decides the order. Which side a problem is on does not depend on it.

    Raises:
        ValueError: If there are fewer problems than ``count``, or no such split.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}: must be train or test")
    exercises = [exercise for exercise in _exercises() if _held_out(*exercise) == (split == "test")]
    if count is not None and count > len(exercises):
        raise ValueError(f"count={count}: there are {len(exercises)} arithmetic problems in the {split} split")
    Random(seed).shuffle(exercises)
    return [
        Problem(id=f"arithmetic-{a}{operator}{b}", problem=f"What is {a} {operator} {b}?", answer=str(answer))
        for a, operator, b in exercises[:count]
        for answer, _ in [work(a, operator, b)]
    ]


def work(a: int, operator: str, b: int, slip: float = 0.0, random: Random | None = None) -> tuple[int, str]:
    r"""Solve digit by digit, as the tiny model is taught to: ``5+7+0=12, 2+1+1=4. \boxed{42}`` for 25 + 17.

    Args:
        a: First operand; for ``-`` it must not be the smaller one.
        operator: ``+``, ``-`` or ``*``.
        b: Second operand; for ``*`` a single digit.
        slip: Probability that a step is off by one. The steps after it build on the wrong result.
        random: Where slips come from.

    Returns:
        The answer, and the working that ends in it.
    """
    left = str(a) if operator == "*" else f"{a:02d}"
    right = str(b) * len(left) if operator == "*" else f"{b:02d}"
    sign = -1 if operator == "-" else 1
    steps, answer, carry = [], 0, 0
    for position, (x, y) in enumerate(zip(map(int, left[::-1]), map(int, right[::-1]), strict=True)):
        total = (x * y if operator == "*" else x + sign * y) + sign * carry
        if random is not None and random.random() < slip:
            total += random.choice((-1, 1))
        steps.append(f"{x}{operator}{y}{'+' if sign > 0 else '-'}{carry}={total}")
        answer += total % 10 * 10**position
        carry = abs(total // 10)
    answer += sign * carry * 10 ** len(left)
    return answer, f"{', '.join(steps)}. \\boxed{{{answer}}}"


def _exercises() -> Iterator[tuple[int, str, int]]:
    yield from ((a, "+", b) for a in range(100) for b in range(100))
    yield from ((a, "-", b) for a in range(100) for b in range(a + 1))
    yield from ((a, "*", b) for a in range(1000) for b in range(10))


def _held_out(a: int, operator: str, b: int) -> bool:
    pair = f"{min(a, b)} {operator} {max(a, b)}"
    return crc32(pair.encode()) < HELD_OUT_SHARE * 2**32
