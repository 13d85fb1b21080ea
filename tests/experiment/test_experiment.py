"""Plans with varied settings, several cells at once, seeds by need, and estimates; no process is started."""

import math
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.base.files.loaded_code import digest_of_file
from ampcompare.experiment.compare import (
    pairs_needed_and_neediest_arm,
    pilot_seeds,
    run_pilot_and_estimated_seeds,
)
from ampcompare.experiment.eta import estimate_remaining_cost
from ampcompare.experiment.launch.cell_files import write_record
from ampcompare.experiment.launch.dispatch.dispatch import LauncherPool
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.plan import Plan, parse_varied_path_and_values
from ampcompare.experiment.reload_report import reload_comparison
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.run_plan import run_plan
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import Placement, RunRecord, SystemReadings
from ampcompare.settings.config import RunConfig
from tests.experiment.pretend import TOP1, Pretend, make_plan

ARMS = ("fp32", "half")


class Notes(Observer):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def _make(seeds: Sequence[int]) -> Plan:
    return make_plan(RunConfig(), ARMS, seeds)


def test_a_report_follows_each_cell(tmp_path: Path) -> None:
    """What has run so far is in it, and it has been tested only where it holds all."""
    seen: list[tuple[int, int | None]] = []

    def save(comparison: Comparison, folder: Path) -> None:
        seen.append((len(comparison.records), comparison.look))

    run_plan(_make(range(3)), tmp_path, Pretend(), save=save)
    assert [count for count, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert [bool(look) for _, look in seen] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("text", "place", "values"),
    [
        ("workers=0,2", "workers", [0, 2]),
        ("omp_threads=1,2", "threads", [1, 2]),
        ("launcher=torchrun,spawn", "launcher", ["torchrun", "spawn"]),
        ("batch-size=32,64", "recipe.batch_size", [32, 64]),
        ("recipe.optimizer.lr=0.1", "recipe.optimizer.lr", [0.1]),
        ("channels_last=true,false", "recipe.channels_last", [True, False]),
    ],
)
def test_varied_settings_are_found(text: str, place: str, values: list[Any]) -> None:
    """A setting is named by its place or by its last word."""
    assert parse_varied_path_and_values(text) == (place, values)


@pytest.mark.parametrize(
    "text", ["workers", "workers=", "name=a,b", "wrkers=1", "arm=fp32", "seed=1,2", "lr={"]
)
def test_what_cannot_be_varied_is_refused(text: str) -> None:
    """Unknown and ambiguous settings, and those with options of their own, are answered by name."""
    with pytest.raises(ConfigError, match="--sweep"):
        parse_varied_path_and_values(text)


def test_varied_recipes_are_not_comparable_and_launches_are(tmp_path: Path) -> None:
    """Rows of another batch size say so, rows of another number of workers are compared, read again or not."""
    for name, verdict in (
        ("batch_size=64,32", "not comparable (global batch size 32, not 64)"),
        ("workers=0,2", "equivalent"),
    ):
        folder = tmp_path / name
        plan = make_plan(RunConfig(), ["fp32"], range(3), [parse_varied_path_and_values(name)])
        comparison = run_plan(plan, folder, Pretend())
        assert str(comparison.arms[1].quality).startswith(verdict)
        assert {record.arm for record in comparison.records} == set(plan.arms)
        assert reload_comparison(folder) == comparison


def test_several_at_once(tmp_path: Path) -> None:
    """Two jobs run two cells of a seed at a time, all cells once, and their times are not compared, then or later."""
    inner = Pretend()
    notes = Notes()
    plan = make_plan(RunConfig(), ARMS, range(3), [parse_varied_path_and_values("workers=0,2")])
    comparison = run_plan(plan, tmp_path, LauncherPool([inner, inner]), jobs=2, observer=notes)
    assert inner.most_at_once == 2
    assert sorted(cell.digest() for cell in inner.asked) == sorted(cell.digest() for cell in plan.cells)
    assert str(comparison.arms[1].time) == "not comparable (2 cells ran at once)"
    assert str(comparison.arms[1].quality) == "equivalent (±0.5)"
    again = run_plan(plan, tmp_path, Pretend(error=AssertionError("nothing is left to run")))
    assert again.arms == comparison.arms


