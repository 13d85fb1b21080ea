"""What each format shows, published figures among it, how it treats odd numbers, and that it holds many records."""

import csv
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.results.records.comparison import (
    ArmSummary,
    Comparison,
    NextStep,
    Published,
    PublishedRow,
    read_comparison,
)
from ampcompare.results.records.run import EngineInfo, ProcessFacts, RunRecord, SystemReadings
from ampcompare.results.report.base import FORMATS, MAX_LINE, write_reports
from ampcompare.results.report.columns import columns_with_values, table_of_columns, verdict_columns
from ampcompare.results.report.documents.comparison import (
    column_legend,
    published_legend,
    published_table,
    verdict_legend,
)
from ampcompare.results.report.documents.overview import make_overview_table, row_notes
from ampcompare.results.report.terminal import Terminal
from ampcompare.settings.script import ScriptConfig, parse_metric
from ampcompare.testing import make_comparison as comparison_of
from ampcompare.testing import make_record

MakeComparison = Callable[..., Comparison]
LINES = [form for form in FORMATS if form != "html"]  # the page has tests of its own
UNESCAPED_PIPE = re.compile(r"(?<!\\)\|")


def _csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def _md_table(text: str, heading: str = "Comparison") -> list[list[str]]:
    part = re.split(r"^#+ ", text.partition(f"# {heading}")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in UNESCAPED_PIPE.split(line)[1:-1]] for line in lines]


@pytest.mark.parametrize(
    ("metrics", "which"),
    [((), "mean of the last tenth of the steps"), (("loss:min:best=loss (.*)",), "best value")],
)
def test_a_script_has_no_epochs_and_no_validation_samples(metrics: tuple[str, ...], which: str) -> None:
    """Its legend says which value counts; that of a recipe has epochs."""
    run = make_record("fp32", 0)
    script = ScriptConfig(name="train.py", metrics=tuple(map(parse_metric, metrics)))
    of_script = run.model_copy(update={"config": run.config.model_copy(update={"script": script})})
    legends = [column_legend(comparison_of([one])) for one in (run, of_script)]
    assert ["of any epoch" in legend for legend in legends] == [True, False]
    assert f": {which}, seed 0; best: the same; " in legends[1]
    assert "validation" not in verdict_legend(comparison_of([of_script]))


@pytest.mark.parametrize("scale", [None, 65536.0])
def test_a_loss_scale_is_said_of_arms_that_have_one(scale: float | None) -> None:
    """An arm that scales no loss has no final loss scale either."""
    runs = [make_record("native:fp16", final_loss_scale=65536.0), make_record("fp32", final_loss_scale=scale)]
    text = " ".join(Terminal().render(comparison_of(runs)).split())
    assert f"0 steps skipped, final loss scale 65536{'' if scale else ' where the loss is scaled'}. " in text


def test_steps_that_were_all_skipped_are_said_once() -> None:
    """As the reason, of each run; the sum over the seeds says the same again."""
    arms: dict[str, dict[str, Any]] = {"fp32": {}, "half": {"skipped_steps": 100}}
    runs = [make_record(arm, seed, **values) for seed in range(3) for arm, values in arms.items()]
    notes = dict(zip(arms, row_notes(comparison_of(runs)), strict=True))
    assert notes["half"] == ["all 100 steps skipped"]


def _row(**values: Any) -> ArmSummary:
    base = {
        "arm": "half",
        "engine": None,
        "half": None,
        "lr": 0.1,
        "seeds": [0],
        "completed": 1,
        "diverged": 0,
    }
    return ArmSummary(**{**base, "failed": 0, **values})


