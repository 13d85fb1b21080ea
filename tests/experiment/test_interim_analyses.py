"""The journal of a run directory: what is a look, another reference among them, and what is said of it."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.base.files.run_files import RunFile
from ampcompare.experiment.matrix import cross_arms_with_settings
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.plan import make_plan_of_rows
from ampcompare.experiment.reload_report import reload_comparison
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.run_plan import run_plan
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.report.base import FORMATS, write_reports
from ampcompare.settings.config import RunConfig
from tests.experiment import pretend

ARMS = ("fp32", "half")
WORSE = 40  # counts of 1000 that half loses


class Pretend(pretend.Pretend):
    """Every launch of a cell takes a little longer than the one before."""

    def __init__(self, worse: int = WORSE, fail: Sequence[int] = ()) -> None:
        super().__init__(pause=0.0)
        self.worse, self.fail = worse, fail

    def correct(self, config: RunConfig) -> int:
        self.seconds = float(len(self.asked))
        seed = config.recipe.seed
        return 500 + seed % 3 - (self.worse + seed % 2 if config.arm == "half" else 0)


def _compare(
    folder: Path,
    seeds: Sequence[int],
    arms: Sequence[str] = ARMS,
    launcher: Pretend | None = None,
    **options: Any,
) -> Comparison:
    terms = options.pop("terms", Terms(margin=0.5))
    plan = make_plan_of_rows(
        RunConfig(), cross_arms_with_settings(arms, ()), seeds, options.pop("reference", None)
    )
    return run_plan(plan, folder, launcher or Pretend(), terms=terms, **options)


@pytest.fixture(scope="module")
def looked_three_times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose journal has three looks, for copies."""
    folder = tmp_path_factory.mktemp("looks")
    for seeds in (range(3), range(4), range(5)):
        _compare(folder, seeds)
    return folder


def _half(comparison: Comparison) -> ArmSummary:
    return next(row for row in comparison.arms if row.arm == "half")


def test_one_look_is_written_and_tested(tmp_path: Path) -> None:
    """A comparison that ends leaves a line with its seeds, pairs, margins and cells."""
    comparison = _compare(tmp_path, range(3))
    (look,) = RunDirectory(tmp_path).read_looks()
    assert (look.number, look.seeds, look.pairs) == (1, [0, 1, 2], {"half": 3})
    assert look.error_rate == pytest.approx(0.04)
    assert (look.margin, look.time_margin, look.reference, look.arms) == (0.5, 0.02, "fp32", list(ARMS))
    assert set(look.cells) == {f"{arm}@{seed}" for arm in ARMS for seed in range(3)}
    assert look.written
    assert (comparison.look, comparison.looks, comparison.error_rate) == (1, [look], look.error_rate)
    assert str(_half(comparison).quality) == "worse"
    assert _half(comparison).quality.confidence == pytest.approx(0.96)


def test_the_same_again_is_no_look(tmp_path: Path) -> None:
    """The same command again, and a report of the folder, change neither the journal nor a verdict."""
    first = _compare(tmp_path, range(3))
    before = (RunDirectory(tmp_path).journal_file).read_bytes()
    for _ in range(3):
        assert _compare(tmp_path, range(3)) == first
        assert reload_comparison(tmp_path) == first
    assert (RunDirectory(tmp_path).journal_file).read_bytes() == before


def test_more_seeds_are_a_second_look(tmp_path: Path) -> None:
    """More seeds are tested at what the first look has left, and every format says so."""
    _compare(tmp_path, range(3))
    second = _compare(tmp_path, range(6))
    assert second.look == 2
    assert second.error_rate == pytest.approx(0.005)
    assert [look.number for look in RunDirectory(tmp_path).read_looks()] == [1, 2]
    for form in ("md", "html", "json"):
        if not FORMATS[form].missing_packages:
            assert "Look 2 at these arms, tested at an error rate of 0.5 %" in _shown(second, form)
    assert "look 2 at these runs, error rate 0.5 % over all arms" in _shown(second, "table")


def _shown(comparison: Comparison, form: str) -> str:
    """Return a report on one line, as it is without options."""
    return " ".join(FORMATS[form].make_reporter().render(comparison).split())


