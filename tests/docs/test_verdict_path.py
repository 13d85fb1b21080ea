"""The path of a verdict that design.md draws is the one that a call of `report` takes."""

import functools
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ampcompare.cli import main
from tests.experiment.test_interim_analyses import _compare

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "ampcompare"
Function = tuple[str, str]  # file below the package, and name


def functions_of_table() -> list[Function]:
    """The six of the table, in their order."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("**A verdict** is made")[2].partition("\nBack in file 1")[0]
    return re.findall(r"^\| \d \| `([\w/]+\.py)` \| `(\w+)` \|", table, flags=re.MULTILINE)


def calls_of_report(folder: Path) -> list[tuple[Function, list[Function]]]:
    """Each function of the package that `report` calls, with those that have called it, from the nearest."""
    found: list[tuple[Function, list[Function]]] = []

    @functools.cache  # of each of the frames below each call
    def own_path(file: str) -> str:
        path = Path(file)
        return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""

    def function_of(frame: FrameType) -> Function:
        return own_path(frame.f_code.co_filename), frame.f_code.co_name

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (called := function_of(frame))[0]:
            above, callers = frame.f_back, []
            while above is not None:
                callers.append(function_of(above))
                above = above.f_back
            found.append((called, callers))

    sys.setprofile(note)
    try:
        code = main(["report", str(folder)])
    finally:
        sys.setprofile(None)
    assert code == 0
    return found


def test_the_table_is_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are called in that order: each of the first three inside the one before, the others by the third."""
    _compare(tmp_path / "run", range(3))
    capsys.readouterr()
    path = functions_of_table()
    assert len(path) == 6
    calls = calls_of_report(tmp_path / "run")
    order = [called for called, _ in calls]
    assert sorted(path, key=order.index) == path
    callers = dict(reversed(calls))
    own = {function: [each for each in callers[function] if each in path] for function in path}
    assert [own[function][:1] for function in path] == [
        [],
        [path[0]],
        [path[1]],
        *([path[2]] for _ in path[3:]),
    ]
    assert own[path[2]] == [path[1], path[0]]
    printed = [
        ("results/report/documents/comparison.py", "comparison_document"),
        ("cli/output.py", "print_document"),
    ]
    for function in printed:
        assert path[0] in callers[function]
        assert order.index(function) > order.index(path[-1])
    shown = capsys.readouterr().out
    assert "less accurate than fp32" in shown
    assert "worse" in shown


def test_verdict_is_made_once_for_each_quantity(tmp_path: Path) -> None:
    """No verdict of a row is tested anywhere else on that path."""
    _compare(tmp_path / "run", range(3))
    tests = [
        callers for called, callers in calls_of_report(tmp_path / "run") if called[1] == "decide_verdicts"
    ]
    assert [callers[0][1] for callers in tests] == ["verdicts_on"] * 3
