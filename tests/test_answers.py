import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dclightning.rewards.answers import last_boxed, last_number


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{7} and then \boxed{8", "7"),
        ("42", None),
        ("", None),
        (r"\boxed{", None),
        (r"\boxed{}", ""),
        (r"\boxed{a \boxed{b} c", "b"),
        (r"} \boxed{1 { } and \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{" * 200_000, None),
        (r"\fbox{42}", "42"),
        (r"\boxed {42}", "42"),
        (r"\\boxed{42}", "42"),
        (r"so \boxed 5.", "5"),
        (r"\boxed -1/2 or", "-1/2"),
        (r"\boxed42", "42"),
        (r"\boxed C.", "C"),
        (r"\boxed{1} and \boxed 2 and \boxed{", "2"),
        (r"\boxed This is it", None),
        # A brace with a backslash is a character, and no brace.
        (r"\boxed{f(x) = \left\{ 1 \right.}", r"f(x) = \left\{ 1 \right."),
        (r"\boxed{\begin{pmatrix} 1 \\{} 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\{} 2 \end{pmatrix}"),
    ],
)
def test_the_last_complete_box_counts(response, answer):
    assert last_boxed(response) == answer


@given(st.recursive(st.text("ab \\,", max_size=5), lambda inner: st.builds("{{{}}}{}".format, inner, inner)))
def test_a_box_is_found_whatever_it_holds(content):
    content = content.replace("\\", r"\\ ")
    assert last_boxed(f"First \\boxed{{0}}, then \\boxed{{{content}}}.") == content


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("The answer is 42.", "42"),
        ("#### 18", "18"),
        ("no number", None),
        ("", None),
        ("so -7", "-7"),
        ("x = -7", "-7"),
        ("x = −7", "−7"),
        ("10 - 3", "3"),
        ("5-3", "3"),
        ("(-5)", "-5"),
        ("1,234 eggs", "1,234"),
        ("$1,234.50.", "1,234.50"),
        (r"10,\!080", r"10,\!080"),
        ("1{,}000", "1{,}000"),
        ("1, 2, 3", "3"),
        ("1,2,3", "3"),
        ("0.5", "0.5"),
        (".5", ".5"),
        ("3/4", "3/4"),
        (r"$-\frac{3}{4}$.", r"-\frac{3}{4}"),
        (r"\frac12", r"\frac12"),
        ("50%", "50"),
        (r"50\%", "50"),
        ("4.5e33", "4.5e33"),
        (r"4.5 \times 10^{33}", r"4.5 \times 10^{33}"),
        ("25 m^2", "25"),
        ("25 cm^{2}", "25"),
        ("5 moles of H2O", "5"),
        ("x_1 = 5", "5"),
        ("**18**", "18"),
        ("答案是5个", "5"),
    ],
)
def test_the_last_number_counts(response, number):
    assert last_number(response) == number


HOSTILE = [
    *["{}" * 500_000, r"\boxed{{" * 100_000 + "}" * 100_000, "\\" * 1_000_000, (r"\boxed" + " " * 10) * 60_000],
    *["1" * 1_000_000, "1," * 500_000, "1/" * 500_000, r"1\times " * 120_000, r"\frac{" * 160_000, "-" * 1_000_000],
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda text: text[:8])
def test_a_megabyte_of_nonsense_takes_no_time(hostile):
    start = time.perf_counter()
    last_boxed(hostile)
    last_number(hostile)
    assert time.perf_counter() - start < 5
