"""The page in a real browser: it draws, follows its checkboxes, fits a phone, and reports no error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.results.records.comparison import Comparison
from ampcompare.results.report.base import FORMATS

pytestmark = pytest.mark.integration  # a browser is started

pytest.importorskip("jinja2", reason="the page needs the extra html")

ARMS = ["fp32", "apex:O2", "native:bf16", "half"]
DRAWN = ".picture:not([hidden])"
VISIBLE = f"""Object.fromEntries(Array.from(document.querySelectorAll("[data-figure]"), (place) => [
    place.dataset.figure,
    Array.from(place.querySelectorAll("{DRAWN} g[data-arm]:not(.off)"), (group) => Number(group.dataset.arm))]))"""
SIZES = f"""({{page: document.documentElement.scrollWidth, screen: document.documentElement.clientWidth,
    plots: Array.from(document.querySelectorAll("{DRAWN} > .frame, .track"), (it) => it.clientWidth)}})"""
PAPER = "getComputedStyle(document.querySelector('section')).backgroundColor"


@pytest.fixture(scope="module")
def path(make_rich: Callable[..., Comparison], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of four arms, one diverged."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(
        FORMATS["html"].make_reporter().render(make_rich(ARMS, diverging=["half"])), encoding="utf-8"
    )
    return path


@pytest.fixture
def quiet(chromium: Any, path: Path) -> Any:
    """The browser; the test fails if anything was reported or loaded."""
    yield chromium
    assert chromium.errors == []
    assert {address.partition(":")[0] for address in chromium.requests} <= {"file", "data", "blob"}
    assert [address for address in chromium.requests if address.startswith("file:")] == [path.as_uri()]


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)], ids=["dark phone", "light desktop"])
def test_the_page_fits_and_is_drawn(quiet: Any, path: Path, width: int, dark: bool) -> None:
    """On a phone and a desktop, light and dark, every figure is drawn inside the page, which never scrolls sideways."""
    quiet.open(path, width=width, dark=dark)
    sizes = quiet.value(SIZES)
    assert sizes["page"] <= sizes["screen"] == width
    # charts, and lines of the plots of differences, memory and valid step times
    assert len(sizes["plots"]) == 7 + 12
    assert all(100 < plot < width for plot in sizes["plots"])
    assert quiet.value(PAPER) == ("rgb(23, 28, 36)" if dark else "rgb(255, 255, 255)")
    assert len(quiet.screenshot()) > 40_000  # an empty screen has 6,000


def test_a_chart_switches_alone(quiet: Any, path: Path) -> None:
    """Differences come first and lack the reference; the switch draws the values of all arms, and those below the
    pointer are read; a loss has a logarithmic axis too.
    """
    quiet.open(path)
    assert set(quiet.value(VISIBLE)["accuracy"]) == {1, 2}
    quiet.click('[data-show="accuracy"]:nth-child(2)')
    assert set(quiet.value(VISIBLE)["accuracy"]) == {0, 1, 2}
    shown = f"document.querySelector('[data-figure=accuracy] {DRAWN} .axes').innerText"
    assert quiet.value(shown).startswith("top-1 %")
    quiet.value(
        "(() => { const it = document.querySelector('[data-figure=accuracy]'), frame = it.querySelector("
        f"'{DRAWN} .frame').getBoundingClientRect(); it.dispatchEvent(new PointerEvent('pointermove', "
        "{clientX: frame.left + 1, clientY: frame.top + 9})) })()"
    )
    readout = quiet.value("document.querySelector('[data-figure=accuracy] .readout').innerText").split()
    assert readout[:5] == ["epoch", "1", "fp32", "49.90", "%"]
    marks = f"[data-figure={{}}] {DRAWN} .tick"
    ticks = f"Array.from(document.querySelectorAll('{marks}'), (tick) => tick.textContent)"
    names = ("validation-loss", "training-loss")
    before = [quiet.value(ticks.format(name)) for name in names]
    quiet.click('[data-show="validation-loss"]:last-child')
    after = [quiet.value(ticks.format(name)) for name in names]
    assert (before[0] != after[0], before[1] == after[1]) == (True, True)
    assert {"0.5", "1"} <= set(after[0])


def test_a_checkbox_switches_an_arm_in_all_figures(quiet: Any, path: Path) -> None:
    """A click takes every trace of an arm out of every figure, and a second one brings all of them back."""
    quiet.open(path)
    before = quiet.value(VISIBLE)
    assert {key for key, arms in before.items() if 1 not in arms} == set()
    assert len(before) == 7
    quiet.click('input[name="arm"][value="1"]')
    after = quiet.value(VISIBLE)
    assert after == {key: [arm for arm in arms if arm != 1] for key, arms in before.items()}
    assert after != before
    quiet.click('input[name="arm"][value="1"]')
    assert quiet.value(VISIBLE) == before
    quiet.click('[data-choose="none"]')
    assert set(map(len, quiet.value(VISIBLE).values())) == {0}
    quiet.click('[data-choose="all"]')
    assert quiet.value(VISIBLE) == before


def test_without_scripts_the_tables_stay(chromium: Any, path: Path) -> None:
    """With JavaScript off, tables, words and figures are there, and dead controls are not."""
    chromium.open(path, script=False)
    text = chromium.call("DOM.getDocument", depth=0)["root"]["nodeId"]
    counts = {}
    for selector in ("table", ".plot", ".chip", ".track"):
        nodes = chromium.call("DOM.querySelectorAll", nodeId=text, selector=selector)["nodeIds"]
        counts[selector] = sum(_has_box(chromium, node) for node in nodes)
    assert counts[".chip"] == 0
    assert (counts[".plot"], counts[".track"]) == (7, 12)
    assert counts["table"] >= 2


def _has_box(chromium: Any, node: int) -> bool:
    resolved = chromium.call("DOM.resolveNode", nodeId=node)["object"]["objectId"]
    found = chromium.call(
        "Runtime.callFunctionOn",
        objectId=resolved,
        functionDeclaration="function () { return this.getClientRects().length > 0 }",
        returnByValue=True,
    )
    return bool(found["result"]["value"])
