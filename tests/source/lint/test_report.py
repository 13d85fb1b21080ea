"""The four forms of a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampcompare.source.document import Place
from ampcompare.source.lint.report import FORMATS, Located, Report, Unread

REPORT = Report(
    findings=[
        Located(Path("a b/train.py"), Place(3, 5), "AMP201", "clipped: 100 % wrong", True),
        Located(Path("a b/train.py"), Place(9, 1), "AMP302", "deprecated", False),
        Located(Path("book.ipynb"), Place(2, 1, cell=4), "AMP201", "clipped", False),
    ],
    unread=[Unread(Path("old.py"), "not Python 3", 7)],
    files=5,
)


def rendered(form: str, report: Report = REPORT) -> str:
    return "\n".join(FORMATS[form](report))


def test_text() -> None:
    """One line for a finding, with the place that editors know, the cell, and the mark of a fix."""
    lines = rendered("text").split("\n")

    assert lines[0].startswith("a b/train.py:3:5: AMP201 [*] clipped: 100 % wrong; call `scaler.unscale_(optimizer)`")
    assert lines[2].startswith("book.ipynb:cell 4:2:1: AMP201 clipped; ")
    assert len(lines) == 3
    assert REPORT.summary() == "3 findings in 2 of 5 files; --fix corrects 1 of them; 1 file not read"
    assert Report(files=1, fixed=2).summary() == "2 findings fixed; 0 findings in 1 file"


def test_json() -> None:
    data = json.loads(rendered("json"))

    assert [(one["path"], one["cell"], one["line"], one["column"], one["code"]) for one in data["findings"]] == [
        ("a b/train.py", None, 3, 5, "AMP201"),
        ("a b/train.py", None, 9, 1, "AMP302"),
        ("book.ipynb", 4, 2, 1, "AMP201"),
    ]
    assert data["findings"][0]["name"] == "clip-scaled"
    assert [one["level"] for one in data["findings"]] == ["error", "warning", "error"]
    assert data["unread"] == [{"path": "old.py", "line": 7, "reason": "not Python 3"}]


def test_github() -> None:
    """Workflow commands, in which per cent signs, colons and commas of values are escaped."""
    lines = rendered("github").split("\n")

    assert lines[0].startswith(
        "::error file=a b/train.py,line=3,col=5,title=AMP201 clip-scaled::clipped: 100 %25 wrong;"
    )
    assert lines[1].startswith("::warning file=a b/train.py,line=9,col=1,title=AMP302 ")
    assert lines[2].startswith("::error file=book.ipynb,title=AMP201 clip-scaled::cell 4: clipped;")
    assert lines[3] == "::error file=old.py,line=7::not Python 3"
    odd = Report([Located(Path("a,b:c.py"), Place(1, 1), "AMP201", "x", False)])
    assert rendered("github", odd).startswith("::error file=a%2Cb%3Ac.py,line=1,")


# The objects of SARIF 2.1.0 that occur, each with its properties and their types: an object, a list of objects, or a
# plain type. None has further properties in the schema. The first of each that ends with "!" must be there.
TEXT = {"text!": str}
LOCATION = {
    "physicalLocation": {"artifactLocation": {"uri": str}, "region": {"startLine": int, "startColumn": int}},
}
LEVELS = {"none", "note", "warning", "error"}
SARIF = {
    "$schema": str,
    "version!": {"2.1.0"},
    "runs!": [
        {
            "tool!": {
                "driver!": {
                    "name!": str,
                    "semanticVersion": str,
                    "rules": [
                        {
                            "id!": str,
                            "name": str,
                            "shortDescription": TEXT,
                            "fullDescription": TEXT,
                            "help": TEXT,
                            "defaultConfiguration": {"level": LEVELS},
                        }
                    ],
                }
            },
            "columnKind": {"utf16CodeUnits", "unicodeCodePoints"},
            "invocations": [
                {
                    "executionSuccessful!": bool,
                    "toolExecutionNotifications": [{"level": LEVELS, "message!": TEXT, "locations": [LOCATION]}],
                }
            ],
            "results": [{"ruleId": str, "ruleIndex": int, "level": LEVELS, "message!": TEXT, "locations": [LOCATION]}],
        }
    ],
}


def check_shape(value: Any, shape: Any) -> None:
    """Check an object against properties and types as those of `SARIF`."""
    if isinstance(shape, list):
        assert isinstance(value, list)
        for each in value:
            check_shape(each, shape[0])
    elif isinstance(shape, dict):
        assert isinstance(value, dict)
        assert {key.removesuffix("!") for key in shape} >= set(value)
        assert {key.removesuffix("!") for key in shape if key.endswith("!")} <= set(value)
        for key, inner in shape.items():
            if key.removesuffix("!") in value:
                check_shape(value[key.removesuffix("!")], inner)
    elif isinstance(shape, set):
        assert value in shape
    else:
        assert type(value) is shape


def check_sarif(log: dict[str, Any]) -> None:
    """What the schema of SARIF 2.1.0 asks of the parts that are used here, and what readers of it rely on."""
    check_shape(log, SARIF)
    for run in log["runs"]:
        identifiers = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
        assert len(set(identifiers)) == len(identifiers)
        for result in run["results"]:
            assert identifiers[result["ruleIndex"]] == result["ruleId"]
            for location in result["locations"]:
                physical = location["physicalLocation"]
                assert " " not in physical["artifactLocation"]["uri"]
                assert all(number >= 1 for number in physical["region"].values())


def test_sarif() -> None:
    """A log with a rule for each code that occurs, results that refer to it, and what was not read as a note."""
    log = json.loads(rendered("sarif"))

    check_sarif(log)
    run = log["runs"][0]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["AMP201", "AMP302"]
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    assert places[0] == {"artifactLocation": {"uri": "a%20b/train.py"}, "region": {"startLine": 3, "startColumn": 5}}
    assert run["results"][2]["message"]["text"].startswith("cell 4:2:1: clipped")
    assert run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"] == "not Python 3"
    check_sarif(json.loads(rendered("sarif", Report())))
    log["runs"][0]["results"][0]["column"] = 1
    with pytest.raises(AssertionError):
        check_sarif(log)
