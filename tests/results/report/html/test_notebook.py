"""Results in notebooks: text and HTML, without scripts, in the notebook's colors, and their pictures of curves."""

import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import ampcompare
from ampcompare.base.notebook_display import ShownInNotebook
from ampcompare.results.records.comparison import Comparison, read_comparison
from ampcompare.results.records.diagnosis import Diagnosis, Fault, OperationPlace
from ampcompare.results.report.base import Format
from ampcompare.results.report.html.charts import HIGH, WIDE, Chart, ChartView, Picture
from ampcompare.results.report.html.notebook import scoped_page_style
from tests.results.report.html.test_html import Page

pytest.importorskip("jinja2")
STORED = Path(__file__).parent.parent / "schema_2.json"
VOID = {"meta", "br", "input"}


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """The stored report of the present schema."""
    return read_comparison(STORED)


@pytest.fixture(scope="module")
def results(comparison: Comparison) -> dict[str, ShownInNotebook]:
    """One result of each kind."""
    place = OperationPlace(module="cube", operation="pow", where="net.py:3", phase="forward")
    fault = Fault(kind="overflow", place=place, step=0, text="cube pow is <not> finite")
    script = Path(__file__).parents[4] / "examples" / "apex_digits" / "train.py"
    return {
        "comparison": comparison,
        "record": comparison.records[0],
        "diagnosis": Diagnosis(
            arm="apex:O2", verdict="overflow in <cube>", steps=1, observed=[0], faults=[fault]
        ),
        "explanation": ampcompare.explain_arm("O2"),
        "lint": ampcompare.lint_paths(script),
        "migration": ampcompare.migrate_script(script),
    }


def test_every_result_shows_itself(results: dict[str, ShownInNotebook]) -> None:
    """Each result is text and self-contained HTML: well formed, no script, no event, nothing loaded."""
    for name, result in results.items():
        bundle = result._repr_mimebundle_()
        assert set(bundle) == {"text/plain", "text/html"}, name
        html = bundle["text/html"]
        assert html == result._repr_html_()
        parser = Page(html)
        assert not parser.open, name
        tags = {tag for tag, _ in parser.elements}
        assert not {"script", "link", "img", "iframe", "object", "body", "html"} & tags, name
        used = {key for _, attributes in parser.elements for key in attributes}
        assert not {key for key in used if key.startswith("on") or key in ("src", "href")}, name
        assert "url(" not in html, name
        assert "<not>" not in html
        assert "<cube>" not in html


def test_a_comparison_has_the_figures_of_the_page(comparison: Comparison) -> None:
    """Answer, table with swatches, intervals, curves and memory are there; the text is that of the terminal."""
    bundle = comparison._repr_mimebundle_()
    html = bundle["text/html"]
    for part in (*comparison.headline[:1], 'class="track"', "Training loss", "Peak memory", 'class="swatch'):
        assert part.replace("'", "&#39;") in html, part
    assert re.search(r'<path class="line [^"]*" d="M\d+ \d+l', html)
    assert bundle["text/plain"].startswith(comparison.headline[0])
    assert "--details" not in bundle["text/plain"]


class _Sanitized(HTMLParser):
    """The text that JupyterLab shows of an output that it does not trust.

    Its sanitizer drops styles, drops the elements of SVG, leaves their text, and keeps `hidden` where it has a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[bool] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.hidden.append(tag == "style" or bool(dict(attrs).get("hidden")))
        if tag in ("p", "td", "th", "h3", "figcaption"):
            self.text += "\n"

    def handle_endtag(self, tag: str) -> None:
        self.hidden.pop()

    def handle_data(self, data: str) -> None:
        if not any(self.hidden):
            self.text += data


def test_an_output_that_is_not_trusted_stays_readable(
    results: dict[str, ShownInNotebook], comparison: Comparison
) -> None:
    """Without style and SVG no labels of figures are left behind, words stay apart, and a line says what is missing."""
    shown = {}
    for name, result in results.items():
        parser = _Sanitized()
        parser.feed(result._repr_html_() or "")
        shown[name] = parser.text
    for name in ("comparison", "record", "diagnosis"):
        assert "this notebook is not trusted" in shown[name], name
    assert "not trusted" not in shown["lint"]
    assert "seed 0:" not in shown["comparison"]
    assert not re.search(
        r"Training loss|bf16\s+fp16\s+-30|not finite\. Amber", shown["comparison"] + shown["diagnosis"]
    )
    assert " \u00b7 " in shown["comparison"]
    assert "native:fp16 \u00b7 " in shown["explanation"]
    assert comparison.arms[1].arm in shown["comparison"]


def test_without_jinja2_the_text_remains(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain installation shows text, and how to get figures; `_repr_html_` is then None, which IPython skips."""
    monkeypatch.setattr(Format, "missing_packages", ["jinja2"])
    assert comparison._repr_html_() is None
    bundle = comparison._repr_mimebundle_()
    assert set(bundle) == {"text/plain"}
    assert 'pip install "ampcompare[html]"' in bundle["text/plain"]
    assert ampcompare.explain_arm("bf16")._repr_html_() is None


