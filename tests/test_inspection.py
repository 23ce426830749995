"""The page of coloured tokens: its data, and what a reader meets in a browser."""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch

from dclightning.discrepancy import discrepancy
from dclightning.errors import UserError
from dclightning.inspection import find, main, page
from dclightning.records import Record, read_records, write_records

HOSTILE = ["<img src=x onerror='window.hacked=1'>", "</script><script>window.hacked=1</script>", "<!--<script>", "‮x"]
KINDS = ["probability", "ratio", "log"]


def record(tokens, p, q, **changes) -> Record:
    """A response whose tokens have these probabilities."""
    values = {
        "rollout": 10,
        "prompt": "What is 1 + 1?",
        "tokens": tokens,
        "token_ids": list(range(20, 20 + len(tokens))),
        "train_logprobs": [math.log(x) for x in p],
        "rollout_logprobs": [math.log(x) for x in q],
        "train_ranks": [i + 1 for i in range(len(tokens))],
        "rollout_ranks": [i + 3 for i in range(len(tokens))],
        "entropy": [0.25 + i for i in range(len(tokens))],
        "reward": 1.0,
        "truncated": False,
    }
    return Record(**{**values, **changes})


RECORDS = [
    record(["It", " is", "\n", "2"], [0.5, 0.999, 0.7, 0.4], [0.49, 0.9985, 0.701, 0.9]),
    record(["Two", "."], [0.3, 0.8], [0.301, 0.7999], rollout_ranks=[], reward=None, truncated=True),
    record([], [], [], reward=0.0),
    record(HOSTILE, [0.9] * 4, [0.6, 0.9, 0.9, 0.9], prompt="<b id='bold'>1</b></script>", reward=-1.0),
]
DELTAS = [[0.01, 0.0005, 0.001, 0.5], [0.001, 0.0001], [], [0.3, 0, 0, 0]]  # of the kind probability


@pytest.fixture
def file(tmp_path):
    write_records(tmp_path / "some.jsonl", iter(RECORDS))
    return tmp_path / "some.jsonl"


