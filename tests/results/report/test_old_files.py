"""Files that earlier versions wrote stay readable; one file per schema lies beside this test."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.reload_report import reload_comparison
from ampcompare.results.records.comparison import OLDER_VERDICTS, REPORT_SCHEMA, SEEDS_ITSELF, Comparison
from ampcompare.results.records.document import dump_json
from ampcompare.results.records.verdict import Verdict
from ampcompare.results.report.base import FORMATS

HERE = Path(__file__).parent


COUNTS = {"top1_correct": "top-1", "top5_correct": "top-5"}


def _field(new: dict[str, Any], name: str) -> Any:
    """Return the value of a field of an old file, by the name and in the place that it has by now."""
    if name in COUNTS:
        return new["counts"][COUNTS[name]]
    if name == "top5_final":
        return new["others_final"]["top-5"]
    if name == "majority_correct":
        return None if new["chance"] is None else round(new["chance"] * new["samples"])
    if name in ("effective", "ran"):  # what a library ran, of which these files have none
        return None
    name = name.replace("top1_", "metric_")
    if name in OLDER_VERDICTS:
        quantity, field = OLDER_VERDICTS[name]
        return new[quantity][field] if field else str(Verdict(**new[quantity]))
    return new[name]


def _holds(new: Any, old: Any) -> bool:
    """Return whether every value of an old file is still there; there may be more fields by now."""
    if isinstance(old, dict):
        # What was read has the fields, and so the number, of this version.
        named = {name: value for name, value in old.items() if name != "schema"}
        return all(_holds(_field(new, name), value) for name, value in named.items())
    if isinstance(old, list):
        return len(new) == len(old) and all(map(_holds, new, old))
    return bool(new == old)


def test_every_schema_has_its_file() -> None:
    """Whoever raises the schema number adds a file of it, and keeps the old ones."""
    assert sorted(HERE.glob("schema_*.json")) == [
        HERE / f"schema_{number}.json" for number in range(1, REPORT_SCHEMA + 1)
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_older_schemas_are_rendered(form: str, tmp_path: Path) -> None:
    """Reports of schema 1, and of 2 with a metric other than top-1: read without a loss, rendered in every format."""
    if FORMATS[form].missing_packages:
        pytest.skip("the page needs the extra html")
    first, second = (HERE / f"schema_{number}.json" for number in (1, 2))
    comparison = reload_comparison(shutil.copy(first, tmp_path / "report.json"))
    assert [row.arm for row in comparison.arms] == ["fp32", "apex:O2,engine=compat"]
    assert comparison.schema_number == REPORT_SCHEMA
    assert comparison.arms[1].final_loss_scale == 65536
    assert comparison.records[0].summary.epochs[0].samples == 32
    assert _holds(json.loads(dump_json(comparison)), json.loads(first.read_text()))
    assert "apex:O2,engine=compat" in FORMATS[form].make_reporter().render(comparison)
    comparison = reload_comparison(shutil.copy(second, tmp_path / "report.json"))
    assert comparison.metric.name == "RMSE"
    assert _holds(json.loads(dump_json(comparison))["records"], json.loads(second.read_text())["records"])
    assert comparison.arms[1].time.kind == "invalid"
    assert "native:bf16" in FORMATS[form].make_reporter().render(comparison)


def test_copies_are_said_in_words_by_older_reports() -> None:
    """A report without the field has it by the words of all that is not used; one without copies stays."""
    base = {
        "command": "",
        "reference": "a",
        "seeds": [],
        "arms": [],
        "reading": [],
        "records": [],
        "schema": 3,
    }
    for excluded, expected in (
        ([f"a; {SEEDS_ITSELF}"], True),
        ([f"a; {SEEDS_ITSELF}", "b"], False),
        ([], False),
    ):
        comparison = Comparison.model_validate({**base, "excluded": excluded})
        assert comparison.only_copies == expected
        written = json.loads(dump_json(comparison))
        assert written.get("only_copies", False) == expected == ("only_copies" in written)
        assert Comparison.model_validate(written) == comparison
