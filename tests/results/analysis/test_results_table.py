"""Verdicts on tables of results that someone else measured."""

from pathlib import Path

import pytest
from scipy import stats

from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.results_table import EXAMPLE, judge_arms, read_table
from ampcompare.results.records.comparison import ArmSummary, Comparison

GNMT = (Path(__file__).parents[3] / "examples" / "gnmt.csv").read_text(encoding="utf-8")


def _row(comparison: Comparison, arm: str) -> ArmSummary:
    return next(row for row in comparison.arms if row.arm == arm)


def _runs(arm: str, values: list[float | str]) -> str:
    return "".join(f"{arm},{value}\n" for value in values)


def test_pairs_of_a_published_table() -> None:
    """Runs of equal seeds are pairs; the metric has the direction and the margin that are given."""
    comparison = judge_arms(read_table(GNMT, better="higher"), terms=Terms(margin=0.5))
    row = _row(comparison, "fp16")
    assert (comparison.reference, comparison.metric.name, row.pairs) == ("fp32", "BLEU", 3)
    assert (str(row.quality), str(row.time)) == ("equivalent (±0.5)", "better")
    assert row.quality.effect == pytest.approx(-0.1, abs=1e-9)
    assert row.time.effect == pytest.approx(0.3666, abs=1e-4)
    assert read_table(GNMT).metric.better == "higher"
    worse = judge_arms(read_table(GNMT.replace("BLEU", "loss")), terms=Terms(margin=0.05))
    assert (_row(worse, "fp16").quality.effect or 0) == pytest.approx(-0.1, abs=1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "arm,seed,accuracy\nfp32,0,75.1\nAMP,0,75.0\nfp32,1,75.3\nAMP,01,75.2\nfp32,2,75.2\nAMP,2,75.0\n",
        "arm;seed;top1\nfp32;0;0.751\nAMP;0;0.750\nfp32;1;0.753\nAMP;1;0.752\nfp32;2;0.752\nAMP;2;0.750\n",
        "# a remark\n| arm | seed | Acc |\n|---|---:|---|\n| fp32 | 0 | 75.1% |\n| AMP | 0 | 75.0% |\n"
        "| fp32 | 1 | 75.3% |\n| AMP | 1 | **75.2%** |\n| fp32 | 2 | 75.2% |\n| AMP | 2 | 75.0% |\n",
    ],
)
def test_forms_of_one_table(text: str) -> None:
    row = _row(judge_arms(read_table(text)), "AMP")
    assert (row.pairs, row.seeds, row.completed) == (3, [0, 1, 2], 3)
    assert row.metric_mean == pytest.approx((0.75 + 0.752 + 0.75) / 3)


def test_means_are_compared_by_welch() -> None:
    """A mean with its spread and number of runs is a sample; without the number there is no verdict."""
    text = "arm,accuracy,n\nfp32,77.01 ± 0.16,5\nO1,75.81 +/- 0.18,5\n"
    comparison = judge_arms(read_table(text))
    row = _row(comparison, "O1")
    shares = [0.18**2 / 5, 0.16**2 / 5]
    freedom = sum(shares) ** 2 / sum(share**2 / 4 for share in shares)
    half = stats.t.ppf(0.975, freedom) * sum(shares) ** 0.5
    assert (str(row.quality), row.pairs) == ("worse", 5)
    assert 100 * (row.quality.low or 0) == pytest.approx(-1.2 - half)
    assert comparison.judged is not None
    assert comparison.judged.independent == ["O1"]
    for more in ("arm,accuracy,accuracy sd\nfp32,77.01,0.16\nO1,75.81,0.18\n", text.replace(",5", ",")):
        unknown = judge_arms(read_table(more))
        assert str(_row(unknown, "O1").quality) == "inconclusive (number of runs unknown)"
        assert (_row(unknown, "O1").completed, _row(unknown, "O1").has_completed) == (None, True)
        assert any("add a column n" in line for line in unknown.reading)


def test_few_seeds_in_common_throw_no_runs_away() -> None:
    """Ten runs each with one seed in common are compared as two samples."""
    arm, reference = [73 + n % 3 / 10 for n in range(10)], [75 + n % 4 / 10 for n in range(10)]
    text = "arm,seed,accuracy\n" + "".join(f"fp32,{n},{value}\n" for n, value in enumerate(reference))
    text += "".join(f"amp,{n},{value}\n" for n, value in enumerate(arm, 9))
    row = _row(judge_arms(read_table(text)), "amp")
    low, high = stats.ttest_ind(arm, reference, equal_var=False).confidence_interval(0.95)
    assert (str(row.quality), row.pairs) == ("worse", 10)
    assert (100 * (row.quality.low or 0), 100 * (row.quality.high or 0)) == pytest.approx(
        (low, high), rel=3e-3
    )


