"""What weights lose in other precisions, summed up over seeds, and the tables of it."""

import csv
import io
from typing import Any

import pytest
from scipy.stats import ttest_1samp

from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.evaluation import PrecisionResult
from ampcompare.results.report.base import FORMATS
from ampcompare.results.report.csv import Csv
from ampcompare.results.report.documents.comparison import precision_table
from ampcompare.results.report.markdown import Markdown
from ampcompare.results.report.terminal import Terminal
from ampcompare.testing import make_comparison, make_record

OWN = (0.9, 0.91, 0.92, 0.9)
LOST = (4, 5, 3, 6)  # of 1,000 samples


def _result(own: float, lost: int, **fields: Any) -> PrecisionResult:
    values = {"top-1": own - lost / 1000, "top-5": 1.0}
    return PrecisionResult.model_validate(
        {"precision": "fp16", "half": "fp16 emulated", "samples": 1000, "values": values, "answers": 1000,
         "differing": 2 * lost, **fields}
    )  # fmt: skip


@pytest.fixture
def comparison() -> Comparison:
    """fp32 in two precisions, one of which failed; half in none."""
    failed = PrecisionResult(precision="float64", error="RuntimeError: no kernel <b>")
    records = [
        make_record("fp32", seed, top1=own, in_precisions=[_result(own, lost), failed])
        for seed, (own, lost) in enumerate(zip(OWN, LOST, strict=True))
    ]
    return make_comparison([*records, make_record("half")], arms=["fp32", "half"])


def test_rows_pair_each_run_with_its_own_evaluation(comparison: Comparison) -> None:
    """The difference is to the arm's own value of the same seed; its interval is wider than that of plain counts."""
    fp16, failed = comparison.precisions
    assert (fp16.arm, fp16.precision, fp16.runs, fp16.half) == ("fp32", "fp16", 4, "fp16 emulated")
    assert fp16.own_mean == pytest.approx(sum(OWN) / 4)
    assert fp16.difference == pytest.approx(-0.0045)
    assert fp16.disagreement == pytest.approx(0.009)
    plain = ttest_1samp([-lost / 1000 for lost in LOST], 0).confidence_interval(0.95)
    assert fp16.low is not None
    assert fp16.high is not None
    assert fp16.low < plain.low < plain.high < fp16.high
    assert fp16.high - fp16.low < 1.2 * (plain.high - plain.low)
    assert (failed.runs, failed.metric_mean, failed.error) == (0, None, "RuntimeError: no kernel <b>")


def test_the_averaged_weights_have_rows_of_their_own() -> None:
    """EMA weights are compared with the arm's own evaluation of the average."""
    record = make_record("fp32", top1=0.5, in_precisions=[_result(0.6, 10, averaged=True)])
    epoch = record.summary.epochs[0].model_copy(update={"ema_values": {"top-1": 0.6}})
    record = record.model_copy(update={"summary": record.summary.model_copy(update={"epochs": [epoch]})})
    comparison = make_comparison([record], arms=["fp32"])
    assert comparison.precisions[0].own_mean == 0.6
    table = precision_table(comparison)
    assert table is not None
    assert table.texts[0][1] == "fp16 (emulated), EMA"


def test_every_report_has_the_table(comparison: Comparison) -> None:
    """Terminal, Markdown and HTML show the row, hostile errors as text; CSV has each run's value."""
    for text in (Terminal(100).render(comparison), Markdown().render(comparison)):
        assert "Trained weights in other precisions" in text
        assert "90.30" in text
        assert "0.90" in text
    assert "<b>" not in Markdown().render(comparison)
    html = FORMATS["html"].make_reporter().render(comparison)
    assert "Trained weights in other precisions" in html
    assert "no kernel &lt;b&gt;" in html
    rows = list(csv.DictReader(io.StringIO(Csv().render(comparison))))
    assert [row["in_fp16"] for row in rows][:1] == [str(OWN[0] - LOST[0] / 1000)]
    assert rows[0]["in_fp16_differing"] == "0.008"
    assert rows[0]["in_float64"] == rows[-1]["in_fp16"] == ""
    assert precision_table(comparison.model_copy(update={"precisions": []})) is None
