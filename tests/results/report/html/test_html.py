"""What the page says, that it is one harmless file, and that it holds many records."""

import json
import math
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import BackendUnavailable
from ampcompare.results.records.comparison import ArmSummary, Comparison, NextStep
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.base import FORMATS, log_addresses_by_cell, write_reports
from ampcompare.results.report.html.costs import step_time_plot
from ampcompare.results.report.html.learning_curves import learning_charts
from ampcompare.results.report.html.runs import arms_with_runs
from ampcompare.results.report.terminal import Terminal
from ampcompare.testing import make_comparison, make_record

pytest.importorskip("jinja2", reason="the page needs the extra html")

MakeRich = Callable[..., Comparison]
LARGEST = 120_000
VOID = {"meta", "input", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """The elements of a page, its visible text, and what it would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.shown.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def page(comparison: Comparison) -> Page:
    """Render and parse."""
    parsed = Page(FORMATS["html"].make_reporter().render(comparison))
    assert parsed.open == []
    return parsed


def series(parsed: Page, key: str, view: int = 0) -> list[dict[str, Any]]:
    """The curves of a chart, none where it is not drawn; each has its positions on the horizontal axis."""
    chart = next((found for found in parsed.data["charts"] if found["key"] == key), None)
    if chart is None:
        return []
    return [{**one, "x": parsed.data["positions"][one["x"]]} for one in chart["views"][view]["series"]]


@pytest.fixture(scope="module")
def rich(make_rich: MakeRich) -> Comparison:
    """Four arms, one of which diverges in every seed."""
    return make_rich(["fp32", "apex:O2", "native:bf16", "half"], diverging=["half"])


def test_the_page_is_one_file_that_loads_nothing(rich: Comparison) -> None:
    """No element, style or policy lets the page ask for anything; it is smaller than 200 kB and reproducible."""
    text = FORMATS["html"].make_reporter().render(rich)
    assert len(text.encode()) < LARGEST
    assert FORMATS["html"].make_reporter().render(rich) == text
    parsed = Page(text)
    loading = ("src", "href", "srcset", "data", "action", "poster", "background")
    targets = [
        value for _, attributes in parsed.elements for name, value in attributes.items() if name in loading
    ]
    assert targets
    assert all((value or "").startswith("#") for value in targets)
    assert not {tag for tag, _ in parsed.elements} & {"link", "iframe", "img", "object", "embed", "base"}
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(
        a["content"] for tag, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]


def test_the_answer_is_the_title(rich: Comparison) -> None:
    """The first sentence of the headline is the title and the only h1; the others follow, then commands to paste."""
    steps = [NextStep(command="ampcompare compare --seeds 0-4", why="Two more seeds.")]
    text = (
        FORMATS["html"]
        .make_reporter()
        .render(rich.model_copy(update={"headline": ["Use <half>.", "It is fast."], "next_steps": steps}))
    )
    assert "<title>Use &lt;half&gt;. - ampcompare</title>" in text
    assert re.findall("<h1>(.*)</h1>", text) == ["Use &lt;half&gt;."]
    assert text.index("<h1>") < text.index('<p class="lead">It is fast.</p>') < text.index("Two more seeds.")
    assert "<pre>ampcompare compare --seeds 0-4</pre>" in text


def test_a_warning_stands_above_the_title(rich: Comparison) -> None:
    """What weakens the answer is read before it, and the page is still named by the answer."""
    warning = "1 record is not used; the details have the reason."
    weak = rich.model_copy(update={"headline": [warning, "Use half."], "excluded": ["a: bad"]})
    text = FORMATS["html"].make_reporter().render(weak)
    assert "<title>Use half. - ampcompare</title>" in text
    assert text.index(warning) < text.index("<h1>Use half.</h1>")


def test_a_comparison_without_a_headline_has_a_title(rich: Comparison) -> None:
    """A report of an earlier version is named by what it compares."""
    bare = rich.model_copy(update={"headline": []})
    assert "<h1>4 arms side by side</h1>" in FORMATS["html"].make_reporter().render(bare)


def test_everything_of_a_comparison_is_told_in_words(rich: Comparison) -> None:
    """Rows, engines, reading, runs, settings, environment and command are text, readable without scripts."""
    text = page(rich).text
    for row in rich.arms:
        assert row.arm in text
    assert "compat 25.05" in text
    for line in rich.reading:
        assert line in text
    assert text.count("diverged at step 14") >= 1
    assert "12 runs, one line each" in text
    for said in ("ampcompare compare --seeds 0-2", "torch 2.13.0", "lr 0.05"):
        assert said in text
    for title in ("Validation accuracy", "Time to accuracy", "Peak memory", "Loss scale", "Skipped steps"):
        assert title in text


@pytest.mark.parametrize(("steps", "length"), [(None, "5 epochs"), (40, "40 steps")])
def test_the_subtitle_has_the_length_of_the_runs(steps: int | None, length: str) -> None:
    """A limit of steps ends a run before its epochs do."""
    record = make_record()
    recipe = record.config.recipe.model_copy(update={"max_steps": steps})
    record = record.model_copy(update={"config": record.config.model_copy(update={"recipe": recipe})})
    assert f"{length} · batch 64" in page(make_comparison([record])).text


def test_only_settings_that_were_chosen_are_shown(rich: Comparison) -> None:
    """Four epochs are no default and are named beside it."""
    text = FORMATS["html"].make_reporter().render(rich)
    assert re.search(r">epochs</th><td[^>]*>4</td><td[^>]*>5</td>", text)
    assert "momentum" not in text


def test_arms_look_the_same_in_all_figures(rich: Comparison) -> None:
    """Each curve names its arm; looks are told apart by color or dash."""
    parsed = page(rich)
    looks = [(arm["color"], arm["dash"]) for arm in parsed.data["arms"]]
    assert len(set(looks)) == 4
    assert [arm["name"] for arm in parsed.data["arms"]] == [row.arm for row in rich.arms]
    drawn = {one["a"] for chart in parsed.data["charts"] for view in chart["views"] for one in view["series"]}
    assert drawn == {0, 1, 2, 3}


def test_curves_are_differences_to_the_reference(rich: Comparison) -> None:
    """The first view of the accuracy is the difference of the same seed, in points; the second is absolute."""
    parsed = page(rich)
    gaps = {one["a"]: one for one in series(parsed, "accuracy")}
    assert set(gaps) == {1, 2}
    assert gaps[1]["y"] == pytest.approx([-0.3] * 4)
    assert "lo" not in gaps[1]
    assert {one["a"] for one in series(parsed, "accuracy", 1)} == {0, 1, 2}


def test_bands_are_ranges_over_seeds(rich: Comparison, make_rich: MakeRich) -> None:
    """A line is the mean of the seeds, its band goes from the lowest to the highest, and one seed has no band."""
    (line,) = (one for one in series(page(rich), "accuracy", 1) if one["a"] == 0)
    finals = [100 * (r.summary.metric_final or 0) for r in rich.records if r.arm == "fp32"]
    assert line["y"][-1] == pytest.approx(sum(finals) / 3)
    assert (line["lo"][-1], line["hi"][-1]) == (pytest.approx(min(finals)), pytest.approx(max(finals)))
    alone = page(make_rich(["fp32", "half"], 1))
    assert not any(
        "lo" in one for chart in alone.data["charts"] for view in chart["views"] for one in view["series"]
    )


def test_equal_curves_are_named_and_not_drawn(rich: Comparison) -> None:
    """Losses that are those of the reference at every point are a sentence; the chart then shows absolute values."""
    parsed = page(rich)
    chart = next(found for found in parsed.data["charts"] if found["key"] == "validation-loss")
    assert [view["signed"] for view in chart["views"]] == [False, False]
    assert "Equal to fp32 at every point, and not drawn as a difference: apex:O2, native:bf16." in parsed.text


def test_constant_curves_are_a_sentence(rich: Comparison) -> None:
    """A loss scale that never moves, and steps that were never skipped, are words in place of an empty chart."""
    records = []
    for record in rich.records:
        assert record.trace is not None
        count = len(record.trace.steps)
        scales = [128.0] * count if record.trace.loss_scales else []
        trace = record.trace.model_copy(update={"loss_scales": scales, "skipped": [0] * count})
        records.append(record.model_copy(update={"trace": trace}))
    parsed = page(rich.model_copy(update={"records": records}))
    assert (
        "Loss scale. Constant: 128 in apex:O2. Without loss scaling: fp32, native:bf16, half." in parsed.text
    )
    assert "Skipped steps. No arm skipped a step." in parsed.text
    assert series(parsed, "loss-scale") == series(parsed, "skipped") == []


def test_a_diverged_run_shows_where_it_stopped(rich: Comparison) -> None:
    """Its loss ends in a cross at the step that diverged; where it cannot be drawn, the caption says why."""
    chart = next(
        chart for chart in learning_charts(arms_with_runs(rich), "fp32", 100) if chart.key == "training-loss"
    )
    (stops,) = chart.views[1].stops
    assert (stops["a"], stops["x"]) == (3, [14] * 3)
    assert stops["text"][1] == "seed 1 diverged at step 14"
    assert [one["a"] for one in chart.views[1].series if one.get("out")] == [3]
    parsed = page(rich)
    assert parsed.text.count("seed 1 diverged at step 14") == 3  # in each picture of the losses
    assert "Not drawn: half (diverged at step 14, before the first evaluation)." in parsed.text


def test_time_to_accuracy_counts_runs_that_reach_it(rich: Comparison) -> None:
    """The table gives epochs and seconds to 99 % of the reference's accuracy, and how many runs came so far."""
    text = page(rich).text
    target = 99 * (rich.arms[0].metric_mean or 0)
    assert f"runs that reach {float(f'{target:.4g}'):g} %" in text
    assert re.search(r"fp32 3 of 3 4 4\.08 ± 0\.08", text)
    assert "half 0 of 3 - -" in text


def _invalid(rich: Comparison, arms: Sequence[str]) -> Comparison:
    """Return the comparison with invalid times of these arms only."""
    rows = [
        row.model_copy(update={"invalid_time": "load 9.0" if row.arm in arms else ""}) for row in rich.arms
    ]
    return rich.model_copy(update={"arms": rows})


def _with_times_of(rich: Comparison, arms: Sequence[str]) -> Page:
    return page(_invalid(rich, arms))


def test_times_that_are_no_result_are_marked(rich: Comparison) -> None:
    """Each plot of times names the arms whose times are invalid or emulated; those of memory need no mark."""
    parsed = _with_times_of(rich, ["apex:O2"])
    assert parsed.text.count("Times that do not count: apex:O2 (invalid: load 9.0).") == 3
    records = [
        record.model_copy(update={"half": "bf16 emulated"}) if record.arm == "native:bf16" else record
        for record in rich.records
    ]
    assert "native:bf16 (bf16 emulated)" in page(rich.model_copy(update={"records": records})).text


def test_invalid_times_are_not_drawn(rich: Comparison) -> None:
    """A figure leaves an arm with invalid times out; where all are invalid, the reason is all that the page shows."""
    timed = {track.index for track in step_time_plot(arms_with_runs(_invalid(rich, ["apex:O2"]))).tracks}
    assert timed == {0, 2}  # a run of the last arm diverged before it had 30 timed steps
    parsed = page(_invalid(rich, [row.arm for row in rich.arms]))
    assert "Times that do not count: fp32, apex:O2, native:bf16, half (invalid: load 9.0)." in parsed.text
    assert not {"time-to-accuracy", "pareto", "drift"} & {chart["key"] for chart in parsed.data["charts"]}


def test_runs_link_to_their_logs(rich: Comparison, tmp_path: Path) -> None:
    """A run whose log is there links to it, relative to the page; others, and names that are none, have no link."""
    cell = "0123456789ab"
    (tmp_path / "a run" / "cells" / cell).mkdir(parents=True)
    (tmp_path / "a run" / "cells" / cell / "log.txt").write_text("")
    names = [cell, "ffffffffffff", "../../etc", "javascript:alert(1)"]
    records = [
        record.model_copy(update={"cell": name}) for record, name in zip(rich.records, names, strict=False)
    ]
    comparison = rich.model_copy(update={"records": records})
    links = log_addresses_by_cell(comparison, tmp_path / "a run", tmp_path)
    assert links == {cell: f"a%20run/cells/{cell}/log.txt"}
    parsed = Page(FORMATS["html"].make_reporter(logs=links).render(comparison))
    targets = [attributes["href"] for tag, attributes in parsed.elements if tag == "a"]
    assert [target for target in targets if not str(target).startswith("#")] == list(links.values())


def test_records_without_a_trace_are_still_shown(rich: Comparison) -> None:
    """Records from before there were traces have tables and the charts of their epochs; the others say what lacks."""
    old = rich.model_copy(
        update={"records": [record.model_copy(update={"trace": None}) for record in rich.records]}
    )
    parsed = page(old)
    keys = {found["key"] for found in parsed.data["charts"]}
    assert keys == {"accuracy", "validation-loss", "time-to-accuracy", "pareto"}
    assert "before runs kept a trace" in parsed.text


def test_nothing_measured_is_a_page_too() -> None:
    """Arms that never ran give dashes and words, not an error."""
    row = ArmSummary(
        arm="half",
        engine=None,
        half=None,
        lr=math.nan,
        seeds=[],
        completed=0,
        diverged=0,
        failed=0,
        status="not run",
    )
    empty = Comparison(command="", reference="fp32", seeds=[], arms=[row], reading=[], records=[])
    parsed = page(empty)
    assert parsed.data["charts"] == []
    assert "No epoch was evaluated." in parsed.text
    assert "not run" in parsed.text


def test_odd_numbers_are_shown(rich: Comparison) -> None:
    """Infinite scales and losses that are nan leave gaps in curves, and the data of the page stay strict JSON."""
    records = []
    for record in rich.records:
        assert record.trace is not None
        losses = [math.nan, math.inf, *record.trace.losses[2:]]
        trace = record.trace.model_copy(
            update={"losses": losses, "loss_scales": [math.inf, 0.0] * (len(losses) // 2)}
        )
        records.append(record.model_copy(update={"trace": trace}))
    parsed = page(rich.model_copy(update={"records": records}))
    json.loads(parsed.scripts[0], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert series(parsed, "training-loss", 1)[0]["x"][0] == 4
    assert series(parsed, "loss-scale") == []


@pytest.mark.parametrize("arms", [("fp32",), ("fp32", "apex:O2")])
@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_metrics_that_are_not_finite_have_no_point(
    make_rich: MakeRich, value: float, arms: Sequence[str]
) -> None:
    """One seed, or three, that end with such a metric stand in the tables; the data of the page stay strict JSON."""
    for seeds in (1, 3):
        records = [
            _ending_with(value, record, arms) for record in make_rich(["fp32", "apex:O2"], seeds).records
        ]
        text = FORMATS["html"].make_reporter().render(make_comparison(records, arms=["fp32", "apex:O2"]))
        parsed = Page(text)
        json.loads(parsed.scripts[0], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        points = [chart["views"][0]["series"] for chart in parsed.data["charts"] if chart["key"] == "pareto"]
        kept = {0, 1} - {["fp32", "apex:O2"].index(arm) for arm in arms if not math.isfinite(value)}
        assert {one["a"] for series in points for one in series} == kept
        assert f"{100 * value:.2f}" in parsed.text


def _ending_with(value: float, record: RunRecord, arms: Sequence[str]) -> RunRecord:
    """The record, with this metric at its end if its arm is among these."""
    if record.arm not in arms:
        return record
    summary = record.summary.model_copy(update={"metric_final": value, "metric_best": value})
    return record.model_copy(update={"summary": summary})


def test_the_differences_stand_first(rich: Comparison) -> None:
    """The page begins with the plot of differences, a line per arm but the reference; the one table follows."""
    text = FORMATS["html"].make_reporter().render(rich)
    plot = text[text.index('id="figure-differences"') : text.index('id="figure-step-time-ratios"')]
    assert text.index('id="figure-differences"') < text.index('aria-label="Summary, one row per arm"')
    assert re.findall(r'<span class="ink">([^<]*)', plot) == ["apex:O2", "native:bf16", "half"]
    assert plot.count('<circle class="seed"') == 6
    assert plot.count('class="mean"') == 2
    assert "<title>seed 0: \u22120.30 pp</title>" in plot
    assert 'class="band"' in plot
    assert "diverged 3/3" in plot


KNOWN = {
    *("html", "head", "meta", "title", "style", "body"),
    *("header", "nav", "main", "section", "footer", "script"),
    *("h1", "h2", "h3", "h4", "p", "b", "a", "div", "span", "small", "pre", "code", "noscript", "ul", "li"),
    *("table", "caption", "thead", "tbody", "tfoot", "tr"),
    *("th", "td", "dl", "dt", "dd", "details", "summary"),
    *("label", "input", "button", "figure", "figcaption"),
    *("svg", "g", "rect", "line", "circle", "path", "text"),
}
HOSTILE = {
    "script": "</script><script>alert(1)</script>", "attribute": '" onmouseover="alert(1)" x="',
    "comment": "<!-- <script>", "template": "{{ 7 * 7 }} {% raw %}", "entity": "&lt;img src=x onerror=alert(1)&gt;",
    "link": "<a href='javascript:alert(1)'>x</a>", "escape": "\x1b[2J\x00\u202egnp.exe\u2028\ud800",
    "long": "x" * 10_000, "empty": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def known(rich: Comparison) -> set[str]:
    """The attributes of elements of a page without a hostile text."""
    return {name for _, attributes in page(rich).elements for name in attributes} | {"hidden"}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_shown_as_text(known: set[str], make_rich: MakeRich, text: str) -> None:
    """A text of a user's, wherever it stands, adds no element, no attribute and no script."""
    base = make_rich(["fp32", text], 2)
    records = [
        record.model_copy(
            update={
                "error": text,
                "half": text,
                "environment": {text: text, "device": "cpu", "processor": text},
                "engine": record.engine and record.engine.model_copy(update={"version": text, "reason": text}),
                "config": record.config.model_copy(
                    update={"recipe": record.config.recipe.model_copy(
                        update={"model": record.config.recipe.model.model_copy(
                            update={"arch": text, "args": {text: text}})})}
                ),
            }
        )
        for record in base.records
    ]  # fmt: skip
    rows = [
        row.model_copy(update={"engine": text, "status": f"failed: {text}", "half": text})
        for row in base.arms
    ]
    hostile = base.model_copy(
        update={
            "arms": rows,
            "records": records,
            "headline": [f"Use {text}.", text],
            "next_steps": [NextStep(command=f"ampcompare {text}", why=text)],
            "reading": [f"Failed: {text}."],
            "command": f"ampcompare {text}",
            "reference": text,
            "environment": {text: text},
            "order": [text],
        }
    )
    parsed = Page(FORMATS["html"].make_reporter(logs={text: "x"}).render(hostile))
    assert parsed.open == []
    assert len(parsed.scripts) == 2
    assert {name for _, attributes in parsed.elements for name in attributes} <= known
    assert {tag for tag, _ in parsed.elements} <= KNOWN
    if len(text) < 100 and text.isprintable() and text:
        assert text in parsed.text
    assert all(len(arm["name"]) < 300 for arm in parsed.data["arms"])
    assert "<" not in parsed.scripts[0]


@pytest.mark.slow
def test_many_arms_are_drawn_small(hundred_arms: str) -> None:
    """100 arms with two seeds take 1.2 MB of file; the first twelve are switched on."""
    assert len(hundred_arms.encode()) < 1_200_000
    parsed = Page(hundred_arms)
    boxes = [
        attributes
        for tag, attributes in parsed.elements
        if tag == "input" and attributes.get("name") == "arm"
    ]
    assert len(boxes) == 100
    assert sum("checked" in attributes for attributes in boxes) == 12
    assert "200 runs, one line each" in parsed.text
    looks = {(arm["color"], arm["dash"]) for arm in parsed.data["arms"][:36]}
    assert len(looks) == 36


def test_without_the_extra_there_is_one_clear_line(
    rich: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without jinja2 the format says what to install, and a run directory goes without the page."""
    monkeypatch.setattr(
        "ampcompare.results.report.base.find_spec", lambda name: None if name == "jinja2" else object()
    )
    with pytest.raises(
        BackendUnavailable, match=r"needs jinja2, .*pip install \"ampcompare\[html\]\""
    ) as caught:
        FORMATS["html"].make_reporter().render(rich)
    assert (caught.value.exit_code, str(caught.value).count("\n")) == (4, 0)
    write_reports(rich, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.csv", "report.json", "report.md"]


def test_the_page_is_written_beside_the_other_reports(rich: Comparison, tmp_path: Path) -> None:
    """A finished comparison always has its page; an unfinished one gets a new page every few seconds at most."""
    path = tmp_path / "report.html"
    write_reports(rich, tmp_path)
    assert path.read_text(encoding="utf-8") == FORMATS["html"].make_reporter().render(rich)
    path.write_text("young")
    unfinished = rich.model_copy(update={"order": [*rich.order, *["fp32@0"] * 13]})
    write_reports(unfinished, tmp_path)
    assert path.read_text() == "young"
    write_reports(rich, tmp_path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_time_without_a_verdict_is_not_called_missing(rich: Comparison) -> None:
    """Its ratio or median is in the table."""
    rows = [
        row.model_copy(
            update={
                "time": row.time.because(
                    "not comparable", "2 cells ran at once" if row.arm == "apex:O2" else ""
                )
            }
        )
        for row in rich.arms
    ]
    text = " ".join(Terminal(200).render(rich.model_copy(update={"arms": rows})).split())
    assert "Step times without a verdict: not comparable (2 cells ran at once) for apex:O2." in text
    assert "No step times: not comparable" not in text