def test_a_table_shows_what_was_measured(make_comparison: MakeComparison) -> None:
    """Every arm is a line with accuracy, time, memory, loss scale, skipped steps and engine in agreed units."""
    comparison = make_comparison(["fp32", "half"])
    shown = dict(
        zip(
            columns_with_values(comparison),
            table_of_columns(columns_with_values(comparison), comparison).texts[1],
            strict=True,
        )
    )
    assert shown["arm"] == "half"
    assert shown["top-1 %"] == "51.00 ± 0.00"
    assert shown["epoch (s)"] == "1.1 ± 0.1"
    assert shown["peak MiB"] == "3.0"
    assert shown["rel. time"] == "-"  # emulated, so no result
    assert shown["final loss scale"] == "65536"
    assert shown["skipped steps"] == "3/120"
    assert shown["status"] == "ok"
    assert shown["engine"] == "compat 1.0; fp16 emulated"
    text = Terminal(details=True).render(comparison)
    assert all(cell in text for cell in shown.values())
    assert "seeds 0, 1, 2" in text
    assert shown["epoch (s)"] not in Terminal().render(comparison)


@pytest.mark.parametrize("name", ["table", "md", "latex"])
def test_the_legend_names_the_error_rate_or_that_nothing_was_tested(
    name: str, make_comparison: MakeComparison
) -> None:
    """An error rate of 0 is not that of a test: without a look there is none, and the legend says so."""
    comparison = make_comparison(["fp32", "half"])
    shown = [
        " ".join(
            FORMATS[name].make_reporter().render(comparison.model_copy(update={"error_rate": rate})).split()
        )
        for rate in (0.04, 0.0)
    ]
    assert re.search(r"error rate 4 \\?% over all arms", shown[0])
    assert "nothing was tested" not in shown[0]
    assert "nothing was tested" in shown[1]
    assert "error rate" not in shown[1]


def test_columns_of_some_comparisons(make_comparison: MakeComparison) -> None:
    """Start times stand where ways to start are compared, the exchange where ranks trained, losses where kept."""
    comparison = make_comparison(["fp32", "half"])
    assert not {"data (ms)", "start (s)", "first batch (s)", "all-reduce %", "tail loss"} & set(
        columns_with_values(comparison)
    )
    first = comparison.records[0]
    readings = SystemReadings(timed_steps=30, joules_per_unit=0.0025)
    counted = [first.model_copy(update={"readings": readings}), *comparison.records[1:]]
    with_energy = comparison.model_copy(update={"records": counted})
    assert (
        list(columns_with_values(with_energy)).index("J/1000 samples")
        == list(columns_with_values(with_energy)).index("samples/s") + 1
    )
    place = list(columns_with_values(with_energy)).index("J/1000 samples")
    assert [row[place] for row in table_of_columns(columns_with_values(with_energy), with_energy).texts] == [
        "2.5",
        "-",
    ]
    waits = first.summary.model_copy(update={"step_seconds_median": 0.1, "data_seconds_median": 0.006})
    used = SystemReadings(timed_steps=30, device_bytes=3 * 2**20)
    waiting = first.model_copy(update={"summary": waits, "readings": used})
    shown = comparison.model_copy(update={"records": [waiting, *comparison.records[1:]]})
    heads = list(columns_with_values(shown))
    values = dict(zip(heads, table_of_columns(columns_with_values(shown), shown).texts[0], strict=True))
    assert heads.index("data (ms)") == heads.index("step (ms)") + 1
    assert values["data (ms)"] == "6.00"
    (line,) = _csv(
        FORMATS["csv"].make_reporter().render(comparison.model_copy(update={"records": [waiting]}))
    )
    assert (line["data_seconds_median"], line["device_bytes"]) == ("0.006", str(3 * 2**20))
    quick = waiting.model_copy(update={"summary": waits.model_copy(update={"data_seconds_median": 0.004})})
    assert "data (ms)" not in columns_with_values(comparison.model_copy(update={"records": [quick]}))
    other = first.model_copy(update={"config": first.config.model_copy(update={"workers": 2})})
    row = comparison.arms[0].model_copy(update={"start_seconds": 1.25, "loader_start_seconds": 0.5})
    started = comparison.model_copy(
        update={"records": [other, *comparison.records], "arms": [row, comparison.arms[1]]}
    )
    assert table_of_columns(columns_with_values(started), started).texts[0][-2:] == ["1.25", "0.5"]
    assert table_of_columns(columns_with_values(started), started).texts[1][-2:] == ["-", "-"]
    facts = ProcessFacts(
        world_size=2, nodes=1, global_batch_size=32, backend="gloo", wrapper="x.DDP", launcher="spawn",
        allreduce_share=0.25,
    )  # fmt: skip
    (line,) = _csv(
        FORMATS["csv"]
        .make_reporter()
        .render(comparison.model_copy(update={"records": [_with(first, facts)]}))
    )
    assert (line["world_size"], line["allreduce_share"], line["step_seconds_slowest"]) == ("2", "0.25", "")
    row = row.model_copy(update={"allreduce_share": 0.125})
    together = comparison.model_copy(update={"arms": [row, comparison.arms[1]]})
    for reporter in (Terminal(details=True), FORMATS["md"].make_reporter(), FORMATS["latex"].make_reporter()):
        text = reporter.render(together)
        assert "12.50" in text, reporter
        assert "first batch" not in text


