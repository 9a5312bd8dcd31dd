"""The page of `toolkit verify --report`: whole, well formed, nothing beside it, and every text in it only a text."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
import pytest
from msgspec.structs import replace
from page_support import Element, Page, ancestors, bare, check_alone, difference, explanation, spoilt, without_structure
from runtime_support import TINY

from runtime.bundle import Bundle, read_passport
from runtime.parity.report import RUNGS, Explanation, Figure, Report
from runtime.verify import Setting, examine
from toolkit import report as module
from toolkit.charts import cache_chart
from toolkit.report import Marked, marked, odd_positions, render_report, write_report

ENVIRONMENT = {"system": "Linux", "numpy": "2.0"}
COMMAND = "toolkit verify bundles/tiny --seed 7"
NO_NUMBERS = [math.nan, math.inf, -math.inf]


@pytest.fixture(scope="module")
def passing() -> Report:
    settings = [Setting(threads=1), Setting(optimization="none", threads=1)]
    return examine(Bundle(TINY), settings)


@pytest.fixture(scope="module")
def failing(passing: Report) -> Report:
    return spoilt(passing)


@pytest.fixture(scope="module")
def untried(passing: Report) -> Report:
    return without_structure(passing)


def page_of(report: Report, bundle: Bundle | None = None) -> Page:
    return Page(render_report(report, bundle or Bundle(TINY), ENVIRONMENT, COMMAND))


@pytest.fixture(scope="module")
def passing_page(passing: Report) -> Page:
    return page_of(passing)


@pytest.fixture(scope="module")
def failing_page(failing: Report) -> Page:
    return page_of(failing)


@pytest.fixture(scope="module")
def untried_page(untried: Report) -> Page:
    return page_of(untried)


def in_precision(precision: str) -> Bundle:
    bundle = Bundle(TINY)
    bundle.passport = replace(read_passport(TINY), precision=precision)
    return bundle


# The file


@pytest.mark.parametrize("name", ["passing_page", "failing_page", "untried_page"])
def test_the_page_is_well_formed_and_stands_alone(name: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(name)
    check_alone(page)
    assert page.source.startswith("<!DOCTYPE html>")
    assert {"html", "head", "title", "h1", "main"} <= {element.tag for element in page.elements}
    assert len(page.all("h1")) == 1
    for table in page.all("table"):
        assert any(isinstance(part, Element) and part.tag == "caption" for part in table.parts)
    assert all(cell.attributes.get("scope") in ("col", "row", "colgroup", "rowgroup") for cell in page.all("th"))
    assert all(picture.attributes.get("aria-label") for picture in page.all("svg"))


@pytest.mark.parametrize(
    "source",
    [
        "<p>",
        "<p></div>",
        "</p>",
        "<p id='a' id='b'></p>",
        "<script>alert(1)</script>",
        "<link rel='stylesheet' href='x.css'>",
        "<img src='x.png'>",
        "<a href='https://example.org'>x</a>",
        "<a href='#nowhere'>x</a>",
        "<p id='a'></p><p id='a'></p>",
        "<p onclick='x()'></p>",
        "<p style='background: url(x.png)'></p>",
        "<style>@import 'x.css';</style>",
    ],
)
def test_what_looks_at_the_page_sees_what_is_wrong(source: str) -> None:
    with pytest.raises((ValueError, AssertionError)):
        check_alone(Page(source))


def test_the_same_report_gives_the_same_bytes(failing: Report, passing: Report, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.html", "two.html", "three.html")]
    write_report(paths[0], failing, Bundle(TINY), ENVIRONMENT, COMMAND)
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.linewidth": 9}):
        write_report(paths[1], failing, Bundle(TINY), ENVIRONMENT, COMMAND)
    write_report(paths[2], passing, Bundle(TINY), ENVIRONMENT, COMMAND)
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second != other
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def unwritable(folder: Path) -> Iterator[Path]:
    yield folder / "missing" / "out.html"
    (folder / "file").write_text("")
    yield folder / "file" / "out.html"
    (folder / "folder").mkdir()
    yield folder / "folder"
    yield folder / ("x" * 300)


@pytest.mark.parametrize("number", range(4))
def test_a_path_that_cannot_be_written_is_named_and_left_alone(passing: Report, tmp_path: Path, number: int) -> None:
    path = list(unwritable(tmp_path))[number]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match=r".+") as caught:
        write_report(path, bare(passing), Bundle(TINY), ENVIRONMENT, COMMAND)
    assert caught.value.filename == str(path)
    assert caught.value.strerror
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in folders")
def test_what_is_no_file_is_not_replaced(passing: Report, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError):
        write_report(tmp_path / "pipe", bare(passing), Bundle(TINY), ENVIRONMENT, COMMAND)
    assert (tmp_path / "pipe").is_fifo()


def test_a_page_that_fails_half_way_leaves_the_old_one(
    passing: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.html"
    write_report(path, bare(passing), Bundle(TINY), ENVIRONMENT, COMMAND)
    before = path.read_bytes()

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_report(path, bare(passing), Bundle(TINY), ENVIRONMENT, COMMAND)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_of_a_command_line_that_are_no_text_are_shown_all_the_same(passing: Report, tmp_path: Path) -> None:
    write_report(tmp_path / "out.html", bare(passing), Bundle(TINY), ENVIRONMENT, "toolkit verify \udcff")
    assert "toolkit verify \\udcff" in (tmp_path / "out.html").read_text("utf-8")


def test_no_torch_is_needed() -> None:
    code = "import sys; sys.modules['torch'] = None; import toolkit.report"
    subprocess.run([sys.executable, "-c", code], check=True)


# What is on it


def test_the_verdict_stands_on_top(passing: Report, failing: Report, untried: Report) -> None:
    words = {}
    for report in map(bare, (passing, failing, untried, replace(passing, rungs=passing.rungs[:-1]))):
        page = page_of(report)
        (verdict,) = [element for element in page.all("p") if element.attributes.get("class") == "verdict"]
        assert page.all("title")[0].text.startswith(verdict.text)
        assert (verdict.parent or verdict).attributes["class"] == ("good" if report.passed else "bad")
        words[module.verdict(report, "fp32")] = verdict.text
        assert module.verdict(report, "fp32") in page.all("header")[0].text
    assert [*words.values()] == ["PASS", "FAIL", "FAIL", "FAIL"]
    sentences = [*words]
    assert sentences[1].endswith("2 (graph): prefill: logits is 0.5 from the reference")
    assert sentences[2].endswith("0 (structure): encode: last_hidden_state has another type")
    assert sentences[3] == "Only 6 of 7 rungs were tried."


def test_every_rung_its_problems_and_its_cases_are_there(failing: Report, failing_page: Page) -> None:
    page = failing_page
    rows = page.table("Verdict of each rung")[1:]
    assert [row[0] for row in rows] == [f"{number} {name}" for number, name in enumerate(RUNGS)]
    assert [row[1] for row in rows] == ["pass" if rung.passed else "FAIL" for rung in failing.rungs]
    assert [row[2] for row in rows] == [f"{rung.compared:,}" for rung in failing.rungs]
    assert [row[3] for row in rows] == [rung.summary for rung in failing.rungs]
    items = {item.text for item in page.all("li")}
    assert items == {problem for rung in failing.rungs for problem in rung.problems}
    for rung in failing.rungs:
        cases = page.table(f"Cases of rung {rung.rung}")[1:]
        assert [row[0] for row in cases] == [case.label for case in rung.cases]
        assert [row[1] for row in cases] == ["pass" if case.passed else "FAIL" for case in rung.cases]
        assert [row[3] for row in cases] == ["".join(case.problems) for case in rung.cases]


def test_every_setting_is_a_row(failing: Report, failing_page: Page) -> None:
    head, *rows = failing_page.table("The first is")
    assert head[1:-1] == ["0 structure", "2 graph", "3 rollout", "4 tokens", "5 invariance"]
    assert [row[0] for row in rows] == [row.setting + row.problem for row in failing.settings]
    assert rows[0][1:-1] == ["pass", "FAIL", "–", "–", "–"]
    assert rows[1][1:-1] == ["pass"] * 5


def test_every_output_is_a_row_with_the_tolerance_that_it_needed(failing: Report, failing_page: Page) -> None:
    rows = [row for row in failing_page.table("Every output")[2:] if len(row) > 1]
    assert [row[0] for row in rows] == [result.tensor for result in failing.tensors]
    assert [row[1] for row in rows] == ["pass" if result.passed else "FAIL" for result in failing.tensors]
    first, off, odd, none = failing.tensors[:4]
    assert rows[0][2:8] == [
        f"{first.own_error:.2e}",
        f"{first.error:.2e}",
        f"{first.ratio:.2f}",
        f"{first.tolerance:.2e}",
        f"{first.error:.2e}",
        f"{first.error / first.scale:.2e}",
    ]
    assert rows[1][6:9] == ["5.00e-01", f"{0.5 / off.scale:.2e}", "B=3 S=7 T=4"]
    assert rows[2][3:5] + rows[2][6:8] == ["NaN", "NaN", "none", "none"]
    assert math.isnan(odd.error)
    assert rows[3][3:5] + rows[3][6:8] == ["infinite", "infinite", "none", "none"]
    assert rows[3][8] == f"{none.worst} (nothing was compared)"


def test_every_difference_is_shown_the_real_ones_first(failing: Report, failing_page: Page, passing_page: Page) -> None:
    page = failing_page
    shown = [item for item in page.all("details") if item.attributes.get("class") == "difference"]
    kinds = [next(part.text for part in item.parts if isinstance(part, Element)) for item in shown]
    assert len(shown) == len(failing.differences)
    assert ["real difference" in kind for kind in kinds] == [True] * 13 + [False]
    assert "tie within error second" in kinds[-1]
    assert ["open" in item.attributes for item in shown] == [True] * module.SHOWN + [False] * 4
    for text in ("source of first", "1.25", "3e-05", "▁old", "-0.25000", "-2.25000", "7 8 9"):
        assert text in shown[0].text
    assert [mark.text for mark in page.all("mark") if shown[0] in ancestors(mark)] == ["old", "new", "8", "5"]
    assert not passing_page.all("mark")


def test_a_shorter_output_ends_where_the_other_goes_on(passing: Report) -> None:
    shorter = difference("short", expected_text="the old house", found_text="the old", found=[7], runtime_top=[])
    respelt = difference("respelt", found_text="the old house")
    page = page_of(replace(bare(passing), differences=[shorter, respelt]))
    assert [mark.text for mark in page.all("mark")] == ["house", "ends here", "8", "ends here", "8", "5"]
    text = page.all("body")[0].text
    assert text.count("none: its output has ended") == 1
    assert text.count("The words are the same") == 1


@pytest.mark.parametrize(
    ("text", "other", "expected"),
    [
        ("one two three", "one too three", ("one ", "two", " three")),
        ("one two", "one two three", ("one two", "", "")),
        ("one two three", "one two", ("one two ", "three", "")),
        ("上海很大。", "上海不大。", ("上海", "很", "大。")),
        ("walk", "walking", ("", "walk", "")),
        ("مرحبا بكم في بيتنا", "مرحبا بكم في منزلنا", ("مرحبا بكم في ", "بيتنا", "")),
        ("same", "same", ("same", "", "")),
        ("", "x", ("", "", "")),
    ],
)
def test_a_text_is_marked_where_it_parts_from_the_other(text: str, other: str, expected: tuple[str, str, str]) -> None:
    assert marked(text, other) == Marked(*expected)
    assert "".join(marked(text, other)) == text


def test_a_lower_precision_shows_its_figures_and_limits(passing: Report) -> None:
    figures = [
        Figure(name="token_agreement", value=0.5, limit=0.97, at_least=True, reason="share of positions"),
        Figure(name="kl_mean", value=0.001, limit=0.01, at_least=False, reason="mean divergence"),
    ]
    report = replace(bare(passing), figures=figures, drift=[0.5])
    page = page_of(report, in_precision("int8"))
    rows = page.table("What the bundle is judged by")[1:]
    assert [row[:4] for row in rows] == [
        ["token_agreement", "FAIL", "0.5", "at least 0.97"],
        ["kl_mean", "pass", "0.001", "at most 0.01"],
    ]
    assert [row[4] for row in rows] == ["share of positions", "mean divergence"]
    assert "Figures of a lower precision" in page.source
    assert "First above tolerance" not in page.source
    assert "limits of its precision, int8" in module.verdict(passing, "int8")
    exact = page_of(replace(report, figures=[], thresholds={}))
    assert "First above tolerance at position 0" in exact.source
    assert "lower precision" not in exact.source


def test_the_explanation_and_how_to_repeat_it_are_there(
    failing: Report, failing_page: Page, passing_page: Page
) -> None:
    page = failing_page
    assert failing.explanation is not None
    assert failing.explanation.sentence in page.all("header")[0].text
    assert page.all("pre")[0].text == COMMAND
    assert page.table("Environment") == [[name, value] for name, value in ENVIRONMENT.items()]
    digests = {row[0]: row[1] for row in page.table("Weights and recorded exam")}
    assert set(digests) == {"weights.bin", "golden/exam.json", "golden/exam.npz"}
    passport = Bundle(TINY).passport
    assert all(passport.files[name].sha256 in digests[name] for name in digests)
    assert dict(row for row in page.table("Bundle"))["precision"] == "fp32"
    assert "leave tolerance" not in passing_page.source


def test_modules_are_drawn_where_there_are_some_and_caches_elsewhere(
    failing: Report, failing_page: Page, passing_page: Page
) -> None:
    assert failing.explanation is not None
    labels = [svg.attributes["aria-label"].partition(":")[0] for svg in failing_page.all("svg")]
    assert labels[1:] == ["prefill, 1 of 2", "prefill, 2 of 2", "step, 1 of 2", "step, 2 of 2"]
    assert "NaN" in failing_page.picture("step, 2 of 2").text
    assert "NaN" not in failing_page.picture("step, 1 of 2").text
    rows = failing_page.table("What each module gives")[1:]
    assert [row[1] for row in rows] == [item.module for item in failing.explanation.modules]
    assert [row[2] for row in rows].count("FAIL") == sum(not item.passed for item in failing.explanation.modules)
    assert "cross-attention keys" in passing_page.picture("Errors of 10 caches").text
    assert ", 2 of them out" in Page(cache_chart(failing.tensors, exact=True)).all("svg")[0].attributes["aria-label"]


def test_every_number_of_a_report_may_be_none(failing: Report) -> None:
    short = replace(failing, explanation=explanation(2))
    for odd in NO_NUMBERS:
        page = page_of(with_every(short, odd))
        check_alone(page)
        assert module.number(odd) in page.all("main")[0].text


def test_positions_without_a_number_are_named() -> None:
    found = odd_positions([math.nan, 1.0, math.inf, math.inf, math.nan])
    assert found == ["NaN at 0", "infinite from 2 to 3", "NaN at 4"]


# Texts


HOSTILE = "</td></style><script>alert('x')</script> & \"<img src=x onerror=alert(1)>\" {{ 7 * 7 }} {% raw %} שלום"


def with_every(value: Any, new: str | float) -> Any:
    """`value` with `new` for everything inside that is of its kind, keys left alone."""
    if type(value) is type(new):
        return new
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return replace(value, **{name: with_every(item, new) for name, item in fields.items()})
    if isinstance(value, list | tuple):
        return type(value)(with_every(item, new) for item in value)
    if isinstance(value, dict):
        return {key: with_every(item, new) for key, item in value.items()}
    return value


def texts(report: Report, text: str) -> Report:
    """`report` with `text` for all that is no name of a tensor, a graph, a rung or a module."""
    changed: Report = with_every(bare(report), text)
    named = [replace(rung, name=name) for rung, name in zip(changed.rungs, RUNGS, strict=True)]
    tensors = [replace(result, worst=text) for result in report.tensors]
    return replace(changed, rungs=named, tensors=tensors, explanation=Explanation(sentence=text, modules=[]))


def test_a_text_is_never_more_than_a_text(failing: Report) -> None:
    pages = [Page(render_report(texts(failing, text), Bundle(TINY), {text: text}, text)) for text in (HOSTILE, "plain")]
    hostile, plain = ([element.tag for element in page.elements] for page in pages)
    assert hostile == plain
    check_alone(pages[0])
    assert pages[0].source.count("<script") == 0
    holders = [element for element in pages[0].elements if HOSTILE[:9] in element.own_text]
    assert len(holders) > 100
    assert not [holder.tag for holder in holders if not holder.isolated]
    whole = [holder for holder in holders if HOSTILE in holder.text]
    assert len(whole) > 100
    assert "49" not in pages[0].all("pre")[0].text
