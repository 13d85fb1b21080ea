"""The report as text, and answers of child processes: done, raised, died, hung."""

from typing import Any

import pytest

from ampcompare.doctor.examine import Examination, render_examination
from ampcompare.doctor.finding import Check, ask
from ampcompare.doctor.needs import ArmNeeds

LONG = "pip install " + "x" * 150
FINDINGS = (
    Check("Software", "torch", "2.13.0", "ok"),
    Check("Software", "a name beyond its column", "value", "note", "because " * 20),
    Check("Apex", "apex", "broken", "problem", "it is\nbroken", (LONG, "second")),
)
ARMS = (
    ArmNeeds("fp32", "cpu", (), ("slow",), ()),
    ArmNeeds("apex:O1,engine=nvidia", "cpu", ("no Apex", "no GPU"), (), ("fix",)),
)


def _rendered(*arms: ArmNeeds, findings: tuple[Check, ...] = FINDINGS, width: int = 80) -> list[str]:
    text = render_examination(Examination(findings, arms), width=width, style=lambda word, verdict: word)
    assert text.endswith("\n")
    return text.splitlines()


def test_lines_fit_but_for_those_to_paste() -> None:
    """Every line fits the terminal; a remedy is one line, whatever its length."""
    lines = _rendered(*ARMS)
    assert [line.split("$ ")[1] for line in lines if "$ " in line] == [LONG, "second", "fix"]
    assert all(len(line) <= 80 for line in lines if LONG not in line)
    assert lines[0] == "Software"
    assert "  ok      torch             2.13.0" in lines


def test_what_is_wrong_comes_last() -> None:
    """The last lines name what is wrong, arms included, or say that nothing is."""
    assert _rendered(*ARMS)[-1] == "2 problems: apex, apex:O1,engine=nvidia"
    assert _rendered(findings=FINDINGS[:2])[-1] == "No problems found."
    warning = Check("GPU", "cuda:0", "busy", "warning")
    assert _rendered(findings=(warning,))[-1] == "1 warning: cuda:0"


@pytest.mark.parametrize(
    ("body", "how", "failure"),
    [
        ("", "done", ""),
        ("raise OSError('first line\\nsecond')", "raised", "OSError: first line second"),
        ("raise KeyboardInterrupt", "raised", "KeyboardInterrupt"),
        ("import sys; print('x' * 100_000, flush=True); sys.exit(2)", "raised", "SystemExit: 2"),
        ("import os; os.abort()", "died", "the process was killed by SIGABRT"),
        (
            "import os; os.write(2, b'cannot go on\\n'); os._exit(7)",
            "died",
            "exit code 7 and no answer (cannot go on)",
        ),
        ("import time; time.sleep(60)", "hung", "it had not ended after 1 s and was killed"),
    ],
)
def test_each_way_to_end(site: Any, body: str, how: str, failure: str) -> None:
    """However an import ends, the question has an answer, and the sentence says how."""
    site.write("amp_C.py", body)
    answer = ask("apex_kernels", path=site.path, seconds=1 if how == "hung" else 30)
    assert answer.how == how
    assert answer.has_returned == (how == "done")
    assert answer.failure.endswith(failure)


def test_warnings_come_with_the_answer(site: Any) -> None:
    """What is warned of on the way, as by an old driver, is kept."""
    site.write("amp_C.py", "import warnings; warnings.warn('the driver is too old')")
    answer = ask("apex_kernels", path=site.path)
    assert answer.warnings == ["the driver is too old"]
    assert answer.value["file"] == str(site.folder / "amp_C.py")
