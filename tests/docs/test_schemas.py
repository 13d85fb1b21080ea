"""The published JSON Schemas: current, and true of the stored file of every schema number."""

import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ampcompare.results.records.comparison import REPORT_SCHEMA, read_comparison
from ampcompare.results.records.document import SCHEMA, dump_json
from ampcompare.results.records.step import StepRecord
from tests.modules import module_at

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests" / "results" / "report"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """The program that writes the schemas."""
    return module_at("docs/hooks/schemas.py")


@cache
def _validator(path: Path) -> Any:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    schema = json.loads(path.read_text(encoding="utf-8"))
    if path.name in (
        f"report-{REPORT_SCHEMA}.json",
        f"step-{SCHEMA}.json",
    ):  # it takes longer than all else; others are older
        validator.check_schema(schema)
    return validator(schema)


def _errors(name: str, document: Any, hook: ModuleType) -> list[str]:
    errors = _validator(hook.FOLDER / name).iter_errors(document)
    return [f"{list(error.absolute_path)}: {error.message[:200]}" for error in errors]


def test_schemas_are_current(hook: ModuleType) -> None:
    """A changed model has its schema written again: `python docs/hooks/schemas.py`."""
    for name, schema in hook.schemas().items():
        assert (hook.FOLDER / name).read_text(encoding="utf-8") == hook.text(schema), name


def test_every_number_has_its_schemas(hook: ModuleType) -> None:
    """Older schemas stay published, and the page of stability names each."""
    names = {path.name for path in hook.FOLDER.iterdir()}
    newest = {"report": REPORT_SCHEMA, "record": SCHEMA, "step": SCHEMA}
    assert names >= {
        f"{kind}-{number}.json" for kind, last in newest.items() for number in range(1, last + 1)
    }
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    assert all(f"(schemas/{name})" in page for name in names)


@pytest.mark.parametrize("number", range(1, REPORT_SCHEMA + 1))
def test_stored_files_keep_their_schema(number: int, hook: ModuleType) -> None:
    """The stored report of each number, its records too, is valid by its schema, and once it is read by the present."""
    document = json.loads((STORED / f"schema_{number}.json").read_text(encoding="utf-8"))
    assert not _errors(f"report-{number}.json", document, hook)
    assert not _errors(f"record-{document['records'][0]['schema']}.json", document["records"][0], hook)
    broken = {**document, "arms": "none"}
    assert _errors(f"report-{number}.json", broken, hook)
    other = {**document, "schema": number + 1}
    assert _errors(f"report-{number}.json", other, hook)
    written = json.loads(dump_json(read_comparison(STORED / f"schema_{number}.json")))
    assert not _errors(f"report-{REPORT_SCHEMA}.json", written, hook)


def test_steps_have_a_schema(hook: ModuleType) -> None:
    """A line of steps, with a loss that is not finite, is valid; one without its loss is not."""
    step = StepRecord(0, 0, float("nan"), (1.0,), (1.0,), (True,), None, 0.1, 0.0)
    line = json.loads(dump_json(step))
    assert not _errors(f"step-{SCHEMA}.json", line, hook)
    assert _errors(f"step-{SCHEMA}.json", {key: value for key, value in line.items() if key != "loss"}, hook)
