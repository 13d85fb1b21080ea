"""Another reference for runs that exist: one more look, which is counted."""

import json
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.run_files import RunFile
from ampcompare.experiment.reload_report import reload_comparison
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.results.report.base import write_reports
from tests.experiment.test_interim_analyses import _compare


def test_it_is_a_look_that_is_counted(tmp_path: Path) -> None:
    """The runs are compared with the other arm at what the first look left."""
    _compare(tmp_path, range(3))
    other = reload_comparison(tmp_path, reference="half")
    assert (other.reference, other.look) == ("half", 2)
    assert other.error_rate == pytest.approx(0.005)
    assert {row.arm for row in other.arms if str(row.quality)} == {row.arm for row in other.arms} - {"half"}
    looks = RunDirectory(tmp_path).looks()
    assert [look.reference for look in looks] == ["fp32", "half"]


def test_the_same_reference_again_spends_nothing(tmp_path: Path) -> None:
    """The second report against an arm is the first one again."""
    _compare(tmp_path, range(3))
    first = reload_comparison(tmp_path, reference="half")
    before = (RunDirectory(tmp_path).journal_file).read_bytes()
    again = reload_comparison(tmp_path, reference="half")
    assert (again.look, again.error_rate, again.arms) == (first.look, first.error_rate, first.arms)
    own = reload_comparison(tmp_path, reference="fp32")
    assert own == reload_comparison(tmp_path)
    assert (RunDirectory(tmp_path).journal_file).read_bytes() == before


def test_runs_on_the_way_are_not_tested(tmp_path: Path) -> None:
    """Where cells of the plan are missing, another reference is shown without a test, and is no look."""
    _compare(tmp_path, range(3), test=False)
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "cells" / plan["cells"]["half@2"] / "record.json").unlink()
    shown = reload_comparison(tmp_path, reference="half")
    assert (shown.reference, shown.error_rate) == ("half", 0)
    assert RunDirectory(tmp_path).looks() == []


def test_a_name_that_is_none(tmp_path: Path) -> None:
    _compare(tmp_path, range(3))
    with pytest.raises(ConfigError, match=r"--reference 'hal' is not one of the arms of these runs: fp32, .*half"):
        reload_comparison(tmp_path, reference="hal")
    assert len(RunDirectory(tmp_path).looks()) == 1


def test_a_folder_in_use_is_not_written(tmp_path: Path) -> None:
    """While another command owns the run directory, a look would race with it."""
    _compare(tmp_path, range(3))
    with RunDirectory(tmp_path).lock(), pytest.raises(ConfigError, match="in use by another command"):
        reload_comparison(tmp_path, reference="half")
    assert len(RunDirectory(tmp_path).looks()) == 1


def test_a_look_that_cannot_be_written_is_not_tested(tmp_path: Path) -> None:
    """Where the lock cannot be made, nothing is tested, and the report says why."""
    _compare(tmp_path, range(3))
    (tmp_path / RunFile.LOCK).unlink(missing_ok=True)
    (tmp_path / RunFile.LOCK).mkdir()
    shown = reload_comparison(tmp_path, reference="half")
    assert shown.error_rate == 0
    assert any("the run directory is not writable" in line for line in shown.reading)


def test_a_report_without_a_journal_is_not_tested(tmp_path: Path) -> None:
    """A report.json cannot count a look: it is shown against the other arm without verdicts."""
    _compare(tmp_path, range(3), save=write_reports)
    shown = reload_comparison(tmp_path / "report.json", reference="half")
    assert (shown.reference, shown.error_rate) == ("half", 0)
    assert any("there is no journal here to count it" in line for line in shown.reading)
