"""The three forms of a report."""

import json
from pathlib import Path

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