@pytest.mark.parametrize("count", [3, 10, 100])
def test_whole_points_are_no_proof_of_equality(count: int) -> None:
    """Equal whole points leave a point of room, however many they are."""
    row = _row(
        judge_arms(read_table("arm,accuracy\n" + _runs("fp32", [76] * count) + _runs("amp", [76] * count))),
        "amp",
    )
    assert str(row.quality) == "inconclusive (the figures are rounded)"
    assert (row.quality.high or 0) > 0.005


def test_a_published_spread_is_for_few_runs() -> None:
    """It decides where a side has fewer than three runs, and is said to be unused elsewhere."""
    example = judge_arms(read_table(EXAMPLE), sd=0.18)
    assert example.judged is not None
    assert example.judged.sd == 0.18
    assert str(_row(example, "apex:O3").quality) == "diverged 1/1"
    many = judge_arms(
        read_table("arm,accuracy\n" + _runs("fp32", [76.1] * 3) + _runs("amp", [76.2] * 3)), sd=0.1
    )
    assert any(line.startswith("--sd 0.1 is not used") for line in many.reading)
    for sd in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="spread over seeds"):
            judge_arms(read_table(EXAMPLE), sd=sd)


def test_times_alone_have_verdicts() -> None:
    """A table without a metric says nothing of one."""
    text = "arm,seed,seconds\n" + "".join(
        f"fp32,{n},{10 + n / 10}\nhalf,{n},{5 + n / 20}\n" for n in range(4)
    )
    row = _row(judge_arms(read_table(text)), "half")
    assert (str(row.quality), str(row.time)) == ("", "better")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("arm,seconds\nfp32,10\nhalf,5\n", "No verdict on half: there is no metric."),
        ("arm,accuracy,seconds\nfp32,-,10\nhalf,76,5\n", "No verdict on half: fp32 has no accuracy."),
        ("arm,accuracy,seconds\nfp32,76,10\nhalf,-,5\n", "No verdict on half: no accuracy was measured."),
    ],
)
def test_why_there_is_no_verdict_without_a_metric(text: str, sentence: str) -> None:
    """Seeds are not the reason."""
    assert sentence in judge_arms(read_table(text)).headline


def test_other_columns_are_named() -> None:
    text = "arm,accuracy,top5,note\nfp32,76.1,92.0,old\namp,76.0,92.1,new\n"
    assert any(
        line.endswith("whatever they say: top5, note.") for line in judge_arms(read_table(text)).reading
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no runs"),
        ("arm,accuracy\n", "holds no runs"),
        ("name,accuracy\nfp32,1\n", "needs a column arm"),
        ("arm,arm,accuracy\nfp32,a,1\n", "no column twice"),
        ("arm,accuracy\nfp32,76,1\n", "line 2, has 3 cells"),
        ("arm,accuracy\nfp32,76\n,75\n", "line 3, names no arm"),
        ("arm,accuracy\nfp32,76\namp,fast\n", "line 3: accuracy is 'fast', not a number"),
        ("arm,accuracy\nfp32,76\namp,0.75\n", "go from 0.75 to 76; give percentages"),
        ("arm,accuracy\nfp32,176\namp,75\n", "go from 75 to 176"),
        ("arm,accuracy,n\nfp32,76,1.5\n", "n is 1.5, and counts runs"),
        ("arm,accuracy,seconds\nfp32,76,0\n", "seconds are 0"),
        ("arm,seed,accuracy\nfp32,1,76\nFP32,01,75\n", "line 3: a second line of FP32 with seed 1"),
    ],
)
def test_what_is_no_table_of_results(text: str, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        read_table(text)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            "arm,memory,speed\nfp32,26.9Gb,2.08it/s\n",
            {},
            "no column of numbers; write numbers without units",
        ),
        ("arm,bleu,chrf\nfp32,1,2\n", {}, "several columns of numbers; name one of bleu, chrf with --metric"),
        ("arm,gap\nfp32,1\n", {}, "direction of gap"),
        ("arm,bleu\nfp32,1\n", {"metric": "wer"}, "no column 'wer'"),
    ],
)
def test_a_metric_that_is_not_clear(text: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_table(text, **options)  # type: ignore[arg-type]


def test_a_margin_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="loss has no usual margin; give --margin"):
        judge_arms(read_table("arm,loss\nfp32,1.0\nhalf,1.1\n", better="lower"))


@pytest.mark.parametrize("seeds", [True, False])
def test_a_reference_that_diverged_leaves_a_condition(seeds: bool) -> None:
    """What the runs say that it completed is no verdict on all of them; an arm of other seeds lost none."""
    lines = [f"{arm},{n if seeds else ''},{76 + n / 50}\n" for arm in ("fp32", "half") for n in range(4)]
    text = "arm,seed,accuracy\n" + "".join(lines) + f"fp32,{4 if seeds else ''},nan\n"
    lost = f"half,{4 if seeds else ''},76.04\n"
    verdicts = [str(_row(judge_arms(read_table(table)), "half").quality) for table in (text + lost, text)]
    conditional = "conditional on 4 of 5 seeds (equivalent (±0.5))"
    assert verdicts == [conditional, "equivalent (±0.5)" if seeds else conditional]
