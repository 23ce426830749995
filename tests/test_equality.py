import json
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dclightning.rewards.answers import last_boxed
from dclightning.rewards.equality import Conventions, Verdict, judge

TABLE = Path(__file__).parent / "data" / "math_verdicts.jsonl"
ROWS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]

common = settings(max_examples=150, deadline=None)


def equal(gold, answer):
    """The verdict, once it is clear that it is the same both ways and that nothing failed on the way."""
    verdict, other_way = judge(gold, answer), judge(answer, gold)
    assert verdict.equal == other_way.equal, (verdict, other_way)
    assert "raised" not in verdict.reason + other_way.reason
    return verdict.equal


# Answers of each kind. Those without variables, and those with a value.

whole = st.integers(-(10**6), 10**6).map(str)
decimal = st.decimals(-1000, 1000, places=3, allow_nan=False).map(str)
natural = st.integers(1, 60)
fraction = st.builds(r"\frac{{{}}}{{{}}}".format, st.integers(-60, 60), natural)
surd = st.builds(r"{}\sqrt{{{}}}".format, natural, natural)
sums = st.builds("{} + {}".format, fraction, surd)
pies = st.builds(r"\frac{{{}\pi}}{{{}}}".format, natural, natural)
complexes = st.builds("{} + {}i".format, whole, natural)
powers = st.builds("{}^{{{}}}".format, natural, st.integers(-20, 60))
logs = st.builds(r"\ln {} - \sin({})".format, st.integers(2, 60), natural)
number = st.one_of(whole, decimal, fraction, surd, sums, pies, complexes, powers, logs)

polynomial = st.builds("{}x^2 + {}x + {}".format, natural, natural, natural)
formula = st.one_of(number, polynomial, st.builds(r"\frac{{{}}}{{{}y + n}}".format, polynomial, natural))
pair = st.builds("({}, {})".format, formula, formula)
several = st.lists(formula, min_size=2, max_size=4)
interval = st.builds(r"{}{}, \infty)".format, st.sampled_from("(["), number)
matrix = st.builds(r"\begin{{pmatrix}} {} & {} \\ {} & 0 \end{{pmatrix}}".format, formula, formula, formula)
word = st.sampled_from([r"\text{Monday}", r"\text{(C)}", "yes", "no", "ellipse", r"\text{two lines}", "A", "DNE"])
notation = st.one_of(
    st.builds("{}:{:02}".format, st.integers(0, 23), st.integers(0, 59)),
    st.builds("{}_{{7}}".format, st.integers(1, 1000).map(lambda n: oct(n)[2:])),
    st.builds(r"{}\%".format, decimal),
    st.builds(r"{}\text{{ cm}}^2".format, natural),
    st.builds(r"{}^\circ".format, natural),
    st.builds(r"x = {}".format, number),
    st.builds(r"y < {}".format, number),
    st.builds(r"1 \pm {}".format, surd),
    st.builds("2x + {}y = {}".format, natural, number),
)
answer = st.one_of(
    formula, pair, interval, matrix, word, notation, several.map(", ".join), several.map(r"\{{{}\}}".format)
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['gold']} | {row['prediction']}"[:60])
def test_the_table(row):
    prediction = row["prediction"]
    given_answer = last_boxed(prediction) if "boxed" in prediction else prediction.removeprefix("The answer is ")
    if given_answer is None:
        assert not row["equal"]
    else:
        assert equal(row["gold"], given_answer) == row["equal"], judge(row["gold"], given_answer)


@pytest.mark.parametrize(
    ("changed", "gold", "given_answer"),
    [
        ("percent_is_number", "50", r"50\%"),
        ("ignore_units", "5", r"5\text{ cm}"),
        ("ignore_variable", "5", "x = 5"),
        ("lists_are_sets", "1, 2", "2, 1"),
        ("parentheses_optional", "(1, 2)", "1, 2"),
        ("base_optional", "1011_2", "1011"),
        ("inequality_is_interval", r"(3, \infty)", "x > 3"),
        ("column_is_tuple", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1, 2)"),
        ("rounded_is_equal", r"\frac{1}{3}", "0.333"),
        ("variables_positive", r"\sqrt{\frac{2h}{g}}", r"\frac{\sqrt{2h}}{\sqrt{g}}"),
        ("variables_positive", r"2\ln x", r"\ln x^2"),
        ("rounded_is_equal", r"\frac{\pi}{2}", "1.5708"),
        ("rounded_is_equal", r"1.2345 \times 10^{-8}", r"1.23 \times 10^{-8}"),
    ],
)
def test_each_convention_can_be_changed(changed, gold, given_answer):
    default = getattr(Conventions(), changed)
    assert judge(gold, given_answer).equal == default
    assert judge(gold, given_answer, Conventions(**{changed: not default})).equal != default


@pytest.mark.parametrize("given_answer", ["0.334", "0.32", "0.3334", "0.33", "0.3", r"0.0 \times 10^9"])
def test_rounding_is_no_tolerance(given_answer):
    assert not judge(r"\frac{1}{3}", given_answer, Conventions(rounded_is_equal=True)).equal


def test_reasons_are_named():
    assert judge("7", "007").reason == "same integer"
    assert judge("0.5", r"\frac12").reason == "same number"
    assert judge(r"\sqrt{12}", r"2\sqrt3").reason == "equal to 90 digits"
    assert judge("10", "9999999!").reason == "too large to evaluate"
    assert judge("5", r"\foo").reason == r"cannot be read: '\\foo'"


@common
@given(answer)
def test_every_answer_is_equal_to_itself(gold):
    assert equal(gold, gold)


