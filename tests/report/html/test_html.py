"""What the page says, that it is one harmless file, and that it holds many records."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ampcompare.errors import BackendUnavailable
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.report.columns import VERDICTS
from ampcompare.report.files import write_reports
from ampcompare.report.formats import FORMATS

pytest.importorskip("jinja2", reason="the page needs the extra html")
pytest.importorskip("plotly", reason="the page needs the extra html")

MakeRich = Callable[..., Comparison]
LARGEST = 6_000_000
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
    parsed = Page(FORMATS["html"].reporter().render(comparison))
    assert parsed.open == []
    return parsed


def figure(parsed: Page, key: str) -> list[dict[str, Any]]:
    """The traces of a figure, none where it is not drawn."""
    return next((found["traces"] for found in parsed.data["figures"] if found["key"] == key), [])


@pytest.fixture(scope="module")
def rich(make_rich: MakeRich) -> Comparison:
    """Four arms, one of which diverges in every seed."""
    return make_rich(["fp32", "apex:O2", "native:bf16", "half"], diverging=["half"])


def test_the_page_is_one_file_that_loads_nothing(rich: Comparison) -> None:
    """No element, style or policy lets the page ask for anything; it is smaller than 6 MB and reproducible."""
    text = FORMATS["html"].reporter().render(rich)
    assert len(text.encode()) < LARGEST
    assert FORMATS["html"].reporter().render(rich) == text
    parsed = Page(text)
    loading = ("src", "href", "srcset", "data", "action", "poster", "background")
    targets = [value for _, attributes in parsed.elements for name, value in attributes.items() if name in loading]
    assert targets
    assert all((value or "").startswith("#") for value in targets)
    assert not {tag for tag, _ in parsed.elements} & {"link", "iframe", "img", "object", "embed", "base"}
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for tag, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]


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
    for said in ("ampcompare compare --seeds 0-2", "torch 2.13.0", "lr 0.05", "opt_level = O2"):
        assert said in text
    for title in ("Validation accuracy", "Time to accuracy", "Peak memory", "Loss scale", "Skipped steps"):
        assert title in text


def test_arms_look_the_same_in_all_figures(rich: Comparison) -> None:
    """Each trace names its arm and a role; looks are told apart by color, symbol or dash."""
    parsed = page(rich)
    looks = [(arm["color"], arm["dash"], arm["symbol"]) for arm in parsed.data["arms"]]
    assert len(set(looks)) == 4
    roles = {trace["meta"]["role"] for found in parsed.data["figures"] for trace in found["traces"]}
    assert roles == {"line", "band", "stop", "box", "bar", "point"}
    for found in parsed.data["figures"]:
        for trace in found["traces"]:
            assert trace["name"] == rich.arms[trace["meta"]["arm"]].arm


def test_bands_are_ranges_over_seeds(rich: Comparison, make_rich: MakeRich) -> None:
    """A line is the mean of the seeds, its band goes from the lowest to the highest, and one seed has no band."""
    traces = {trace["meta"]["role"]: trace for trace in figure(page(rich), "accuracy") if trace["meta"]["arm"] == 0}
    finals = [100 * (r.summary.top1_final or 0) for r in rich.records if r.arm == "fp32"]
    assert traces["line"]["y"][-1] == pytest.approx(sum(finals) / 3)
    count = len(traces["line"]["x"])
    assert traces["band"]["y"][count - 1 : count + 1] == pytest.approx([max(finals), min(finals)])
    alone = page(make_rich(["fp32", "half"], 1))
    assert "band" not in {trace["meta"]["role"] for f in alone.data["figures"] for trace in f["traces"]}


def test_a_diverged_run_shows_where_it_stopped(rich: Comparison) -> None:
    """Its loss ends in a cross at the step that diverged; where it cannot be drawn, the caption says why."""
    parsed = page(rich)
    stops = [trace for trace in figure(parsed, "training-loss") if trace["meta"]["role"] == "stop"]
    assert [trace["meta"]["arm"] for trace in stops] == [3]
    assert stops[0]["x"] == [14] * 3
    assert stops[0]["text"][1] == "seed 1 diverged at step 14"
    assert "Not drawn: half (diverged at step 14, before the first evaluation)." in parsed.text
    assert {trace["meta"]["arm"] for trace in figure(parsed, "accuracy")} == {0, 1, 2}


def test_time_to_accuracy_counts_runs_that_reach_it(rich: Comparison) -> None:
    """The table gives epochs and seconds to 99 % of the reference's accuracy, and how many runs came so far."""
    text = page(rich).text
    target = 99 * (rich.arms[0].top1_mean or 0)
    assert f"runs that reach {float(f'{target:.4g}'):g} %" in text
    assert re.search(r"fp32 3 of 3 4 4\.08 ± 0\.08", text)
    assert "half 0 of 3 - -" in text