def test_a_first_look_at_fewer_seeds_again(tmp_path: Path) -> None:
    """Back to the seeds of the first look, its verdict is shown at its level."""
    first = _compare(tmp_path, range(3))
    _compare(tmp_path, range(6))
    back = _compare(tmp_path, range(3))
    assert (back.look, back.error_rate, back.arms) == (1, first.error_rate, first.arms)


@pytest.mark.parametrize(
    ("options", "looks"),
    [
        ({"terms": Terms(margin=0.5, prefer="memory", tag="other")}, 1),
        ({"terms": Terms(margin=3.0)}, 2),
        ({"pilot": range(5)}, 2),
        ({"force": True}, 2),
    ],
)
def test_what_is_another_look(tmp_path: Path, options: dict[str, Any], looks: int) -> None:
    """Another margin, test or run of the same cells is tested at what is left; another preference or tag is not."""
    launcher = Pretend()
    first = _compare(tmp_path, range(5), launcher=launcher)
    again = _compare(tmp_path, range(5), launcher=launcher, **options)
    assert (again.look, len(RunDirectory(tmp_path).read_looks())) == (looks, looks)
    assert again.error_rate == (first.error_rate if looks == 1 else pytest.approx(0.005))


def test_a_reference_chosen_after_the_runs_is_another_look(tmp_path: Path) -> None:
    """Another reference on the same runs trains nothing, and a report has it."""
    _compare(tmp_path, range(3))
    launcher = Pretend()
    changed = _compare(tmp_path, range(3), launcher=launcher, reference="half")
    assert (len(launcher.asked), changed.look, changed.reference) == (0, 2, "half")
    assert {row.arm: str(row.quality) for row in changed.arms} == {"fp32": "better", "half": ""}
    assert reload_comparison(tmp_path).reference == "half"


def test_two_seeds_spend_nothing(tmp_path: Path) -> None:
    pilot = _compare(tmp_path, [0, 1])
    assert (pilot.look, pilot.error_rate) == (0, 0)
    assert not any(line.startswith("Look") for line in pilot.reading)
    tested = _compare(tmp_path, range(3), terms=Terms(margin=2.0))
    assert tested.look == 1
    assert tested.error_rate == pytest.approx(0.04)


def test_nothing_is_tested_on_the_way(tmp_path: Path) -> None:
    """A report that an interrupted command leaves has no verdict, and the command called again has its only look."""

    class Impatient(Observer):
        def begin(self, config: RunConfig, number: int, total: int) -> None:
            if number == 9:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _compare(tmp_path, range(6), observer=Impatient(), save=write_reports)
    for comparison in (reload_comparison(tmp_path / "report.json"),):
        assert _half(comparison).pairs == 4
        assert str(_half(comparison).quality) == "inconclusive (not tested)"
        assert _half(comparison).quality.low is None
        assert any(line.startswith("Nothing was tested: some runs") for line in comparison.reading)
    assert RunDirectory(tmp_path).read_looks() == []
    whole = _compare(tmp_path, range(6))
    assert whole.look == 1
    assert whole.error_rate == pytest.approx(0.04)


def test_a_report_of_runs_on_the_way_tests_nothing(tmp_path: Path) -> None:
    """A folder that a second command is filling is reported without a test, as this would be a look not counted."""
    _compare(tmp_path, range(3))
    _compare(tmp_path, range(6), test=False)
    shown = reload_comparison(tmp_path)
    assert str(_half(shown).quality) == "inconclusive (not tested)"
    assert len(RunDirectory(tmp_path).read_looks()) == 1


def test_a_planned_single_look_has_all_and_leaves_none(tmp_path: Path) -> None:
    first = _compare(tmp_path, range(3), terms=Terms(margin=0.5, looks=1))
    assert first.error_rate == 0.05
    assert _half(first).quality.confidence == pytest.approx(0.95)
    second = _compare(tmp_path, range(6), terms=Terms(margin=0.5, looks=1))
    assert (second.look, second.error_rate) == (2, 0)
    assert str(_half(second).quality) == "inconclusive (not tested)"
    assert any(line.startswith("Nothing was tested: earlier looks have spent") for line in second.reading)
    assert _compare(tmp_path, range(6)).error_rate == 0


