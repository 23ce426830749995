import pytest
from hypothesis import given
from hypothesis import strategies as st

from dclightning import Completion
from dclightning.data.problems import Problem
from dclightning.rewards.format import one_box, think_tags
from dclightning.rewards.length import CosineLength, ShorterInGroup, cosine, shortness
from dclightning.rewards.repetition import RepetitionPenalty, repeated_share


def of(reward, *texts, lengths=None, ids=None, answers=None):
    lengths = lengths or [len(text) for text in texts]
    problems = [Problem((ids or "a" * len(texts))[i], "?", (answers or "5" * len(texts))[i]) for i in range(len(texts))]
    return reward(problems, [Completion([1] * n, [0.0] * n, "stop", t) for n, t in zip(lengths, texts, strict=True)])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"so \boxed{5}.", 1.0),
        (r"so \boxed {\frac{1}{2}}", 1.0),
        ("so 5", 0.0),
        (r"\boxed{5", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{5} or \boxed{6}", 0.0),
        (r"\boxed{5} and \fbox{", 0.0),
    ],
)
def test_one_box(text, value):
    assert of(one_box, text) == [value]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>hm\nhm</think>\n5", 1.0),
        ("hm</think>5", 1.0),
        ("<think></think>5", 0.0),
        ("<think>hm</think> ", 0.0),
        ("<think>hm", 0.0),
        ("5", 0.0),
        ("<think>a</think>b<think>c</think>d", 0.0),
        ("<think><think>a</think>b", 0.0),
        ("\n" * 100_000, 0.0),
        ("<think>" + "\n" * 100_000, 0.0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_think_tags(text, value):
    assert of(think_tags, text) == [value]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
def test_the_repeated_share_counts_each_ngram_that_was_there_before(tokens, ngram):
    seen, repeated, total = [], 0, 0
    for start in range(len(tokens) - ngram + 1):
        window = tokens[start : start + ngram]
        repeated += window in seen
        total += 1
        seen.append(window)
    assert repeated_share(tokens, ngram) == pytest.approx(repeated / total if total else 0.0)


def test_repetition_is_penalised_in_proportion():
    penalty = RepetitionPenalty(ngram=2, worst=-3.0)
    completions = [Completion(ids, [], "stop", "") for ids in ([1, 2, 3, 4], [1, 1, 1, 1], [], [1])]
    assert penalty([], completions) == [0.0, -2.0, 0.0, 0.0]


def test_cosine_length_prefers_short_right_and_long_wrong_answers():
    reward = CosineLength(longest=100)
    right, wrong = r"\boxed{5}", r"\boxed{6}"
    values = of(reward, right, right, right, right, wrong, wrong, wrong, lengths=[0, 50, 100, 900, 0, 50, 100])
    assert values == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, -0.75, -0.5])


@given(st.floats(0, 2), st.floats(0, 2), st.floats(-5, 5), st.floats(-5, 5))
def test_the_cosine_goes_one_way_between_its_ends(one, other, start, end):
    first, second = (cosine(part, start, end) for part in sorted([one, other]))
    assert min(start, end) - 1e-9 <= first <= max(start, end) + 1e-9
    assert (second - first) * (end - start) >= -1e-9


def test_shorter_in_group_compares_the_responses_to_a_problem():
    reward = ShorterInGroup(share=0.5)
    right, wrong = r"\boxed{5}", r"\boxed{6}"
    values = of(reward, right, right, wrong, wrong, right, lengths=[10, 20, 10, 30, 7], ids="aaaab")
    assert values == pytest.approx([1.25, 1.0, 0.0, -0.25, 1.0])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_shortness_spans_one_from_the_longest_to_the_shortest(lengths):
    values = [shortness(length, lengths) for length in lengths]
    assert max(values) - min(values) == pytest.approx(1.0 if len(set(lengths)) > 1 else 0.0)
    assert sorted(values, reverse=True) == [values[i] for i in sorted(range(len(lengths)), key=lengths.__getitem__)]


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: RepetitionPenalty(ngram=0), "ngram=0"),
        (lambda: RepetitionPenalty(worst=1.0), "worst=1.0"),
        (lambda: CosineLength(longest=0), "longest=0"),
    ],
)
def test_what_makes_no_sense_is_refused(build, field):
    with pytest.raises(ValueError, match=field):
        build()