def test_the_style_stays_inside() -> None:
    """No rule reaches what is outside of the output, and colors follow the notebook before the system."""
    style = re.sub(r"/\*.*?\*/", "", scoped_page_style(), flags=re.DOTALL)
    assert style.count("{") == style.count("}")
    depth, start, heads = 0, 0, []
    for at, char in enumerate(style):
        if char == "{":
            heads += [style[start:at].strip()] if depth == 0 else []
            depth += 1
        elif char == "}":
            depth -= 1
            start = at + 1
    assert all(
        ".ampcompare-view" in head or head.startswith("@media (prefers-color-scheme") for head in heads
    )
    assert ":root" not in "".join(heads)
    light, dark = style.index('[data-jp-theme-light="true"]'), style.index('[data-jp-theme-light="false"]')
    assert style.index("prefers-color-scheme") < light < dark


def _picture(**view: Any) -> Picture:
    series = view.pop(
        "series", [{"a": 0, "x": [0, 1, 2], "y": [1.0, 3.0, 2.0], "lo": [0.5, 2, 1], "hi": [2, 4, 3]}]
    )
    return Chart("loss", "Loss", "", "epoch", [ChartView("", "loss", series, **view)]).pictures[-1]


def _points(path: str) -> list[tuple[int, int]]:
    """Return the points of a path of relative lines."""
    numbers = [int(one) for one in re.findall(r"-?\d+", path)]
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return list(itertools.accumulate(pairs, lambda one, move: (one[0] + move[0], one[1] + move[1])))


def test_a_picture_lies_in_its_frame() -> None:
    """Curves, their bands and marks lie inside; whole numbers alone are marked on an axis that counts."""
    picture = _picture(signed=True)
    (drawn,) = picture.drawn
    points = [*_points(drawn.line), *_points(drawn.band)]
    assert all(0 <= x <= WIDE and 0 <= y <= HIGH for x, y in points)
    assert len(points) == 3 + 6
    assert points[0][0] == 0
    assert points[1][1] < points[2][1] < points[0][1]  # counted from the top
    assert picture.x_ticks == [(0, "0"), (50, "1"), (100, "2")]
    assert "+2" in [text for _, text in picture.y_ticks]
    assert picture.zero is not None


@pytest.mark.parametrize(
    ("base", "y", "mark"), [(2, [65536, 128], "2¹⁶"), (10, [1.5, 0.375], "0.5"), (10, [1e-3, 10], "0.01")]
)
def test_a_logarithmic_axis_has_powers(base: int, y: list[float], mark: str) -> None:
    """It is marked by powers, and by numbers between them where they are few; a stair stays level between two steps."""
    picture = _picture(series=[{"a": 1, "x": [0, 10], "y": y, "step": 1}], log=base)
    assert mark in [text for _, text in picture.y_ticks]
    points = _points(picture.drawn[0].line)
    assert len(points) == 3
    assert points[0][1] == points[1][1]


def test_single_points_and_stops_are_drawn() -> None:
    """A single value is a point, an arm that diverged may leave the frame, and its cross stays at the edge."""
    series = [
        {"a": 0, "x": [1], "y": [2.0], "yr": [(1.0, 3.0)]},
        {"a": 1, "x": [1, 2], "y": [2.0, 1e9], "out": 1},
    ]
    stops = [{"a": 1, "x": [2], "y": [1e9], "text": ["seed 0 diverged at step 5"]}]
    picture = _picture(series=series, stops=stops)
    alone, lost = picture.drawn
    assert alone.line == ""
    assert alone.at is not None
    assert alone.at[1] == 50
    ((x1, low, x2, high),) = alone.ranges
    assert x1 == x2 == alone.at[0]
    assert low > 50 > high
    assert min(y for _, y in _points(lost.line)) < 0
    ((at, arm, text),) = picture.stops
    assert (at[1], arm, text) == (0, 1, "seed 0 diverged at step 5")


@pytest.mark.integration
@pytest.mark.slow
def test_results_are_shown_without_torch() -> None:
    """To show a stored comparison imports neither torch nor IPython."""
    code = (
        "import sys, ampcompare\n"
        f"ampcompare.load_comparison({str(STORED)!r})._repr_mimebundle_()\n"
        "print(sorted({'torch', 'IPython', 'numpy.random'} & set(sys.modules) - {'numpy.random'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