def test_failed_runs_are_not_seen(tmp_path: Path) -> None:
    """A failed cell is part of no look; that it ran later is a look and no repeat."""
    _compare(tmp_path, range(4), launcher=Pretend(fail=[3]))
    assert RunDirectory(tmp_path).read_looks()[0].seeds == [0, 1, 2]
    whole = _compare(tmp_path, range(4))
    assert whole.look == 2


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda lines: [lines[0][:40], *lines[1:]], 1),
        (lambda lines: [*lines[:2], lines[2][:-20]], 3),
        (lambda lines: [*lines, "[]"], 4),
        (lambda lines: [*lines, "{}"], 4),
    ],
)
def test_a_damaged_journal_is_named(looked_three_times: Path, tmp_path: Path, damage: Any, line: int) -> None:
    """A line that was cut is named by both commands, and nothing runs or is overwritten."""
    shutil.copytree(looked_three_times, tmp_path, dirs_exist_ok=True)
    path = RunDirectory(tmp_path).journal_file
    path.write_text("".join(f"{text}\n" for text in damage(path.read_text().splitlines())))
    before, launcher = path.read_bytes(), Pretend()
    commands: list[Callable[[], object]] = [
        lambda: _compare(tmp_path, range(9), launcher=launcher),
        lambda: reload_comparison(tmp_path),
    ]
    for command in commands:
        with pytest.raises(
            RecordError, match=rf"journal.jsonl, line {line}, is damaged: .*another --output-dir"
        ):
            command()
    assert (path.read_bytes(), len(launcher.asked)) == (before, 0)


def test_the_journal_is_strict_json(tmp_path: Path) -> None:
    """Each line is one JSON object with the look; what older versions wrote next to it is not read."""
    _compare(tmp_path, range(3))
    _compare(tmp_path, range(4))
    lines = [json.loads(line) for line in (RunDirectory(tmp_path).journal_file).read_text().splitlines()]
    assert [list(line) for line in lines] == [["look"]] * 2
    looks = RunDirectory(tmp_path).read_looks()
    older = "".join(json.dumps({"before": "0" * 16, **line}) + "\n" for line in lines)
    RunDirectory(tmp_path).journal_file.write_text(older)
    assert RunDirectory(tmp_path).read_looks() == looks


def test_folders_of_versions_without_a_journal_are_read_as_before(tmp_path: Path) -> None:
    """Records of an earlier version, whose plan names no journal, are tested at 5 % when they are read."""
    _compare(tmp_path, range(3))
    (RunDirectory(tmp_path).journal_file).unlink()
    plan = json.loads((tmp_path / "plan.json").read_text())
    del plan["journal"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    shown = reload_comparison(tmp_path)
    assert (shown.look, shown.error_rate, shown.looks) == (None, 0.05, [])
    assert str(_half(shown).quality) == "worse"


def test_a_journal_without_its_plan_tests_nothing(tmp_path: Path) -> None:
    """Without plan.json the runs are shown, and not tested at a fresh 5 %."""
    _compare(tmp_path, range(3))
    (tmp_path / "plan.json").unlink()
    shown = reload_comparison(tmp_path)
    assert str(_half(shown).quality) == "inconclusive (not tested)"
    assert any("no plan.json" in line for line in shown.reading)


def test_it_is_a_look_that_is_counted(tmp_path: Path) -> None:
    """The runs are compared with the other arm at what the first look left."""
    _compare(tmp_path, range(3))
    other = reload_comparison(tmp_path, reference="half")
    assert (other.reference, other.look) == ("half", 2)
    assert other.error_rate == pytest.approx(0.005)
    assert {row.arm for row in other.arms if str(row.quality)} == {row.arm for row in other.arms} - {"half"}
    looks = RunDirectory(tmp_path).read_looks()
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
    assert RunDirectory(tmp_path).read_looks() == []


def test_a_name_that_is_none(tmp_path: Path) -> None:
    _compare(tmp_path, range(3))
    with pytest.raises(
        ConfigError, match=r"--reference 'hal' is not one of the arms of these runs: fp32, .*half"
    ):
        reload_comparison(tmp_path, reference="hal")
    assert len(RunDirectory(tmp_path).read_looks()) == 1


def test_a_folder_in_use_is_not_written(tmp_path: Path) -> None:
    """While another command owns the run directory, a look would race with it."""
    _compare(tmp_path, range(3))
    with RunDirectory(tmp_path).file_lock(), pytest.raises(ConfigError, match="in use by another command"):
        reload_comparison(tmp_path, reference="half")
    assert len(RunDirectory(tmp_path).read_looks()) == 1


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
