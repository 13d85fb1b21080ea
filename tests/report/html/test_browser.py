"""The page in a real browser: it draws, follows its checkboxes, fits a phone, and reports no error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.records.comparison import Comparison
from ampcompare.report.formats import FORMATS

pytestmark = pytest.mark.integration  # a browser is started

pytest.importorskip("jinja2", reason="the page needs the extra html")
pytest.importorskip("plotly", reason="the page needs the extra html")

ARMS = ["fp32", "apex:O2", "native:bf16", "half"]
VISIBLE = """Object.fromEntries(Array.from(document.querySelectorAll("[data-figure]"), (place) => [
    place.dataset.figure,
    place.data.filter((trace) => trace.meta && trace.visible !== false).map((trace) => trace.meta.arm)]))"""
SIZES = """({page: document.documentElement.scrollWidth, screen: document.documentElement.clientWidth,
    plots: Array.from(document.querySelectorAll(".plot .svg-container"), (e) => e.getBoundingClientRect().width)})"""
PAPER = "getComputedStyle(document.querySelector('section')).backgroundColor"
INK = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"


@pytest.fixture(scope="module")
def path(make_rich: Callable[..., Comparison], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of four arms, one diverged."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(FORMATS["html"].reporter().render(make_rich(ARMS, diverging=["half"])), encoding="utf-8")
    return path


@pytest.fixture
def quiet(chromium: Any, path: Path) -> Any:
    """The browser; the test fails if anything was reported or loaded."""
    yield chromium
    assert chromium.errors == []
    assert {address.partition(":")[0] for address in chromium.requests} <= {"file", "data", "blob"}
    assert [address for address in chromium.requests if address.startswith("file:")] == [path.as_uri()]


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_and_is_drawn(quiet: Any, path: Path, tmp_path: Path, width: int, dark: bool) -> None:
    """On a phone and a desktop, light and dark, every figure is drawn inside the page, which never scrolls sideways."""
    quiet.open(path, width=width, dark=dark)
    sizes = quiet.value(SIZES)
    assert sizes["page"] <= sizes["screen"] == width
    assert len(sizes["plots"]) == 10
    assert all(200 < plot < width for plot in sizes["plots"])
    assert quiet.value(PAPER) == ("rgb(23, 28, 36)" if dark else "rgb(255, 255, 255)")
    assert len(quiet.screenshot(tmp_path / "page.png")) > 50_000


def test_a_checkbox_switches_an_arm_in_all_figures(quiet: Any, path: Path) -> None:
    """A click takes every trace of an arm out of every figure, and a second one brings all of them back."""
    quiet.open(path)
    before = quiet.value(VISIBLE)
    assert {key for key, arms in before.items() if 1 not in arms} == set()
    quiet.click('input[name="arm"][value="1"]')
    after = quiet.value(VISIBLE)
    assert after == {key: [arm for arm in arms if arm != 1] for key, arms in before.items()}
    assert after != before
    assert quiet.value("document.getElementById('count').textContent") == "3 of 4"
    quiet.click('input[name="arm"][value="1"]')
    assert quiet.value(VISIBLE) == before
    quiet.click('[data-choose="none"]')
    assert set(map(len, quiet.value(VISIBLE).values())) == {0}
    quiet.click('[data-choose="all"]')
    assert quiet.value(VISIBLE) == before


def test_keys_alone_switch_arms(quiet: Any, path: Path) -> None:
    """Tab reaches each arm's box, which is named by its arm, and the space bar switches it."""
    quiet.open(path)
    quiet.value("document.querySelector('[data-choose=\"none\"]').focus()")
    quiet.press("Tab", "Tab")
    assert quiet.value("document.activeElement.labels[0].textContent.trim()") == "fp32"
    quiet.press(" ", "Space", " ")
    assert 0 not in quiet.value(VISIBLE)["accuracy"]
    assert quiet.value("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_themes_follow_the_switch(quiet: Any, path: Path) -> None:
    """The switch beats the system's scheme, figures change with it, and the choice is kept."""
    quiet.open(path, dark=False)
    light = quiet.value(INK)
    quiet.value("document.querySelector('[value=\"dark\"]').click()")
    assert quiet.value(PAPER) == "rgb(23, 28, 36)"
    assert quiet.value(INK) != light
    quiet.open(path, dark=False)
    assert quiet.value(PAPER) == "rgb(23, 28, 36)"
    quiet.value("document.querySelector('[value=\"auto\"]').click()")
    assert quiet.value(PAPER) == "rgb(255, 255, 255)"


def test_a_loss_can_be_logarithmic(quiet: Any, path: Path) -> None:
    """The box beside a loss changes the axis of that figure alone."""
    quiet.open(path)
    kind = "document.querySelector('[data-figure=\"{}\"]')._fullLayout.yaxis.type"
    quiet.click('[data-log="training-loss"]')
    assert quiet.value(kind.format("training-loss")) == "log"
    assert quiet.value(kind.format("validation-loss")) == "linear"


def test_a_figure_can_be_saved(quiet: Any, path: Path) -> None:
    """The policy of the page still lets plotly.js make a PNG of a figure."""
    quiet.open(path)
    image = quiet.value("Plotly.toImage(document.querySelector('.plot'), {format: 'png'})")
    assert image.startswith("data:image/png;base64,")


def test_without_scripts_the_tables_stay(chromium: Any, path: Path) -> None:
    """With JavaScript off, tables and words are there and empty figures and dead controls are not."""
    chromium.open(path, script=False)
    text = chromium.call("DOM.getDocument", depth=0)["root"]["nodeId"]
    counts = {}
    for selector in ("table", ".plot", ".chip"):
        nodes = chromium.call("DOM.querySelectorAll", nodeId=text, selector=selector)["nodeIds"]
        counts[selector] = sum(_has_box(chromium, node) for node in nodes)
    assert counts[".plot"] == counts[".chip"] == 0
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


def test_hostile_names_stay_text_in_the_browser(
    chromium: Any, make_rich: Callable[..., Comparison], tmp_path: Path
) -> None:
    """Markup in a name of an arm is drawn letter by letter, on axes too, and nothing of it runs."""
    name = "<b onclick=x>half</b><script>window.broken = 1</script>"
    path = tmp_path / "report.html"
    path.write_text(FORMATS["html"].reporter().render(make_rich(["fp32", name, "x" * 10_000])), encoding="utf-8")
    chromium.open(path, width=375)
    assert chromium.value("window.broken") is None
    assert chromium.value("document.querySelectorAll('b, a[onclick], [onclick]').length") == 0
    names = chromium.value(
        "Array.from(document.querySelectorAll('[data-figure=memory] .ytick text'), (e) => e.textContent)"
    )
    assert names[1].startswith("<b onclick=x>half")
    assert chromium.value(SIZES)["page"] == 375
    assert chromium.errors == []


def test_a_hundred_arms_stay_usable(chromium: Any, make_rich: Callable[..., Comparison], tmp_path: Path) -> None:
    """With 100 arms twelve are drawn at first, and switching one takes less than opening the page did."""
    path = tmp_path / "report.html"
    comparison = make_rich([f"half:loss_scale={number}" for number in range(1, 101)], 10)
    path.write_text(FORMATS["html"].reporter().render(comparison), encoding="utf-8")
    chromium.open(path)
    assert len(set(chromium.value(VISIBLE)["memory"])) == 12
    took = chromium.value(
        "(() => { const begin = performance.now(); document.querySelectorAll('input[name=arm]')[40].click();"
        " return performance.now() - begin })()"
    )
    assert took < chromium.value("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 40 in chromium.value(VISIBLE)["memory"]
    assert chromium.errors == []