def test_records_without_a_trace_are_still_shown(rich: Comparison) -> None:
    """Records from before there were traces have tables and the figures of their epochs; the others say what lacks."""
    old = rich.model_copy(update={"records": [record.model_copy(update={"trace": None}) for record in rich.records]})
    parsed = page(old)
    keys = {found["key"] for found in parsed.data["figures"]}
    assert keys == {"accuracy", "validation-loss", "time-to-accuracy", "pareto", "memory", "differences"}
    assert "before runs kept a trace" in parsed.text


def test_nothing_measured_is_a_page_too() -> None:
    """Arms that never ran give dashes and words, not an error."""
    row = ArmSummary(
        arm="half", engine=None, half=None, lr=math.nan, seeds=[], completed=0, diverged=0, failed=0, status="not run"
    )
    empty = Comparison(command="", reference="fp32", seeds=[], arms=[row], reading=[], records=[])
    parsed = page(empty)
    assert parsed.data["figures"] == []
    assert "No epoch was evaluated." in parsed.text
    assert "not run" in parsed.text


def test_odd_numbers_are_shown(rich: Comparison) -> None:
    """Infinite scales and losses that are nan leave gaps in curves, and the data of the page stay strict JSON."""
    records = []
    for record in rich.records:
        assert record.trace is not None
        losses = [math.nan, math.inf, *record.trace.losses[2:]]
        trace = record.trace.model_copy(update={"losses": losses, "loss_scales": [math.inf, 0.0] * (len(losses) // 2)})
        records.append(record.model_copy(update={"trace": trace}))
    parsed = page(rich.model_copy(update={"records": records}))
    json.loads(parsed.scripts[0], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    lines = [trace for trace in figure(parsed, "training-loss") if trace["meta"]["role"] == "line"]
    assert lines[0]["x"][0] == 4
    assert figure(parsed, "loss-scale") == []


def test_the_table_of_verdicts_stands_first(rich: Comparison) -> None:
    """The first table of the page holds the verdicts, a row per arm but the reference, escaped; numbers follow."""
    rows = [row.model_copy(update={"time_verdict": f"<b>better</b> {place}"}) for place, row in enumerate(rich.arms)]
    parsed = page(rich.model_copy(update={"arms": rows}))
    labels = [attributes["aria-label"] for tag, attributes in parsed.elements if attributes.get("role") == "region"]
    assert labels[:2] == ["Table of verdicts, one row per arm", "Summary, one row per arm"]
    assert f"Verdicts {' '.join(VERDICTS)} apex:O2 " in parsed.text
    assert parsed.text.index("<b>better</b> 1") < parsed.text.index("<b>better</b> 3") < parsed.text.index("Numbers")
    assert "<b>better</b> 0" not in parsed.text
    assert "diverged 3/3" in parsed.text


def test_one_arm_has_no_table_of_verdicts(make_rich: MakeRich) -> None:
    """A page of the reference alone shows its numbers, and no empty table."""
    assert "Table of verdicts" not in FORMATS["html"].reporter().render(make_rich(["fp32"]))


def test_the_caption_of_differences_tells_intervals_from_tests(rich: Comparison) -> None:
    """The figure of differences says which interval it draws, and its table at which confidence."""
    text = page(rich).text
    assert "Each interval is that of the test that decided the verdict" in text
    assert re.search(r"to [-+]\d+\.\d\d \(9\d(\.\d)? %\)", text)


HOSTILE = {
    "script": "</script><script>alert(1)</script>",
    "attribute": '" onmouseover="alert(1)" x="',
    "comment": "<!-- <script>",
    "template": "{{ 7 * 7 }} {% raw %}",
    "entity": "&lt;img src=x onerror=alert(1)&gt;",
    "link": "<a href='javascript:alert(1)'>x</a>",
    "escape": "\x1b[2J\x00\u202egnp.exe\u2028\ud800",
    "long": "x" * 10_000,
    "empty": "",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_shown_as_text(rich: Comparison, make_rich: MakeRich, text: str) -> None:
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
    rows = [row.model_copy(update={"engine": text, "status": f"failed: {text}", "half": text}) for row in base.arms]
    hostile = base.model_copy(
        update={
            "arms": rows,
            "records": records,
            "reading": [f"Failed: {text}."],
            "command": f"ampcompare {text}",
            "reference": text,
            "environment": {text: text},
            "order": [text],
        }
    )
    parsed = page(hostile)
    harmless = base.model_copy(update={"environment": {"a": "b"}})
    assert len(parsed.scripts) == len(page(harmless).scripts) == 3
    known = {name for _, attributes in page(rich).elements for name in attributes}
    assert {name for _, attributes in parsed.elements for name in attributes} <= known
    assert {tag for tag, _ in parsed.elements} <= {tag for tag, _ in page(rich).elements} | {"p"}
    if len(text) < 100 and text.isprintable() and text:
        assert text in parsed.text
    for found in parsed.data["figures"]:
        for trace in found["traces"]:
            assert "<" not in trace["name"]
            assert len(trace["name"]) < 300


@pytest.mark.integration
def test_a_thousand_records_are_drawn_small(make_rich: MakeRich) -> None:
    """100 arms with 10 seeds take 5.7 MB of file; the first twelve are switched on."""
    comparison = make_rich([f"half:loss_scale={number}" for number in range(1, 101)], 10, 30)
    text = FORMATS["html"].reporter().render(comparison)
    assert len(text.encode()) < 5_700_000
    tracemalloc.start()
    try:
        FORMATS["html"].reporter().render(comparison)
        assert tracemalloc.get_traced_memory()[1] < 500e6
    finally:
        tracemalloc.stop()
    parsed = Page(text)
    boxes = [attributes for tag, attributes in parsed.elements if tag == "input" and attributes.get("name") == "arm"]
    assert len(boxes) == 100
    assert sum("checked" in attributes for attributes in boxes) == 12
    assert "1000 runs, one line each" in parsed.text
    looks = {(arm["color"], arm["dash"], arm["symbol"]) for arm in parsed.data["arms"][:36]}
    assert len(looks) == 36


def test_without_the_extra_there_is_one_clear_line(
    rich: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without jinja2 or plotly the format says what to install, and a run directory goes without the page."""
    monkeypatch.setattr("ampcompare.report.formats.find_spec", lambda name: None if name == "plotly" else object())
    with pytest.raises(BackendUnavailable, match=r"needs plotly, .*pip install jinja2 plotly") as caught:
        FORMATS["html"].reporter().render(rich)
    assert (caught.value.exit_code, str(caught.value).count("\n")) == (4, 0)
    write_reports(rich, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.csv", "report.json", "report.md"]


def test_the_page_is_written_beside_the_other_reports(rich: Comparison, tmp_path: Path) -> None:
    """A finished comparison always has its page; an unfinished one gets a new page every few seconds at most."""
    path = tmp_path / "report.html"
    write_reports(rich, tmp_path)
    assert path.read_text(encoding="utf-8") == FORMATS["html"].reporter().render(rich)
    path.write_text("young")
    unfinished = rich.model_copy(update={"order": [*rich.order, *["fp32@0"] * 13]})
    write_reports(unfinished, tmp_path)
    assert path.read_text() == "young"
    write_reports(rich, tmp_path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
