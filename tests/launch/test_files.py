"""What a new run of a cell does with the files of an earlier one."""

from __future__ import annotations

from pathlib import Path

from ampcompare.launch.base import set_aside


def test_files_of_an_earlier_run_are_kept_under_another_name(tmp_path: Path) -> None:
    """Record and steps move aside together, so that a run that is cut short leaves no old record beside new steps."""
    (tmp_path / "record.json").write_text("old record")
    (tmp_path / "steps.jsonl").write_text("old steps")
    set_aside(tmp_path)
    assert not (tmp_path / "record.json").exists()
    assert (tmp_path / "record.previous.json").read_text() == "old record"
    assert (tmp_path / "steps.previous.jsonl").read_text() == "old steps"
    set_aside(tmp_path)
    assert (tmp_path / "record.previous.json").read_text() == "old record"
