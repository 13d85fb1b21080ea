"""The forms of a report."""

import json
from pathlib import Path

from ampcompare.source.document import UserPosition
from ampcompare.source.lint.report import FORMATS, LocatedFinding, Report, UnreadFile

REPORT = Report(
    findings=[
        LocatedFinding(Path("a b/train.py"), UserPosition(3, 5), "AMP201", "clipped: 100 % wrong", True),
        LocatedFinding(Path("a b/train.py"), UserPosition(9, 1), "AMP302", "deprecated", False),
        LocatedFinding(Path("book.ipynb"), UserPosition(2, 1, cell=4), "AMP201", "clipped", False),
    ],
    unread=[UnreadFile(Path("old.py"), "not Python 3", 7)],
    files=5,
)


def rendered(form: str, report: Report = REPORT) -> str:
    return "\n".join(FORMATS[form](report))


def test_text() -> None:
    """One line for a finding, with the place that editors know, the cell, and the mark of a fix."""
    lines = rendered("text").split("\n")

    assert lines[0].startswith(
        "a b/train.py:3:5: AMP201 [*] clipped: 100 % wrong; call `scaler.unscale_(optimizer)`"
    )
    assert lines[2].startswith("book.ipynb:cell 4:2:1: AMP201 clipped; ")
    assert len(lines) == 3
    assert REPORT.summary() == "3 findings in 2 of 5 files; --fix corrects 1 of them; 1 file not read"
    assert Report(files=1, fixed=2).summary() == "2 findings fixed; 0 findings in 1 file"


def test_json() -> None:
    data = json.loads(rendered("json"))

    assert [
        (one["path"], one["cell"], one["line"], one["column"], one["code"]) for one in data["findings"]
    ] == [
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
    odd = Report([LocatedFinding(Path("a,b:c.py"), UserPosition(1, 1), "AMP201", "x", False)])
    assert rendered("github", odd).startswith("::error file=a%2Cb%3Ac.py,line=1,")


def test_sarif() -> None:
    """Each result has a rule that is described, a URI, a place that code scanning can show, and a fingerprint."""
    document = json.loads(rendered("sarif"))
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [each["id"] for each in rules] == ["AMP201", "AMP302"]
    assert [rules[each["ruleIndex"]]["id"] for each in run["results"]] == ["AMP201", "AMP302", "AMP201"]
    assert [each["level"] for each in run["results"]] == ["error", "warning", "error"]
    places = [each["locations"][0]["physicalLocation"] for each in run["results"]]
    assert places[0] == {
        "artifactLocation": {"uri": "a%20b/train.py"},
        "region": {"startLine": 3, "startColumn": 5},
    }
    assert places[2] == {"artifactLocation": {"uri": "book.ipynb"}}
    assert run["results"][2]["message"]["text"].startswith("cell 4, line 2: clipped; ")
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is False
    (unread,) = invocation["toolExecutionNotifications"]
    assert unread["locations"][0]["physicalLocation"]["region"] == {"startLine": 7}


def test_sarif_knows_a_finding_again_that_has_moved_and_tells_equal_ones_apart() -> None:
    def fingerprints(*lines: int) -> list[str]:
        found = [
            LocatedFinding(Path("train.py"), UserPosition(line, 1), "AMP201", "clipped", False)
            for line in lines
        ]
        (run,) = json.loads(rendered("sarif", Report(found)))["runs"]
        return [each["partialFingerprints"]["codeAndMessage/v1"] for each in run["results"]]

    assert fingerprints(3, 9) == fingerprints(5, 11)
    assert len(set(fingerprints(3, 9))) == 2


def test_sarif_without_findings_is_a_whole_run() -> None:
    (run,) = json.loads(rendered("sarif", Report(files=2)))["runs"]
    assert run["results"] == []
    assert run["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]
