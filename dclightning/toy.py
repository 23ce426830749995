"""``dclightning toy``: where each of the three discrepancies moves the probability of a single state's actions.

Without options: six actions, two of each that are likely, possible and rare, one of them bad and one good.
"""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dclightning.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dclightning.discrepancy import DiscrepancyKind
    from dclightning.one_state import OptimalPolicy, Vector

NAMES: dict["DiscrepancyKind", str] = {
    "probability": "probability |p-q|",
    "ratio": "ratio |p/q-1|",
    "log": "log |log p - log q|",
}
COLOURS: dict["DiscrepancyKind", str] = {"probability": "#0072b2", "ratio": "#e69f00", "log": "#009e73"}


def main(arguments: list[str]) -> None:
    """Print the optimal policies and draw them."""
    parser = argparse.ArgumentParser(prog="dclightning toy", description=__doc__, exit_on_error=False)
    parser.add_argument(
        "--q",
        nargs="+",
        type=float,
        default=[0.36, 0.30, 0.14, 0.12, 0.04, 0.04],
        help="probability of each action under the inference policy",
    )
    parser.add_argument(
        "--advantages", nargs="+", type=float, default=[-0.8, 0.8, -1.0, 1.0, -1.0, 1.2], help="one of each action"
    )
    parser.add_argument("--epsilon", type=float, default=0.005, help="the budget: what E_q[δ²] may be at most")
    parser.add_argument("--out", type=Path, default=Path("toy.png"), help="the figure, a PNG file")
    try:
        options = parser.parse_args([_shield(argument) for argument in arguments[1:]])
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    q, advantages = _check(options.q, options.advantages, options.epsilon, options.out)

    from dclightning.one_state import KINDS, optimal_policy, solve_numerically

    optima = {kind: optimal_policy(q, advantages, options.epsilon, kind) for kind in KINDS}
    solved = {kind: solve_numerically(q, advantages, options.epsilon, kind) for kind in KINDS}
    print_table(q, advantages, options.epsilon, optima, solved)
    try:
        draw(q, advantages, options.epsilon, optima).savefig(options.out, format="png")
    except OSError as error:
        raise UserError(f"--out={str(options.out)!r}: cannot be written ({error.strerror})") from error
    print(f"\nfigure       {options.out}")


def _shield(argument: str) -> str:
    """A number that argparse cannot take for an option: it knows -1 and -.8, but neither -1e-3 nor -inf."""
    try:
        float(argument)
    except ValueError:
        return argument
    return f" {argument}"


def _check(q: list[float], advantages: list[float], epsilon: float, out: Path) -> tuple["Vector", "Vector"]:
    """The two lists as arrays, q summing to 1 exactly; raises UserError on what cannot be a state."""
    if len(q) < 2:
        raise UserError(f"--q={_show(q)}: at least two actions are needed")
    if not all(0 < value < 1 for value in q):
        raise UserError(f"--q={_show(q)}: every probability must be above 0 and below 1")
    if abs(sum(q) - 1) > 1e-6:
        raise UserError(f"--q={_show(q)}: the probabilities must sum to 1, not to {sum(q):.6g}")
    if len(advantages) != len(q):
        raise UserError(f"--advantages={_show(advantages)}: {len(q)} are needed, one for each of --q={_show(q)}")
    if not all(abs(value) <= 1e9 for value in advantages):
        raise UserError(f"--advantages={_show(advantages)}: every advantage must be a number of at most 1e9")
    if not 1e-12 <= epsilon < math.inf:
        raise UserError(f"--epsilon={epsilon:g}: the budget must be above 0 (at least 1e-12) and finite")
    if out.suffix.lower() != ".png":
        raise UserError(f"--out={str(out)!r}: the figure is a PNG file, so its name must end in .png")
    if not out.parent.is_dir():
        raise UserError(f"--out={str(out)!r}: there is no folder {str(out.parent)!r}")
    return np.array(q) / sum(q), np.array(advantages)


def _show(values: list[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def print_table(
    q: "Vector",
    advantages: "Vector",
    epsilon: float,
    optima: dict["DiscrepancyKind", "OptimalPolicy"],
    solved: dict["DiscrepancyKind", "Vector"],
) -> None:
    """Print the policies, what they achieve, and what of it holds in general.

    Args:
        q: Probabilities under the inference policy, (n,).
        advantages: One of each action, (n,).
        epsilon: The budget.
        optima: The optimal policy of each kind.
        solved: The policy that a numerical solver finds for each kind, (n,).
    """
    from rich.console import Console
    from rich.table import Table

    from dclightning.one_state import ratio_support_limit

    table = Table(title=f"optimal policies within E_q[δ²] ≤ {epsilon:g}", title_justify="left")
    for name in ("action", "q", "A", *(NAMES[kind].replace(" |", "\n|", 1) for kind in optima)):
        table.add_column(name, justify="left" if name == "action" else "right")
    for action in range(len(q)):
        policies = (f"{optimum.policy[action]:.3f}" for optimum in optima.values())
        table.add_row(str(action + 1), f"{q[action]:.3f}", f"{advantages[action]:g}", *policies)
    table.add_section()
    table.add_row("λ (budget)", "", "", *(f"{optimum.multiplier:.4g}" for optimum in optima.values()))
    table.add_row("ν (simplex)", "", "", *(f"{optimum.nu:.4g}" for optimum in optima.values()))
    expected = (f"{optimum.expected_advantage:.4f}" for optimum in optima.values())
    table.add_row("advantage ΣπA", f"{q @ advantages:.4f}", "", *expected)
    table.add_row("budget spent", "", "", *(f"{optimum.spent:.4g}" for optimum in optima.values()))
    support = (str(int((optimum.policy > 1e-6).sum())) for optimum in optima.values())
    table.add_row("actions > 1e-6", str(len(q)), "", *support)
    gaps = {kind: optimum.policy - solved[kind] for kind, optimum in optima.items()}
    table.add_row("solver gap, π", "", "", *(f"{np.abs(gap).max():.0e}" for gap in gaps.values()))
    table.add_row("solver gap, ΣπA", "", "", *(f"{abs(gap @ advantages):.0e}" for gap in gaps.values()))
    console = Console(soft_wrap=True)
    console.print(table)
    limit = f"{ratio_support_limit(q, advantages):.3g}"
    console.print(
        "While the budget binds, an action gains probability exactly if A > ν: one with A > 0 can lose.\n"
        f"ratio keeps every action exactly if ε < Var_q(A) / (E_q(A) - min A)², here {limit}; log always does.\n"
        "Seen on every instance tried, not proved: probability keeps no more actions than the others.",
        highlight=False,
    )


def draw(
    q: "Vector", advantages: "Vector", epsilon: float, optima: dict["DiscrepancyKind", "OptimalPolicy"]
) -> "Figure":
    """A figure of how much probability each action gains or loses; arguments as for the table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.4, 1.2 * len(q)), 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    places, width = np.arange(len(q)), 0.8 / len(optima)
    for i, (kind, optimum) in enumerate(optima.items()):
        offset = (i - (len(optima) - 1) / 2) * width
        axes.bar(places + offset, optimum.policy - q, width, label=NAMES[kind], color=COLOURS[kind])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(places, [f"q = {p:.3g}\nA = {a:g}" for p, a in zip(q, advantages, strict=True)])
    axes.set_xlabel("action: probability under the inference policy, and advantage")
    axes.set_ylabel("probability gained, π − q")
    axes.set_title(f"The optimal policy within E_q[δ²] ≤ {epsilon:g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="discrepancy δ", frameon=False)
    return figure
