"""What responses that were made to hang, blow up or confuse a verifier cost, and whether it survives them.

First the real thing: hostile responses of many kinds through ``MathReward``, with how long they take, how many had to
be killed, and what memory is left. Then the worst case: comparisons that never end, each of which must be killed.

    python benchmarks/hostile_responses.py
"""

import argparse
import math
import random
import resource
import time
from pathlib import Path

from dclightning import MathReward
from dclightning.rewards.workers import Workers


def hostile(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Golds and responses, none of which is right, of every kind in turn, each of another size."""
    draw = random.Random(seed)
    responses = []
    for i in range(count):
        n, many = draw.randint(3, 9), draw.choice([100, 1_000, 10_000, 100_000])
        kinds = [
            "{}^".join(["9"] * 40).replace("{}", ""),  # 9^9^9^...
            "^{".join(["9"] * n) + "}" * (n - 1),
            f"({n}!)" + "!" * n,
            f"{n}{'0' * 6}!",
            f"{n}^{{{'9' * 9}}}",
            f"10^{{10^{{{n}}}}} + 1",
            "9" * 10**6,
            "0" * 10**6 + "x",
            "1" + " \n" * 10**5 + "x",
            "0." + "9" * 10**6,
            "1" * 3_000 + "/" + "3" * 900,
            "{" * many,
            "}" * many,
            r"\frac{" * many + "1" + "}{2}" * many,
            "(" * many + "1" + ")" * many,
            r"\sqrt{" * 400 + "2" + "}" * 400,
            r"\boxed{" * many,
            "\x00" * many,
            "1\x002",
            "\ud800",
            r"\left" * many,
            "+-" * 1_900 + "1",
            "(1+x)^{" + "9" * n + "}",
            r"\sum_{k=1}^{10^{" + str(n) + r"}} \frac{1}{k!}",
            r"\prod_{p=1}^{99999} (1 + \frac{1}{p^2})",
            r"\int_0^1 \int_0^1 \int_0^1 x^{y^{z}} \sin(e^{x y z})\,dx\,dy\,dz",
            r"\binom{999999999}{" + "4" * n + "}",
            r"\sqrt[99999]{2^{99999}+1} \cdot \pi^{99999}",
            r"\sin(\cos(\tan(10^{99999})))",
            ",".join(map(str, range(1_000))),
            r"\begin{pmatrix}" + r"1 & 2 \\ " * 200 + r"\end{pmatrix}",
            r"\lim_{x\to 0} " + r"\frac{\sin x}{x}" * n + r"^{x^{x}}",
            r"x = " * 300 + "1",
            r"\text{" * 300 + "5" + "}" * 300,
            "\u0661\u0662\u0663" * 1_000,
            r"\def\a{\a\a}\a",
            r"1e" + "9" * n,
            "%" * many,
        ]
        body = kinds[i % len(kinds)]
        responses.append(body if i % 9 == 8 else f"\\boxed{{{body}}}")
    golds = draw.choices(["5", r"\frac{1}{2}", "(1, 2)", "x^2+1", r"\{1, 2\}", "[0, 1)", r"\sqrt{2}", "1e100"], k=count)
    return golds, responses


def resident() -> float:
    """MiB of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000, help="hostile responses")
    parser.add_argument("--endless", type=int, default=20, help="comparisons that never end")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for one comparison")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    golds, responses = hostile(args.count, args.seed)
    reward = MathReward(time_limit=args.time_limit, workers=args.workers)
    reward.verdicts(golds, responses)  # once before: the allocator keeps what large strings took, and uses it again
    memory, start = resident(), time.perf_counter()
    verdicts = reward.verdicts(golds, responses)
    seconds = time.perf_counter() - start
    allowed = args.time_limit * args.count / args.workers * 1.1
    print(
        f"{args.count} hostile responses: {seconds:.1f} s (limit x count / workers + 10 %: {allowed:.0f} s), "
        f"{reward.timeouts} took too long, {reward.errors} failed, {sum(v.equal for v in verdicts)} called right; "
        f"memory {memory:.0f} MiB before, {resident():.0f} after"
    )
    good = reward.verdicts(["1/2"] * 100, [r"\boxed{0.5}"] * 100)
    print(f"of 100 right responses after them {sum(verdict.equal for verdict in good)} are called right")
    reward.close()

    workers = Workers(args.workers, args.time_limit)
    start = time.perf_counter()
    results = workers.map(math.factorial, [(10**9,)] * args.endless)  # one operation that takes hours and no signal
    seconds = time.perf_counter() - start
    least = args.time_limit * args.endless / args.workers
    print(
        f"{args.endless} comparisons that never end: {seconds:.1f} s, {seconds / least - 1:+.1%} over limit x count / "
        f"workers; {sum(isinstance(result, TimeoutError) for result in results)} of them killed"
    )
    workers.close()


if __name__ == "__main__":
    main()
