"""The environments of a comparison, next to each other."""

from typing import Any

from ampcompare.results.records.run import EngineInfo, RunRecord
from ampcompare.results.report.documents.comparison import comparison_document
from ampcompare.results.report.documents.stacks import stack_table
from ampcompare.results.report.terminal import Terminal
from ampcompare.settings.stack import parse_stacks
from ampcompare.testing import make_comparison, make_record

STACK = parse_stacks({"old": "python3.8"})["old"]


def _of_stack(record: RunRecord, **environment: Any) -> RunRecord:
    config = record.config.model_copy(update={"stack": STACK})
    engine = EngineInfo(name="nvidia", version="0.1", reason="the genuine Apex of the stack")
    facts = {**record.environment, **environment}
    return record.model_copy(
        update={"config": config, "arm": f"{record.arm}@old", "environment": facts, "engine": engine}
    )


def test_what_differs_is_a_row_for_each_fact() -> None:
    here = [make_record("fp32", seed) for seed in range(3)]
    there = [_of_stack(record, torch="1.13.1", apex="0.1", apex_kernels="amp_C") for record in here]
    comparison = make_comparison([*here, *there])
    table = stack_table(comparison)
    assert table is not None
    assert [column.head for column in table.columns] == ["environment", "here", "old"]
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["torch"][1] == "1.13.1"
    assert rows["apex"] == ["-", "0.1"]
    assert rows["apex_kernels"] == ["-", "amp_C"]
    assert "device" not in rows  # which both have alike
    text = Terminal(200, details=True).document_text(comparison_document(comparison))
    assert "1.13.1" in text
    assert "nvidia 0.1" in text


def test_another_torch_of_a_stack_is_what_is_compared() -> None:
    here = [make_record("fp32", seed, losses=str(seed)) for seed in range(3)]
    torches = [
        record.model_copy(update={"environment": {**record.environment, "torch": "1.13.1"}})
        for record in here
    ]
    other = [record.model_copy(update={"arm": "native:bf16"}) for record in torches]
    refused = make_comparison([*here, *other])
    assert [row.quality.kind for row in refused.arms][1] == "not comparable"
    allowed = make_comparison([*here, *(_of_stack(record) for record in torches)])
    assert [row.quality.kind for row in allowed.arms][1] != "not comparable"


def test_one_environment_has_no_table() -> None:
    assert stack_table(make_comparison([make_record("fp32", seed) for seed in range(2)])) is None


def test_the_environment_of_a_report_is_the_one_here() -> None:
    here = [make_record("fp32", seed) for seed in range(2)]
    there = [_of_stack(record, torch="1.13.1", recorder_run="5d3f") for record in here]
    assert make_comparison([*there, *here]).environment == here[0].environment
    assert make_comparison(there).environment == {**here[0].environment, "torch": "1.13.1"}