def _with(record: RunRecord, facts: ProcessFacts) -> RunRecord:
    return record.model_copy(update={"processes": facts})


def test_csv_has_a_line_per_cell_in_full_precision(make_comparison: MakeComparison) -> None:
    """Each record is a line whose numbers read back exactly."""
    comparison = make_comparison(["fp32", "half"])
    rows = _csv(FORMATS["csv"].make_reporter().render(comparison))
    assert [(row["arm"], int(row["seed"])) for row in rows] == [
        (record.arm, record.config.recipe.seed) for record in comparison.records
    ]
    for row, record in zip(rows, comparison.records, strict=True):
        assert float(row["step_seconds_median"]) == record.summary.step_seconds_median
        assert float(row["metric_final"]) == record.summary.metric_final
        assert (row["engine"], row["engine_version"]) == ("compat", "1.0")


def test_a_script_has_no_learning_rate_of_ours(make_comparison: MakeComparison) -> None:
    """The setting of ampcompare's loop has no part in it."""
    comparison = make_comparison(["fp32", "half"])
    assert "lr" in columns_with_values(comparison)
    script = ScriptConfig(name="train.py")
    records = [
        one.model_copy(update={"config": one.config.model_copy(update={"script": script})})
        for one in comparison.records
    ]
    rows = [row.model_copy(update={"lr": math.nan}) for row in comparison.arms]
    comparison = comparison.model_copy(update={"records": records, "arms": rows})
    assert "lr" not in columns_with_values(comparison)
    assert {row["lr"] for row in _csv(FORMATS["csv"].make_reporter().render(comparison))} == {""}


@pytest.mark.parametrize("form", LINES)
def test_non_finite_numbers_are_shown(make_comparison: MakeComparison, form: str, tmp_path: Path) -> None:
    """A loss scale of infinity and a loss that is nan appear as words, and the JSON stays strict."""
    base = make_comparison(["fp32", "half"], 1)
    record = base.records[0]
    summary = record.summary.model_copy(update={"final_loss_scale": math.inf, "loss_final": math.nan})
    rows = [row.model_copy(update={"final_loss_scale": math.inf}) for row in base.arms]
    changed = base.model_copy(
        update={"records": [record.model_copy(update={"summary": summary})], "arms": rows}
    )
    text = FORMATS[form].make_reporter().render(changed)
    assert "inf" in text
    assert form not in ("csv", "json") or "nan" in text
    if form == "json":
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        path = tmp_path / "report.json"
        path.write_text(text)
        assert read_comparison(path).records[0].summary.final_loss_scale == math.inf


