"""Several experiments: what is pooled, what is left out, and which belong together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from ampcompare.base.errors import ConfigError
from ampcompare.cli import main
from ampcompare.runs.analysis.forest import Forest, make_forest
from ampcompare.runs.analysis.summary import summarize
from ampcompare.runs.records.comparison import Comparison
from ampcompare.runs.records.run import RunRecord, dump_json
from ampcompare.runs.report.base import FORMATS
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.recipe import ModelConfig, Recipe

FORMS = ["table", "md", "csv", "json", "html", "latex"]


@pytest.fixture
def runs(make_record: Any) -> Any:
    """Build the records of one experiment, from the differences of an arm to fp32 over seeds."""

    def build(
        arch: str, differences: Sequence[float], ratio: float = 0.5, arm: str = "half", first: int = 0
    ) -> list[RunRecord]:
        records = []
        for seed, difference in enumerate(differences, first):
            recipe = Recipe(seed=seed, model=ModelConfig(arch=arch))
            for name, top1, seconds in (("fp32", 0.7, 0.01), (arm, 0.7 + difference, 0.01 * ratio * (1 + seed / 100))):
                record = make_record(name, seed, top1=top1, seconds=seconds, epoch_seconds=1.0)
                config = RunConfig(arm=name, recipe=recipe)
                records.append(record.model_copy(update={"config": config, "cell": config.digest()}))
        return records

    return build


def _comparison(records: list[RunRecord], reference: str = "fp32") -> Comparison:
    return summarize(records, arms=list(dict.fromkeys(record.arm for record in records)), reference=reference)


def _write(folder: Path, records: Sequence[RunRecord]) -> Path:
    for record in records:
        cell = folder / "cells" / record.cell
        cell.mkdir(parents=True)
        (cell / "record.json").write_text(dump_json(record), encoding="utf-8")
    return folder


@pytest.fixture
def forest(runs: Any) -> Forest:
    """Four experiments, one of them with two pairs only."""
    shifts = {"a": -0.002, "b": 0.001, "c": -0.006}
    known = [(name, _comparison(runs(name, [shift - 0.001, shift, shift + 0.002]))) for name, shift in shifts.items()]
    return make_forest([*known, ("short", _comparison(runs("d", [0.1, 0.1])))])


def test_effects_are_pooled(forest: Forest) -> None:
    """The mean of the experiments' differences has Student's interval; times are pooled as logarithms of ratios."""
    accuracy, time = forest.pooled
    means = [effect.value for effect in forest.effects if effect.measure == "accuracy" and not effect.left_out]
    assert means == pytest.approx([-0.0017, 0.0013, -0.0057], abs=1e-4)
    assert (accuracy.measure, accuracy.arm, accuracy.experiments) == ("accuracy", "half", 3)
    expected = stats.ttest_1samp(means, 0).confidence_interval(accuracy.confidence)
    assert (accuracy.low, accuracy.high) == pytest.approx((expected.low, expected.high))
    assert accuracy.tau > 0
    assert time.value == pytest.approx(0.505, abs=1e-3)
    assert time.verdict == "better"
    assert time.low is not None
    assert time.low < time.value


def test_an_experiment_that_cannot_be_tested_is_left_out(forest: Forest) -> None:
    """Two pairs have no interval, so they are shown and not pooled."""
    (short,) = [effect for effect in forest.effects if (effect.experiment, effect.measure) == ("short", "accuracy")]
    assert short.value == pytest.approx(0.1)
    assert (short.low, short.left_out) == (None, "only 2 seeds")


def test_the_headline_is_over_all_experiments(forest: Forest) -> None:
    """The verdicts of the means are the answer, and what they leave out stands with them."""
    verdict, words = forest.pooled[0].verdict, forest.headline[0]
    assert (verdict.partition(" (")[0], words.startswith("Inconclusive for half: ")) == ("inconclusive", True)
    assert "half takes 0.50x (0.50 to 0.51) the step time of fp32." in forest.headline
    assert forest.headline[-1] == "Not in these means: half in short (only 2 seeds)."


def test_two_experiments_have_no_interval(runs: Any) -> None:
    """Of two experiments there is a mean and no verdict."""
    known = [(name, _comparison(runs(name, [0.0, 0.001, 0.002]))) for name in "ab"]
    pooled = make_forest(known).pooled[0]
    assert (pooled.experiments, pooled.low, pooled.verdict) == (2, None, "inconclusive")


def test_one_reference_for_all(runs: Any) -> None:
    """Effects against different references are not pooled."""
    records = runs("b", [0.0, 0.001, 0.002])
    with pytest.raises(ConfigError, match="the reference of a is fp32 and that of b is half"):
        make_forest([("a", _comparison(runs("a", [0.0, 0.0, 0.0]))), ("b", _comparison(records, "half"))])


@pytest.mark.parametrize("form", FORMS)
def test_formats(forest: Forest, form: str) -> None:
    """Every format has all experiments and the line over all of them."""
    text = FORMATS[form].reporter().render(forest)
    assert all(name in text for name in ("half", "short", "only 2 seeds"))
    assert f"{100 * forest.pooled[0].value:+.2f}" in text or form in ("csv", "json")
    assert text.endswith("\n") or form == "html"
    if form == "table":
        assert forest.headline
        assert " ".join(text.split()).startswith(" ".join(forest.headline))
    if form == "json":
        assert Forest.model_validate_json(text) == forest


def test_directories_of_other_settings_are_a_forest(
    runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`report` of two models is a forest, its experiments named by their folders."""
    one = _write(tmp_path / "one", runs("a", [0.0, 0.001, 0.002]))
    two = _write(tmp_path / "two", runs("b", [0.0, 0.001, 0.002]))
    assert main(["report", str(one), str(two)]) == 0
    text = capsys.readouterr().out
    assert "all (2)" in text
    assert text.index("one") < text.index("two")
    assert main(["report", str(one), str(two), "--format", "html"]) == 0
    assert "forest-accuracy" in capsys.readouterr().out


def test_directories_of_equal_settings_are_one_report(
    runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seeds of one experiment in two folders are summed up together, and a seed that is in both is refused."""
    one = _write(tmp_path / "one", runs("a", [0.0, 0.001, 0.002]))
    two = _write(tmp_path / "two", runs("a", [0.0, 0.001], first=3))
    assert main(["report", str(one), str(two)]) == 0
    text = capsys.readouterr().out
    assert "seeds 0-4" in text
    assert main(["report", str(one), str(two), str(two)]) == 2
    assert "fp32 with seed 3 is in" in capsys.readouterr().err


def test_hostile_names_stay_text(runs: Any) -> None:
    """Markup in the name of a folder is text in every format, and a formula no formula."""
    name = "=<script>alert(1)</script>|*x*\x1b[2J"
    forest = make_forest(
        [(name, _comparison(runs("a", [0.0, 0.001, 0.002]))), ("b", _comparison(runs("b", [0.0] * 3)))]
    )
    for form in FORMS:
        text = FORMATS[form].reporter().render(forest)
        assert "\x1b" not in text
        assert form not in ("html", "md") or "<script>alert" not in text
    assert "'=<script>" in FORMATS["csv"].reporter().render(forest)
