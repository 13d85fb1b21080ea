"""`report DIR DIR`: runs of one comparison from two machines in one table, and what is refused."""

import shutil
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.cli.group import run_command_line
from ampcompare.experiment.join_runs import join_comparison
from ampcompare.experiment.matrix import cross_arms_with_settings
from ampcompare.experiment.plan import make_plan_of_rows
from ampcompare.experiment.reload_report import reload_comparison
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.run_plan import run_plan
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.records.comparison import Comparison
from ampcompare.settings.config import RunConfig
from tests.experiment import pretend

ARMS = ("fp32", "half")


class Pretend(pretend.Pretend):
    """`half` loses a few counts of 1000, by a different number with each seed."""

    def correct(self, config: RunConfig) -> int:
        seed = config.recipe.seed
        return 500 + seed % 3 - (4 + 3 * (seed % 2) if config.arm == "half" else 0)


def _compare(
    folder: Path, seeds: range, arms: tuple[str, ...] = ARMS, margin: float = 0.5, epochs: int = 5
) -> Path:
    config = RunConfig.model_validate({"recipe": {"epochs": epochs}})
    run_plan(
        make_plan_of_rows(config, cross_arms_with_settings(arms, ()), seeds),
        folder,
        Pretend(pause=0.0),
        terms=Terms(margin=margin),
    )
    return folder


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """Seeds 0 to 2 of one machine, and 5 to 8 of another."""
    return [_compare(tmp_path / "here", range(3)), _compare(tmp_path / "there", range(5, 9))]


def _pairs(comparison: Comparison) -> int:
    return next(row for row in comparison.arms if row.arm == "half").pairs


def test_seeds_of_two_machines_are_one_table(machines: list[Path], tmp_path: Path) -> None:
    """The joined rows are those that one machine with all seeds has."""
    joined = join_comparison(machines)
    seeds = [0, 1, 2, 5, 6, 7, 8]
    alone = _compare(tmp_path / "alone", range(3))
    plan = make_plan_of_rows(
        RunConfig.model_validate({"recipe": {"epochs": 5}}), cross_arms_with_settings(ARMS, ()), seeds
    )
    whole = run_plan(plan, alone, Pretend(pause=0.0), terms=Terms(margin=0.5))
    assert _pairs(joined) == len(seeds)
    assert [row.quality.effect for row in joined.arms] == [row.quality.effect for row in whole.arms]
    # the second look at some of the runs
    assert joined.error_rate == whole.error_rate == pytest.approx(0.005)


def test_no_folder_is_named_for_more_seeds(machines: list[Path]) -> None:
    """Seeds that one folder lacks may be those of another: the command of the table is `report` of all of them."""
    joined = join_comparison(machines)
    assert joined.command == f"ampcompare report {machines[0]} {machines[1]}"
    assert not [step for step in joined.next_steps if "--seeds" in step.command]


def test_the_table_is_one_more_look_at_each_folder(machines: list[Path]) -> None:
    """It is written into both journals; the same table again spends nothing, and a folder keeps its own verdict."""
    own = [reload_comparison(folder) for folder in machines]
    joined = join_comparison(machines)
    looks = [RunDirectory(folder).read_looks() for folder in machines]
    assert [[look.error_rate for look in some] for some in looks] == [pytest.approx([0.04, 0.005])] * 2
    again = join_comparison(machines)
    assert (again.arms, again.error_rate) == (joined.arms, joined.error_rate)
    assert [RunDirectory(folder).read_looks() for folder in machines] == looks
    assert [reload_comparison(folder).arms for folder in machines] == [each.arms for each in own]


def test_the_folder_that_was_tested_most_says_what_is_left(machines: list[Path], tmp_path: Path) -> None:
    """A folder with two looks leaves less than one with a single look, in any order."""
    _compare(machines[1], range(5, 10))
    other = [Path(shutil.copytree(folder, tmp_path / f"copy-{folder.name}")) for folder in machines]
    assert (
        join_comparison(machines).error_rate
        == join_comparison(other[::-1]).error_rate
        == pytest.approx(0.0025)
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seeds": range(2, 4)}, r"both have (fp32|half)@2"),
        ({"arms": ("fp32", "native:bf16")}, "their arms differ"),
        ({"margin": 1.0}, "their terms differ"),
        ({"epochs": 4}, r"differs in recipe\.epochs"),
    ],
)
def test_folders_of_two_comparisons_are_refused(
    options: dict[str, object], said: str, machines: list[Path], tmp_path: Path
) -> None:
    """Folders that differ in more than their seeds stay apart, and no journal is written."""
    other = _compare(tmp_path / "other", **{"seeds": range(20, 22), **options})  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=said):
        join_comparison([machines[0], other])
    assert len(RunDirectory(machines[0]).read_looks()) == 1


def test_a_folder_in_use_and_one_without_a_plan(machines: list[Path], tmp_path: Path) -> None:
    """Both are one error that names the folder."""
    with (
        RunDirectory(machines[1]).file_lock().acquire(),
        pytest.raises(ConfigError, match="is in use by another command"),
    ):
        join_comparison(machines)
    with pytest.raises(RecordError, match="is no run directory of `compare`"):
        join_comparison([machines[0], tmp_path])


def test_the_command(machines: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """`report DIR DIR` prints the table of all seeds, and refuses the same folder twice."""
    assert run_command_line(["report", *map(str, machines), "--format", "md"]) == 0
    assert "Look 2 at these arms" in capsys.readouterr().out
    assert run_command_line(["report", str(machines[0]), str(machines[0])]) == 2
    assert "one run would count twice" in capsys.readouterr().err
