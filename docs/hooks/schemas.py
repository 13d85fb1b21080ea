"""The JSON Schemas of stored files: `python docs/hooks/schemas.py` writes docs/schemas/.

A file of an older schema number is history and is never written again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ampcompare.results.records.comparison import REPORT_SCHEMA, Comparison
from ampcompare.results.records.diagnosis import Diagnosis
from ampcompare.results.records.document import SCHEMA
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.step import StepRecord

FOLDER = Path(__file__).resolve().parent.parent / "schemas"
DIAGNOSIS = Diagnosis.model_fields["version"].default
STRICT = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas of this version by the names of their files, as files hold what they describe."""
    found = {
        f"report-{REPORT_SCHEMA}.json": (Comparison.model_json_schema(by_alias=True), "report.json"),
        f"record-{SCHEMA}.json": (RunRecord.model_json_schema(by_alias=True), "record.json"),
        f"step-{SCHEMA}.json": (_step(), "line of steps.jsonl"),
        f"diagnosis-{DIAGNOSIS}.json": (Diagnosis.model_json_schema(), "diagnosis.json"),
    }
    return {name: _published(name, schema, what) for name, (schema, what) in found.items()}


def _step() -> dict[str, Any]:
    """Return the schema of an update, which is a tuple with names here and an object in the file."""
    fields: list[Any] = TypeAdapter(StepRecord).json_schema()["prefixItems"]
    return {
        "type": "object",
        "description": (StepRecord.__doc__ or "").partition("\n")[0],
        "properties": dict(zip(StepRecord._fields, fields, strict=True)),
        "required": [name for name in StepRecord._fields if name not in StepRecord._field_defaults],
    }


def _published(name: str, schema: dict[str, Any], what: str) -> dict[str, Any]:
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"ampcompare {what}"}
    published: dict[str, Any] = {
        **head,
        **{key: _strict(value) for key, value in schema.items() if key != "title"},
    }
    if name.startswith(("report", "record")):
        published["properties"]["schema"] = {
            "const": REPORT_SCHEMA if name.startswith("report") else SCHEMA,
            "title": "Schema",
        }
        published["required"] = sorted({*published.get("required", []), "schema"})
    if name.startswith("record"):
        published["properties"]["checksum"] = {
            "type": "string",
            "description": "SHA-256 over the other fields, as sorted JSON; missing in records inside a report",
        }
    return published


def _strict(value: Any) -> Any:
    """Return a schema in which a number may be text where JSON has no such number, and fields may be added."""
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "number" and not {
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
    } & set(value):
        return {**{key: item for key, item in value.items() if key != "type"}, **STRICT}
    return {
        key: _strict(item)
        for key, item in value.items()
        if key != "additionalProperties" or item is not False
    }


def text(schema: dict[str, Any]) -> str:
    """Return a schema as its file has it."""
    return json.dumps(schema, indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / name).write_text(text(schema), encoding="utf-8")