class OnGpu(Pretend):
    """A place with one whole GPU, whose first cell waits until the others at a meeting have one too."""

    def __init__(
        self, number: int, name: str = "NVIDIA H200", meeting: threading.Barrier | None = None
    ) -> None:
        super().__init__()
        self.meeting = meeting
        self.place = Placement(gpus=[f"GPU-{number}"], gpu_names=[name], alone=True)

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        if self.meeting is not None and not self.asked:
            self.meeting.wait(timeout=60)
        record = super().launch(config, folder)
        readings = SystemReadings(timed_steps=90, outlier_share=0.0)
        record = record.model_copy(update={"placement": self.place, "readings": readings})
        write_record(record, folder)
        return record


def test_cells_alone_on_equal_gpus_are_timed(tmp_path: Path) -> None:
    """Four seeds take one of four GPUs each, drawn; their times are compared, and those of unlike GPUs are not."""
    plan = _make(range(4))
    gpus = [OnGpu(number) for number in range(4)]
    comparison = run_plan(plan, tmp_path / "equal", LauncherPool(gpus, are_equal=True), jobs=4)
    assert [len(gpu.asked) for gpu in gpus] == [2, 2, 2, 2]
    for gpu in gpus:
        assert len({config.recipe.seed for config in gpu.asked}) == 1
        assert {config.arm for config in gpu.asked} == set(ARMS)
    assert str(comparison.arms[1].time).startswith("equivalent")
    assert {record.jobs for record in comparison.records} == {4}

    both = threading.Barrier(2)
    unlike = [OnGpu(0, meeting=both), OnGpu(1, "NVIDIA A100", both)]
    refused = run_plan(_make(range(4)), tmp_path / "unlike", LauncherPool(unlike), jobs=2)
    assert str(refused.arms[1].time) == "not comparable (on unlike GPUs: NVIDIA A100 and NVIDIA H200)"


def test_a_launcher_that_breaks_ends_all_jobs(tmp_path: Path) -> None:
    """Where no process can be started the error comes out, and every launcher is closed."""
    inner = Pretend(error=LaunchError("no process"))
    with pytest.raises(LaunchError, match="no process"):
        run_plan(_make([0]), tmp_path, LauncherPool([inner, inner]), jobs=2)
    assert inner.closed


def test_auto_goes_on_to_what_the_margin_needs(tmp_path: Path) -> None:
    """After a pilot of five seeds the matrix has as many as its spread and the margin ask for."""
    launcher, notes = Pretend(), Notes()
    comparison = run_pilot_and_estimated_seeds(
        _make, tmp_path, launcher, terms=Terms(margin=1), budget_seconds=1e6, observer=notes
    )
    pilot = summarize(
        [record for record in comparison.records if record.config.recipe.seed < 5],
        arms=ARMS,
        reference="fp32",
        terms=Terms(margin=1),
    )
    needed, arm = pairs_needed_and_neediest_arm(pilot, 0.04)
    assert 5 < needed < 40
    assert arm == "half"
    assert comparison.seeds == list(range(needed))
    assert len(launcher.asked) == 2 * needed
    assert any(f"needs {needed} seeds" in text for text in notes.said)
    assert (comparison.look, comparison.error_rate) == (1, pytest.approx(0.04))
    again = run_pilot_and_estimated_seeds(
        _make, tmp_path, launcher, terms=Terms(margin=1), budget_seconds=1e6
    )
    assert (again.seeds, len(launcher.asked), again.look) == (comparison.seeds, 2 * needed, 1)


