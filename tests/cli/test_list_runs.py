"""The rows of `list runs`: what they show of a run directory, as text that steers no terminal."""

from datetime import UTC, datetime
from pathlib import Path

from ampcompare.cli.list_command import run_row
from ampcompare.experiment.run_directory import RunBrief

CHANGED = datetime(2024, 5, 6, 7, 8, tzinfo=UTC)


def test_a_row_of_a_run_directory() -> None:
    """A row has folder, date, tag, the first arms, seeds as ranges, the cells done of those planned, the headline."""
    arms = ("fp32", "half", "native:fp16", "apex:O1", "apex:O2")
    run = RunBrief(Path("runs/a"), CHANGED, "night", arms, (0, 1, 7), (3, 4), "Use half.")
    shown = "fp32, half, native:fp16, apex:O1 and 1 more"
    assert run_row(run) == ["runs/a", "2024-05-06 07:08", "night", shown, "0-1,7", "3/4", "Use half."]
