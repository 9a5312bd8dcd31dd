"""Errors as pictures: every number has its place, and what is none breaks nothing."""

import math

import matplotlib as mpl
import pytest
from page_support import Page, explanation

from runtime.parity.report import ModuleResult, TensorResult
from toolkit.charts import BAD, NAME, ROWS, cache_chart, drift_chart, first_above, module_charts, span, units

NO_NUMBERS = [math.nan, math.inf, -math.inf]


def test_every_module_has_its_name_and_a_picture_fits_on_a_page() -> None:
    modules = explanation(ROWS + 1).modules
    pictures = module_charts(modules)
    drawn = "".join(svg for _, svg in pictures)
    assert len(pictures) == 4
    assert all(f">{item.module}<" in drawn for item in modules)


@pytest.mark.parametrize("name", ["<b>" * 40, "$x_1$", "模块", "x" * 200])
def test_a_name_is_a_text(name: str) -> None:
    ((_, svg),) = module_charts([ModuleResult(graph="step", module=name, error=1.0, tolerance=2.0)])
    page = Page(svg)
    assert not page.all("b")
    shown = [item.text.removeprefix("...") for item in page.all("text")]
    assert name.encode("ascii", "backslashreplace").decode()[3 - NAME :] in shown


@pytest.mark.parametrize("odd", NO_NUMBERS)
@pytest.mark.parametrize("exact", [True, False])
def test_what_is_no_number_breaks_no_picture(odd: float, *, exact: bool) -> None:
    values = [odd, 0.0, 1e-300, 1e300, 1.0]
    result = TensorResult(
        graph="step", tensor="present.0.decoder.key", own_error=1e-6, error=odd, tolerance=odd, worst="x", compared=1
    )
    drawn = [
        drift_chart(values, values[::-1], 1e-5, exact=exact),
        drift_chart([odd], [odd], odd, exact=exact),
        cache_chart([result], exact=exact),
        *(svg for _, svg in module_charts([ModuleResult(graph="g", module="m", error=odd, tolerance=odd)])),
    ]
    for svg in drawn:
        page = Page(svg)
        coordinates = [
            text for item in page.elements for name, text in item.attributes.items() if name in ("d", "x", "y")
        ]
        assert coordinates
        assert not [text for text in coordinates if "nan" in text or "inf" in text]
    assert "NaN or infinite" in drawn[0]
    assert "NaN or infinite" not in drift_chart([1e-6], [1e-6], 1e-5, exact=exact)


def test_the_ring_is_around_the_first_number_above_tolerance() -> None:
    assert first_above([math.nan, 1.0, math.inf, 3.0], 2.0) == 3
    assert first_above([1.0, math.inf], 2.0) is None
    asked = [([1e-6, 1.0], True), ([1e-6, 1.0], False), ([1e-6, 0.0], True)]
    assert [BAD in drift_chart(errors, [1e-6], 1e-5, exact=exact) for errors, exact in asked] == [True, False, False]


def test_errors_are_in_units_of_what_is_earned() -> None:
    assert units(3.0, 2.0) == 1.5
    assert (units(0.0, 0.0), units(1.0, 0.0)) == (0.0, math.inf)
    assert all(math.isnan(units(1.0, odd)) for odd in NO_NUMBERS)


def test_an_axis_has_room_for_all_that_has_a_place() -> None:
    ends = span([2e-6, 0.0, 5.0, math.nan, math.inf])
    assert ends.low == pytest.approx(1e-6)
    assert 10 < ends.high < 100
    assert ends.place(math.nan) == ends.place(math.inf) == ends.high
    assert ends.place(0.0) == ends.low
    assert ends.place(0.5) == 0.5
    assert ends.place(1e300) == ends.high


def test_pictures_leave_the_settings_of_others_alone() -> None:
    with mpl.rc_context({"axes.linewidth": 9, "svg.hashsalt": "theirs"}):
        before = dict(mpl.rcParams)
        drift_chart([1e-6], [1e-6], 1e-5, exact=True)
        assert dict(mpl.rcParams) == before