@common
@given(answer, answer)
def test_the_order_of_the_two_does_not_matter(one, other):
    equal(one, other)


@common
@given(answer, answer, whole)
def test_wrapping_changes_nothing(one, other, number):
    expected = equal(one, other)
    plain = one.replace(r"\frac", r"\dfrac").replace("(", r"\left(").replace(")", r"\right)") if "[" not in one else one
    for wrapped in (rf"\boxed{{{one}}}", f"${one}$", f"  {one} \n", f"{one}.", rf"\({one}\)", plain):
        assert equal(wrapped, one)
        assert equal(wrapped, other) == expected
    for wrapped in (
        rf"\boxed{{{number}}}",
        f"${number}$",
        f"{number}.",
        rf"\text{{{number}}}",
        rf"\mathbf{{{number}}}",
    ):
        assert equal(wrapped, number)
        assert not equal(wrapped, f"{number}1")


@common
@given(st.integers(), st.integers())
def test_integers_are_equal_if_they_are_the_same(one, other):
    assert equal(str(one), str(other)) == (one == other)
    assert equal(f"{one:,}", str(one))
    assert equal(f"{one}.0", str(one))


@common
@given(st.decimals(allow_nan=False, allow_infinity=False, places=6), st.decimals(-9, 9, places=12))
def test_decimals_are_exact(one, other):
    assume(abs(one) < 10**9)  # more digits than that do not fit into a Decimal
    assert equal(f"{one:f}", f"{one + other:f}") == (other == 0)


@common
@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_are_exact(one, other):
    latex = rf"\frac{{{one.numerator}}}{{{one.denominator}}}"
    assert equal(latex, str(one))
    assert equal(latex, str(other)) == (one == other)
    assert equal(str(one), f"{float(one)!r}") == (one == Fraction(Decimal(repr(float(one)))))


@common
@given(number)
def test_one_more_is_different(gold):
    assert not equal(gold, f"{gold} + 1")
    assert equal(gold, f"({gold}) + 1 - 1")


@common
@given(st.lists(whole, min_size=2, max_size=4), st.randoms())
def test_a_list_has_no_order_but_a_tuple_has(items, random):
    shuffled = random.sample(items, len(items))
    same = list(map(int, items)) == list(map(int, shuffled))
    assert equal(", ".join(items), ", ".join(shuffled))
    assert equal(f"({', '.join(items)})", f"({', '.join(shuffled)})") == same
    assert not equal(", ".join(items), ", ".join(items[1:]))


SOUP = r"""
1 2 10 0.5 1,234 x e i \pi \frac \sqrt { } ( ) [ ] \{ \} + - * / ^ _ ! | , ; : = < > \le \in \cup \approx \pm
% \% $ \$ \text{cm} \text{if} ° ^\circ \infty \sin \log \lfloor \rfloor \binom \sum \int \left \right & \\ or cm
\begin{pmatrix} \end{pmatrix} \mathbb{R} percent million \boxed{ f(x) ' " . √ ½ ² 五 \dots 3:30 _2 !! ^{
"""
pieces = st.sampled_from(SOUP.split())


@common
@given(st.one_of(st.text(), st.lists(pieces, max_size=20).map("".join)), st.one_of(st.text(), answer))
def test_no_text_makes_it_fail(one, other):
    equal(one, other)
    assert equal(one, one) or judge(one, one).reason == "empty"


TOWER = "10^{10^{10^{10}}}"
HOSTILE = [
    *[TOWER, rf"\frac{{1}}{{{TOWER}}}", rf"\sin({TOWER})", "9999999!", "((99!)!)!", "x^{x^{x^{x^{9}}}}", "1e999999999"],
    *[r"\binom{10^{30}}{10^{29}}", r"\exp(\exp(\exp(\exp(9))))", "(x+1)^{999999}", r"\sum_{k=1}^{10^9} \frac{1}{k^2}"],
    *[r"\sum_{k=0}^{1000} \binom{1000}{k}", r"\prod_{k=1}^{9999} k^{k}", r"\int_0^1 \frac{\ln(1+x)}{1+x^2}\,dx"],
    *[r"\sum_{a=1}^{999} \sum_{b=1}^{999} \sum_{c=1}^{999} abc", r"\sum_{k=1}^{999} \sin k^k"],
    *["*".join(["4000!"] * 300), "+".join([r"\sin x"] * 400), r"\sqrt{" * 700, "(" * 3_000, "-" * 3_000 + "1"],
    *["1," * 1_500, "9" * 100_000 + ".5", r"\text{a}" * 400, "1 a " * 900, "{" * 1_900 + "1" + "}" * 1_900],
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda text: text[:20])
def test_a_huge_number_is_refused_at_once(hostile):
    start = time.perf_counter()
    assert not equal("5", hostile)
    assert equal(hostile, hostile)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("error", [RecursionError, ValueError, ZeroDivisionError])
def test_a_fault_is_no_equality(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("dclightning.rewards.equality.arithmetic.same_value", fail)
    assert judge("1/2", "0.5") == Verdict(False, f"raised {error.__name__}", failed=True)


def test_long_integers_are_compared_as_text():
    assert equal("9" * 100_000, "0" + "9" * 100_000)
    assert not equal("9" * 100_000, "9" * 99_999 + "8")


def test_whole_numbers_and_text_import_no_library():
    script = """
import sys
from dclightning.rewards.equality import judge
assert judge("1/2", "0.5").equal and not judge("yes", "no").equal
assert not {"sympy", "mpmath", "torch"} & set(sys.modules)
assert judge(r"\\sqrt{12}", r"2\\sqrt{3}").equal
assert not {"sympy", "torch"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