def test_json_reads_back_the_same(make_comparison: MakeComparison, tmp_path: Path) -> None:
    """`report.json` holds everything: what is read from it renders alike in every format."""
    comparison = make_comparison(["fp32", "half", "native:bf16"])
    write_reports(comparison, tmp_path)
    again = read_comparison(tmp_path / "report.json")
    assert again == comparison
    for form in LINES:
        assert FORMATS[form].make_reporter().render(again) == FORMATS[form].make_reporter().render(comparison)
    assert {"report.csv", "report.json", "report.md"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == FORMATS["md"].make_reporter().render(
        comparison
    )


HOSTILE = {
    "markup": "<script>alert(1)</script>",
    "table": "a | b | c",
    "lines": "first\nsecond\r\n# heading\n- item",
    "fence": "```\nrm\n```",
    "link": "[click](javascript:alert(1)) ![x](http://example.com/x.png)",
    "escape": "\x1b[2J\x1b]0;title\x07\x9b31m\x00\u202egnp.exe\u2028x\ud800",
    "formula": "=HYPERLINK(1)",
    "plus": "+1+cmd|' /C calc'!A0",
    "minus": "-2+3",
    "at": "@SUM(A1)",
    "hidden formula": "\t\r\n =1+1",
    "long": "x" * 10_000,
    "empty": "",
}


@pytest.fixture(scope="module")
def hostile(make_comparison: MakeComparison, request: pytest.FixtureRequest) -> Comparison:
    """A comparison with one hostile text wherever a text can stand."""
    text: str = request.param
    base = make_comparison(["fp32", text], 1, command=f"ampcompare {text}")
    records = [_hostile_record(record, text) for record in base.records]
    rows = [
        row.model_copy(update={"engine": text, "status": f"failed: {text}", "half": text})
        for row in base.arms
    ]
    return base.model_copy(
        update={
            "arms": rows,
            "records": records,
            "reference": text,
            "reading": [*base.reading, f"Failed: {text}."],
            "headline": [*base.headline, f"{text} diverged."],
            "next_steps": [NextStep(command=f"ampcompare compare {text}", why=text)],
            "environment": {text: text, "path": f"/home/{text}"},
        }
    )


def _hostile_record(record: RunRecord, text: str) -> RunRecord:
    engine = EngineInfo(name="compat", version=text, reason=text)
    return record.model_copy(update={"engine": engine, "half": text, "error": text, "cell": text})


def test_nothing_in_markdown_comes_alive(make_comparison: MakeComparison) -> None:
    """A viewer strikes nothing out and makes no link of a bare address in a tag."""
    tag = "~~old~~ https://example.com www.example.com me@example.com"
    text = FORMATS["md"].make_reporter().render(make_comparison(["fp32"], 1).model_copy(update={"tag": tag}))
    title = text.splitlines()[0]
    assert title == r"# Comparison: \~\~old\~\~ https\://example.com www\.example.com me\@example.com"


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE, indirect=True)
@pytest.mark.parametrize("form", LINES)
def test_hostile_text_is_harmless(hostile: Comparison, form: str) -> None:
    """Names and errors of a record come out as plain text: nothing steers a terminal, breaks a table or is run."""
    text = FORMATS[form].make_reporter().render(hostile)
    text.encode("utf-8")
    assert text.replace("\n", "").isprintable()
    if form == "table":
        rows_of_arms = text.split("\n\n")[1].splitlines()
        assert len(rows_of_arms) == 2 + len(hostile.arms)
        assert max(map(len, rows_of_arms)) < 600
        assert max(map(len, Terminal(80).render(hostile).splitlines())) <= (
            80 if len(hostile.reference) < 80 else MAX_LINE
        )
    elif form == "md":
        overview = make_overview_table(hostile)
        table = _md_table(text)
        assert len(table) == 2 + len(hostile.arms)
        assert all(len(row) == len(overview.columns) + 1 for row in table)  # with notes
        assert all(len(row) == len(columns_with_values(hostile)) for row in _md_table(text, "Measurements"))
        outside = re.sub(r"^```\n.*\n```$", "", text, flags=re.MULTILINE)
        assert not re.search(r"(?<!\\)[<>`]|(?<!\\)\]\(", outside)
        assert re.findall(r"^#.*", text, re.MULTILINE) == [
            "# Comparison", "## Measurements", "## Verdicts", "## Conclusions", "## Environment", "## Reproduce"
        ]  # fmt: skip
        assert text.count("```") == 4
    elif form == "latex":
        code = re.sub(r"^%.*", "", text, flags=re.MULTILINE)  # comments end with their lines
        # what is escaped stands for itself
        body = re.sub(r"\\\w+\{\}|\\[&%$#_{}]|\$\\(pm|Delta|leq)\$", "", code)
        assert not re.search(r"[%$#_~^<>|\"]", body)
        assert {line.count(" & ") for line in body.splitlines() if line.endswith(r" \\")} <= {
            len(make_overview_table(hostile).columns) - 1,
            len(columns_with_values(hostile)) - 1,
            len(verdict_columns(hostile)) - 1,
        }
        assert body.count("{") == body.count("}")
    elif form == "csv":
        rows = list(csv.reader(io.StringIO(text)))
        assert len(rows) == 1 + len(hostile.records)
        assert {len(row) for row in rows} == {len(rows[0])}
        assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
    else:
        assert json.loads(text)["records"][1]["engine"]["version"] == hostile.records[1].engine.version  # type: ignore[union-attr]