def test_auto_tests_with_the_spread_of_its_pilot(tmp_path: Path) -> None:
    """The interval after all seeds has the pilot's spread and its four degrees of freedom, read again or not."""
    terms = Terms(margin=1)
    comparison = run_pilot_and_estimated_seeds(_make, tmp_path, Pretend(), terms=terms, budget_seconds=1e6)
    differences = [(TOP1["half"][seed % 8] - TOP1["fp32"][seed % 8]) / 100 for seed in comparison.seeds]
    row = comparison.arms[1]
    assert row.quality.confidence is not None
    half = (
        stats.t.ppf((1 + row.quality.confidence) / 2, 4)
        * statistics.stdev(differences[:5])
        / math.sqrt(len(differences))
    )
    mean = statistics.fmean(differences)
    assert (row.quality.low, row.quality.high) == pytest.approx((mean - half, mean + half))
    assert reload_comparison(tmp_path).arms == comparison.arms


@pytest.mark.integration
def test_auto_stops_at_its_budget(tmp_path: Path) -> None:
    """A seed that would not end in time is not begun; the report says how far it came and goes on the next time."""
    launcher = Pretend(seconds=60)
    comparison = run_pilot_and_estimated_seeds(
        _make, tmp_path, launcher, terms=Terms(margin=1), budget_seconds=1
    )
    assert comparison.seeds == [0, 1, 2, 3, 4]
    assert comparison.reading[-1].startswith("The budget of 1 s ended it after 5 of the ")
    assert "the power to detect a difference is below 80 %" in comparison.reading[-1]
    assert comparison.look == 1
    more = run_pilot_and_estimated_seeds(_make, tmp_path, launcher, terms=Terms(margin=1), budget_seconds=1e6)
    assert len(more.seeds) > 5
    assert (more.look, more.error_rate) == (2, pytest.approx(0.005))
    assert len(launcher.asked) == 2 * len(more.seeds)


def test_a_pilot_grows_with_the_number_of_arms() -> None:
    """Several arms share the error rate, and each more degree of freedom then saves many seeds."""
    assert [len(pilot_seeds(others)) for others in (0, 1, 2, 3, 4, 9)] == [5, 5, 8, 8, 10, 10]


def test_estimate_by_what_is_there(tmp_path: Path) -> None:
    """Cells without a record take what their arm took with other seeds; with none to go by it is unknown."""
    folder = tmp_path / "here"  # the estimate looks at what lies next to it
    assert estimate_remaining_cost(_make([0]), tmp_path / "none").unknown == ARMS
    run_plan(_make([0, 1]), folder, Pretend(seconds=10))
    left = estimate_remaining_cost(_make(range(4)), folder)
    assert (left.cells, left.seconds, left.peak_bytes, left.unknown) == (4, 40.0, 2**20, ())
    other = make_plan(RunConfig(workers=2), ARMS, [0])
    assert estimate_remaining_cost(other, folder).seconds is None
    assert estimate_remaining_cost(_make([0, 1]), folder).cells == 0


class Edits(Pretend):
    """Loads `helper.py`, which changes while the second cell runs."""

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        code = {"helper.py": str(digest_of_file("helper.py"))}
        if len(self.asked) == 1:
            Path("helper.py").write_text("2\n")
        record = super().launch(config, folder).model_copy(update={"code": code})
        write_record(record, folder)
        return record


def test_a_matrix_whose_code_changes_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No third cell starts; the next call trains those of the earlier code again, and says why."""
    monkeypatch.chdir(tmp_path)
    Path("helper.py").write_text("1\n")
    plan, launcher = _make([0, 1]), Edits()
    with pytest.raises(ConfigError, match=r"helper\.py is changed since an earlier cell loaded it"):
        run_plan(plan, tmp_path / "run", launcher)
    assert len(launcher.asked) == 2
    reasons = [
        RunDirectory(tmp_path / "run").find_reusable_record_and_reason(cell).reason for cell in plan.cells
    ]
    assert sorted(reasons) == ["", "", *["helper.py changed since"] * 2]