def embedded(html):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(data)


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_holds_the_records_and_their_discrepancy(file, tmp_path, kind, capsys):
    main(["inspect", str(file), "--output", str(tmp_path / "page.html"), "--kind", kind])
    assert capsys.readouterr().out.startswith("4 of 4 responses of ")
    data = embedded((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert (data["kind"], data["title"], data["count"]) == (kind, str(file), 4)
    found = [(response.pop("discrepancy"), Record(**response)) for response in data["responses"]]
    assert [kept for _, kept in found] == RECORDS == read_records(file)
    for deltas, kept in found:
        expected = discrepancy(torch.tensor(kept.train_logprobs), torch.tensor(kept.rollout_logprobs), kind)
        torch.testing.assert_close(torch.tensor(deltas), expected, rtol=1e-6, atol=0)


def test_no_text_ends_the_data():
    html = page(RECORDS)
    assert html.count("</script>") == page(RECORDS[:1]).count("</script>")
    assert html.count("<!--") == 0
    assert embedded(html)["responses"][3]["tokens"] == HOSTILE


def test_the_worst_responses_are_shown_in_their_order(file, tmp_path):
    largest = [max(response["discrepancy"], default=0.0) for response in embedded(page(RECORDS))["responses"]]
    worst = sorted(sorted(range(4), key=lambda i: -largest[i])[:2])
    main(["inspect", str(file), "--output", str(tmp_path / "page.html"), "--limit", "2"])
    data = embedded((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [response["tokens"] for response in data["responses"]] == [RECORDS[i].tokens for i in worst]
    assert data["count"] == 4


def test_a_folder_is_a_run_or_a_calibration(tmp_path):
    for name in ("000010", "000200", "000030"):
        write_records(tmp_path / "run" / "rollouts" / f"{name}.jsonl", iter(RECORDS))
    assert find(tmp_path / "run").name == "000200.jsonl"
    assert find(tmp_path / "run", rollout=30).name == "000030.jsonl"
    write_records(tmp_path / "calibration" / "responses.jsonl", iter(RECORDS))
    assert find(tmp_path / "calibration") == tmp_path / "calibration" / "responses.jsonl"
    with pytest.raises(UserError, match=r"rollout=20: is none of those that were kept: 000010, 000030, 000200"):
        find(tmp_path / "run", rollout=20)
    with pytest.raises(UserError, match=r"rollout=20: there are several in a run's folder only"):
        find(tmp_path / "calibration", rollout=20)
    (tmp_path / "new" / "rollouts").mkdir(parents=True)
    with pytest.raises(UserError, match="the run has kept no responses"):
        find(tmp_path / "new")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.jsonl"], "source='nothing.jsonl': there is no such file or folder"),
        (["FOLDER"], "has neither a run's folder rollouts nor a calibration's responses.jsonl"),
        (["FOLDER/empty"], "has no responses"),
        (["FOLDER/binary"], "binary': cannot be read"),
        (["FOLDER/other"], "line 1: no response of a run or calibration"),
        (["FILE", "--output", "FILE"], "is the file of responses; name another one"),
        (
            ["FILE", "--output", "/no/page.html"],
            "page.html': cannot be written (No such file or directory)",
        ),
        (["FILE", "--limit", "0"], "limit=0: must be at least 1"),
        (["FILE", "--kind", "square"], "square"),
        ([], "source"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(file, arguments, message):
    (file.parent / "empty").write_text("")
    (file.parent / "binary").write_bytes(b"\xff\xfe")
    (file.parent / "other").write_text('{"answer": 5}\n')
    places = {"FILE": str(file), "FOLDER": str(file.parent)}
    before = file.read_bytes()
    with pytest.raises(UserError) as caught:
        main(["inspect", *(re.sub("FILE|FOLDER", lambda name: places[name[0]], argument) for argument in arguments)])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entropy": [0.1]}, "response 2: entropy has 1 entries for 4 tokens"),
        ({"rollout_ranks": [1]}, "response 2: rollout_ranks has 1 entries for 4 tokens"),
        ({"train_logprobs": [0.0, math.nan, 0.0, 0.0]}, "response 2: train_logprobs holds a number that is not finite"),
        ({"reward": math.inf}, "response 2: reward=inf is not finite"),
    ],
)
def test_a_broken_response_is_named(change, message):
    with pytest.raises(UserError, match=message):
        page([RECORDS[0], replace(RECORDS[0], **change)])


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"there is no browser: {', '.join(names)}")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page of records; whatever it asked for or complained of must be nothing."""
    requests, complaints, opened = [], [], []

    def answer(route):
        requests.append(route.request.url)
        route.continue_()

    def shown(records, kind="probability", width=1280):
        file = tmp_path / "page.html"
        file.write_text(page(records, kind), encoding="utf-8")
        tab = browser.new_page(viewport={"width": width, "height": 700})
        tab.set_default_timeout(10_000)
        tab.route("**/*", answer)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(file.as_uri())
        opened.append((tab, file.as_uri()))
        return tab

    yield shown
    for tab, _ in opened:
        tab.close()
    assert requests == [address for _, address in opened]
    assert complaints == []


def token(tab, response, position):
    return tab.get_by_label(f"Tokens of response {response}", exact=True).locator("span").nth(position - 1)


def responses(tab):
    """Which are to be seen, in the order of the page."""
    return [int(heading.split()[1]) for heading in tab.locator("article:visible h2").all_text_contents()]


def dimmed(tab, response):
    spans = tab.get_by_label(f"Tokens of response {response}", exact=True).locator("span").all()
    return [bool(re.search(r"\bdim\b", span.get_attribute("class") or "")) for span in spans]


def told(tab):
    """What the tip says: name and values of each row."""
    rows = [row.split("\t") for row in tab.get_by_role("tooltip").locator("tr").all_inner_texts()]
    return {name: [value.strip() for value in values] for name, *values in rows}


def worst(tab):
    return [row.split("\t") for row in tab.get_by_role("row").all_inner_texts()][1:]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800])
def test_the_page_fits_and_can_be_read(show, width, scheme):
    tab = show(RECORDS, width=width)
    tab.emulate_media(color_scheme=scheme)
    assert tab.title() == "Discrepancy of tokens: responses"
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    colours = [
        token(tab, 1, 4).evaluate(f"(node) => getComputedStyle(node).{name}") for name in ("color", "backgroundColor")
    ]
    # The browser itself turns any notation of a colour into bytes.
    to_bytes = """(colour) => {
        const context = new OffscreenCanvas(1, 1).getContext("2d");
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    }"""
    light = sorted(luminance(tab.evaluate(to_bytes, colour)) for colour in colours)
    assert (light[1] + 0.05) / (light[0] + 0.05) >= 4.5  # what WCAG asks of text


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.slow
def test_hover_and_focus_tell_a_token_numbers(show):
    tab = show(RECORDS)
    assert tab.get_by_role("tooltip").count() == 0
    token(tab, 1, 4).hover()
    assert "id 23, position 4 of 4" in tab.get_by_role("tooltip").inner_text()
    assert told(tab)["δ"] == ["0.5"]
    assert told(tab)["probability"] == ["0.4", "0.9"]
    assert told(tab)["rank"] == ["4", "6"]
    assert told(tab)["entropy, nats"] == ["3.25"]
    token(tab, 2, 1).focus()
    assert told(tab)["rank"] == ["1", "–"]
    tab.keyboard.press("ArrowRight")
    assert "id 21, position 2 of 2" in tab.get_by_role("tooltip").inner_text()
    tab.keyboard.press("Escape")
    assert tab.get_by_role("tooltip").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_worst_tokens_are_those_of_the_kind(show, kind):
    tab = show(RECORDS, kind)
    deltas = [
        (delta, f"{number} at {place}")
        for number, response in enumerate(embedded(page(RECORDS, kind))["responses"], start=1)
        for place, delta in enumerate(response["discrepancy"], start=1)
    ]
    expected = sorted(deltas, key=lambda pair: -pair[0])
    assert [row[4] for row in worst(tab)] == [place for _, place in expected]
    assert [float(row[1]) for row in worst(tab)] == pytest.approx([delta for delta, _ in expected], rel=1e-3)


@pytest.mark.slow
def test_the_filter_dims_tokens_and_hides_responses(show):
    tab = show(RECORDS)
    assert responses(tab) == [1, 2, 3, 4]
    tab.get_by_label("Minimum δ", exact=True).fill("0.009")
    assert responses(tab) == [1, 4]
    assert [dimmed(tab, i + 1) for i in (0, 3)] == [[delta < 0.009 for delta in DELTAS[i]] for i in (0, 3)]
    assert "2 of 4 responses" in tab.get_by_role("status").inner_text()
    tab.get_by_label("Minimum δ", exact=True).fill("0")
    assert responses(tab) == [1, 2, 3, 4]
    assert not any(dimmed(tab, 1) + dimmed(tab, 4))


@pytest.mark.slow
def test_the_slider_goes_from_everything_to_the_largest(show):
    tab = show(RECORDS)
    slider, least = tab.get_by_label("Minimum δ, on the scale"), tab.get_by_label("Minimum δ", exact=True)
    slider.press("End")
    assert float(least.input_value()) == pytest.approx(0.5, rel=1e-6)
    assert responses(tab) == [1]
    assert dimmed(tab, 1) == [True, True, True, False]
    slider.press("Home")
    assert float(least.input_value()) == 0
    assert responses(tab) == [1, 2, 3, 4]


@pytest.mark.slow
def test_responses_are_sorted_and_those_without_a_value_come_last(show):
    tab = show(RECORDS)
    for name, descending in (("mean δ", [1, 4, 2, 3]), ("max δ", [1, 4, 2, 3]), ("reward", [1, 3, 4, 2])):
        button = tab.get_by_role("button", name=name)
        button.click()
        assert responses(tab) == descending
        button.click()
        assert responses(tab) == [*descending[-2::-1], descending[-1]]
    tab.get_by_role("button", name="order").click()
    assert responses(tab) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 800])
def test_a_worst_token_is_jumped_to_in_a_long_page(show, width):
    tab = show([*[record(["a", "\n"] * 100, [0.5] * 200, [0.501] * 200)] * 30, *RECORDS], width=width)
    target = token(tab, 31, 4)
    tab.get_by_role("button", name="2", exact=True).click()
    tab.locator(".tokens span:focus").wait_for()
    assert target.evaluate("(node) => node === document.activeElement")
    assert tab.locator(".marked").all_text_contents() == ["2"]
    box = target.bounding_box()
    assert 100 < box["y"] < 600
    assert told(tab)["δ"] == ["0.5"]
    tip = tab.get_by_role("tooltip").bounding_box()
    assert 0 < tip["y"] - box["y"] - box["height"] < 20 or 0 < box["y"] - tip["y"] - tip["height"] < 20


@pytest.mark.slow
def test_tokens_are_text_whatever_is_in_them(show):
    tab = show(RECORDS)
    assert [token(tab, 4, i).text_content() for i in (1, 2, 3, 4)] == [*HOSTILE[:3], r"\u{202e}x"]
    tab.locator("summary").last.click()
    assert tab.locator("summary").last.text_content() == RECORDS[3].prompt
    token(tab, 4, 1).hover()
    tab.wait_for_timeout(200)
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("img, #bold").count() == 0


@pytest.mark.slow
def test_white_space_is_seen_and_lines_break(show):
    tab = show([record(["a", "\n", "b", " ", "", " c"], [0.5] * 6, [0.4] * 6)])
    assert [token(tab, 1, i).text_content() for i in range(1, 7)] == ["a", "⏎\n", "b", " ", "∅", " c"]
    assert token(tab, 1, 3).bounding_box()["y"] > token(tab, 1, 1).bounding_box()["y"] + 10
    assert token(tab, 1, 4).bounding_box()["width"] > 4
    assert sorted(row[0] for row in worst(tab)) == sorted(["a", "⏎", "b", "␣", "∅", "␣c"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "records",
    [[record([], [], [])], [record(["a"], [0.5], [0.5])], [record(["a", "b"], [0.5, 1e-30], [1e-30, 0.5])]],
    ids=["no token", "no discrepancy", "huge ratios"],
)
def test_axes_have_numbers_for_any_data(show, records, kind):
    tab = show(records, kind)
    for label in ("Discrepancy by position", "Probability under the training policy"):
        drawing = tab.get_by_role("img", name=label)
        ticks = [float(text) for text in drawing.locator("text").all_text_contents() if re.match(r"[\d.]+", text)]
        assert len(ticks) >= 4
        assert "NaN" not in drawing.inner_html()


@pytest.mark.slow
def test_a_large_page_is_soon_of_use(show):
    p = [0.5, 0.9, 0.99, 0.2] * 125
    q = [x * (1 - 0.001 * (i % 7)) for i, x in enumerate(p)]
    tab = show([record(["word", " and", ",", "\n"] * 125, p, q)] * 200)  # is open within the timeout of ten seconds
    tab.get_by_label("Minimum δ", exact=True).fill("0.004")
    assert "of 100,000 tokens" in tab.get_by_role("status").inner_text()
