"""Where `report` writes, what it opens, and which run directory it takes by itself."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampcompare.cli import main
from ampcompare.cli.comparison_output import show_failed_gates
from ampcompare.results.report.base import write_reports
from tests.experiment.test_interim_analyses import _compare

pytest.importorskip("jinja2", reason="the page needs the extra html")
Answer = tuple[int, str, str]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Call the command in an empty folder, and return its exit code, output and messages."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Answer:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Make a run directory of that name, with three seeds of each arm that nothing trained."""

    def make(name: str) -> Path:
        write_reports(_compare(tmp_path / name, range(3)), tmp_path / name)
        return tmp_path / name

    return make


def test_a_name_gives_the_format(call: Any, write: Any, tmp_path: Path) -> None:
    """`-o page.html` writes HTML without --format; a folder gets the file under its usual name; - is stdout."""
    run = write("one")
    assert call("report", str(run), "-o", "page.html")[2].endswith("report: page.html\n")
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    (tmp_path / "sent").mkdir()
    assert call("report", str(run), "--format", "md", "-o", "sent")[0] == 0
    assert (tmp_path / "sent" / "report.md").read_text().startswith("# Comparison")
    code, out, _ = call("report", str(run), "--format", "html", "-o", "-")
    assert (code, out.startswith("<!DOCTYPE html>")) == (0, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-o", "page.pdf"), "--output 'page.pdf' does not say which format; add --format table|md|"),
        (
            ("--open", "--format", "md"),
            "--open is not for --format, unless that is html; give only one of them",
        ),
        (("--open", "-o", "-"), "--open is not for --output -, which is standard output"),
    ],
)
def test_options_that_do_not_fit(call: Any, write: Any, options: tuple[str, ...], said: str) -> None:
    """A format that is not known, and two options that contradict each other, are one clear line."""
    code, out, err = call("report", str(write("one")), *options)
    assert (code in (2, 4), out) == (True, "")
    assert said in err
    assert err.count("\n") == 1


def test_the_page_opens_in_the_browser(
    call: Any, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--open` writes the page into the run directory, or where -o says, and calls the browser with its address."""
    script, seen = tmp_path / "browser", tmp_path / "seen"
    script.write_text(f'#!/bin/sh\necho "$1" >> {seen}\n')
    script.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(script))
    # else the BROWSER of the first call in this process stays
    monkeypatch.setattr("webbrowser._tryorder", None)
    run = write("one")
    (run / "report.html").unlink()
    assert call("report", str(run), "--open")[0] == 0
    assert call("report", str(run), "--open", "-o", "other.html")[0] == 0
    assert seen.read_text().split() == [
        path.as_uri() for path in (run / "report.html", tmp_path / "other.html")
    ]
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_without_a_name_the_newest_run_is_shown(call: Any, write: Any) -> None:
    """`report` alone takes the run directory in runs/ that changed last, and names it and the one before it."""
    code, out, err = call("report")
    assert (code, out) == (2, "")
    assert "there is no run directory in" in err
    for age, name in ((100, "runs/old"), (10, "runs/new")):
        folder = write(name)
        for path in (folder / "cells", folder / "report.json", folder / "plan.json"):
            os.utime(path, (1_700_000_000 - age,) * 2)
    code, out, err = call("report")
    assert (code, err) == (
        0,
        "the newest run directory: runs/new; the one before it: ampcompare report runs/old\n",
    )
    assert out == call("report", "runs/new")[1]


def test_run_directories_are_listed(call: Any, write: Any) -> None:
    """`list runs` has a line for each run directory with its arms, seeds and cells, and none is no error."""
    assert call("list", "runs")[0] == 0
    write("runs/first")
    code, out, _ = call("list", "runs")
    assert code == 0
    assert out.splitlines()[0].split() == ["folder", "changed", "tag", "arms", "seeds", "done", "headline"]
    assert "runs/first" in out
    assert "6/6" in out
    assert call("list", "runs", "absent")[0] == 2
    assert "FOLDER is for list runs" in call("list", "arms", "x")[2]


def test_equal_runs_are_not_joined(call: Any, write: Any) -> None:
    code, out, err = call("report", str(write("a")), str(write("b")))
    assert (code, out) == (2, "")
    assert "one run would count twice" in err


def test_record_of_exec(call: Any, tmp_path: Path) -> None:
    """It is a report in each format."""
    rows = [
        {"format": "ampcompare-exec", "schema": 1, "script": "<b>x</b>.py", "engine": "compat"},
        {"kind": "initialize", "opt_level": "O2", "optimizers": {"0": "SGD"}},
        {"kind": "step", "optimizer": 0, "applied": True, "seconds": 0.25},
    ]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, page, _ = call("report", "a.jsonl", "--format", "html")
    assert (code, page.startswith("<!DOCTYPE html>")) == (0, True)
    assert "<b>x</b>" not in page
    assert "1 step, 0 skipped, no loss scale</h1>" in page
    assert "optimizer 0 (SGD) & 1 & 0" in call("report", "a.jsonl", "--format", "latex")[1]


@pytest.mark.parametrize(("exit_code", "told"), [(0, True), (1, True), (3, False)])
def test_limits_are_told_unless_arms_failed(
    exit_code: int, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where arms have failed, that is the answer, and limits would hide it."""
    checks = [
        SimpleNamespace(arm="half", gate="time>1.1x", skipped="", failure="time 1.2x"),
        SimpleNamespace(arm="fp32", gate="time>1.1x", skipped="no time", failure=""),
    ]
    show_failed_gates(SimpleNamespace(exit_code=exit_code, checks=checks), quiet=False)  # type: ignore[arg-type]
    lines = ["note: fp32: time>1.1x is not checked: no time", "failed: half: time 1.2x"]
    assert capsys.readouterr().err.splitlines() == lines * told
