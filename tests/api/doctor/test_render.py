"""The report as text."""

from ampcompare.api.doctor.examine import Examination, render
from ampcompare.api.doctor.finding import Check
from ampcompare.api.doctor.needs import ArmNeeds

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
    text = render(Examination(findings, arms), width=width, style=lambda word, verdict: word)
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