def test_a_comparison_prints_as_a_few_lines(make_comparison: MakeComparison) -> None:
    """`print` of what `compare` returns says what each arm reached, and its repr is one line."""
    comparison = make_comparison(["fp32", "half"])
    lines = str(comparison).splitlines()
    assert lines[: len(comparison.headline)] == comparison.headline
    first, second, *reading = lines[len(comparison.headline) :]
    assert first == f"fp32: ok, top-1 {100 * (comparison.arms[0].metric_mean or 0):.2f} %, the reference"
    assert second.startswith("half: ok, top-1 51.00 %, accuracy ")
    assert reading == comparison.reading
    assert repr(comparison) == "<Comparison of fp32, half: 6 records, seeds 0, 1, 2>"
    assert str(comparison.records[0]) == "fp32, seed 0: completed, top-1 50.00 %"
    (record, *_) = comparison.records
    assert repr(record) == f"<RunRecord {record.cell} of fp32, seed 0: completed, top-1 50.00 %>"


def beside(make: MakeComparison, rows: list[dict[str, Any]], **options: Any) -> Comparison:
    """A comparison of two arms with published rows."""
    published = Published(source="a post", recipe="r", rows=[PublishedRow(**row) for row in rows], **options)
    return make(["fp32", "half"]).model_copy(update={"published": published})


def test_only_what_was_published_has_columns(make_comparison: MakeComparison) -> None:
    """A column of measured values stands next to a published one, and there are no others."""
    rows = [
        {"name": "fp32", "row": "fp32", "seconds": 31352.0, "top1": 0.7579},
        {"name": "half at 4096", "row": "half", "diverged": True, "remark": "NaN"},
        {"name": "O2", "top1": 0.7559},
    ]
    table = published_table(beside(make_comparison, rows))
    assert table is not None
    headers, lines = table.heads, table.texts
    assert headers == [
        *(
            "as published",
            "top-1 %, published",
            "top-1 %, measured",
            "time, published",
            "time, measured",
            "remark",
        )
    ]
    assert lines == [
        ["fp32", "75.79", "50.00", "8h42m32s", "-", "-"],
        ["half at 4096 (half)", "NaN", "51.00", "-", "-", "NaN"],
        ["O2", "75.59", "not run", "-", "-", "-"],
    ]


def test_the_legend_says_in_what_runs_depart(make_comparison: MakeComparison) -> None:
    """A smaller scale, or up to six other settings, are named with the source and its machine."""
    row = [{"name": "fp32", "row": "fp32", "top1": 0.75}]
    small = published_legend(beside(make_comparison, row, scale="small", machine="8x V100"))
    assert small.startswith("Published: a post, on 8x V100; one run per line.")
    assert "numbers cannot" in small
    many = published_legend(beside(make_comparison, row, differs=[f"s{n} 1, not 2" for n in range(8)]))
    assert "s5 1, not 2 and 2 more" in many
    assert "s6" not in many
