"""From records to rows and a reading: what is said, and what is not."""

import numpy as np
import pytest
from scipy import stats

from ampcompare.results.analysis.conclusions.headline import headline
from ampcompare.results.analysis.results_table import judge_arms, read_table
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.ledger import GroupTypes, Ledger
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.script import ScriptConfig
from ampcompare.testing import make_comparison, make_record

FP32 = [0.50, 0.52, 0.49, 0.51, 0.50]
HALF = [0.40, 0.44, 0.41, 0.40, 0.43]
SAMPLES = 1000  # of the records
SECONDS = [1.0, 1.1, 0.9, 1.0, 1.05]


def _with_lr(record: RunRecord, lr: float) -> RunRecord:
    optimizer = record.config.recipe.optimizer.model_copy(update={"lr": lr})
    recipe = record.config.recipe.model_copy(update={"optimizer": optimizer})
    return record.model_copy(update={"config": record.config.model_copy(update={"recipe": recipe})})


def _row(comparison: Comparison, arm: str) -> ArmSummary:
    return next(row for row in comparison.arms if row.arm == arm)


def _reading(comparison: Comparison) -> str:
    return "\n".join(comparison.reading)


def _matrix(seeds: int = 5) -> list[RunRecord]:
    return [
        *(make_record("fp32", seed, top1=FP32[seed], seconds=SECONDS[seed]) for seed in range(seeds)),
        *(
            make_record("half", seed, top1=HALF[seed], seconds=SECONDS[-1 - seed] / 2)
            for seed in range(seeds)
        ),
    ]


def _interval(confidence: float) -> tuple[float, float]:
    """Return Student's interval of the differences, with the spread that rounding to SAMPLES images adds."""
    differences = np.subtract(HALF, FP32)
    error = np.hypot(np.std(differences, ddof=1), 1 / SAMPLES / 6**0.5) / 5**0.5
    low, high = stats.t.interval(confidence, 4, np.mean(differences), error)
    return float(low), float(high)


def test_rows_hold_mean_spread_and_pairs() -> None:
    """A row has mean and standard deviation over seeds, and its paired difference and ratio to the reference."""
    comparison = make_comparison(_matrix(), arms=["fp32", "half"])
    row = _row(comparison, "half")
    assert row.metric_mean == pytest.approx(sum(HALF) / 5)
    assert row.metric_sd == pytest.approx(stats.tstd(HALF))
    assert row.quality.effect == pytest.approx(sum(HALF) / 5 - sum(FP32) / 5)
    assert (row.quality.low, row.quality.high) == pytest.approx(_interval(0.95))
    assert row.time.effect == pytest.approx(0.5)
    assert (row.seeds, row.completed, row.status) == ([0, 1, 2, 3, 4], 5, "ok")
    assert (row.skipped_steps, row.num_steps) == (0, 500)


def test_a_judged_table_of_the_figures_of_runs_says_the_same() -> None:
    """Verdicts, intervals and the rate of divergence of a table are those of the runs that its lines are of."""
    values = {
        "fp32": [0.503, 0.521, 0.492, 0.514],
        "half": [0.402, 0.447, 0.413, 0.406],
        "bf16": [0.5, 0.5, 0.4, 0.4],
    }
    records, lines = [], ["arm,seed,accuracy,seconds"]
    for arm, its in values.items():
        for seed, value in enumerate(its):
            diverged = arm == "bf16" and seed > 1
            seconds = SECONDS[seed] * (0.5 if arm == "half" else 1)
            status = "diverged" if diverged else "completed"
            records.append(make_record(arm, seed, top1=value, seconds=seconds, status=status))
            lines.append(f"{arm},{seed},{'NaN' if diverged else f'{100 * value:.1f}'},{seconds:.6f}")
    of_runs = make_comparison(records, arms=list(values))
    of_table = judge_arms(read_table("\n".join(lines)))
    for run, line in zip(of_runs.arms, of_table.arms, strict=True):
        assert (line.arm, str(line.quality)) == (run.arm, str(run.quality))
        if run.arm == "half":
            assert (str(line.time), line.pairs) == (str(run.time), run.pairs) == ("better", 4)
            for field in ("effect", "low", "high"):
                assert getattr(line.quality, field) == pytest.approx(getattr(run.quality, field), rel=1e-6)
                assert getattr(line.time, field) == pytest.approx(getattr(run.time, field), rel=1e-3)
        else:
            assert (line.diverged_low, line.diverged_high) == (run.diverged_low, run.diverged_high)


def test_every_arm_widens_the_intervals() -> None:
    """With four arms beside the reference each interval is at 98.75 %, so that all hold together at 95 %."""
    arms = ["fp32", "half", "native:fp16", "native:bf16", "half:bn_fp32"]
    records = _matrix() + [make_record(arm, seed, top1=0.5) for arm in arms[2:] for seed in range(5)]
    row = _row(make_comparison(records, arms=arms), "half")
    assert (row.quality.low, row.quality.high) == pytest.approx(_interval(1 - 0.05 / 4))


def test_arms_without_a_test_widen_no_interval() -> None:
    """Arms that diverged or did other work have no interval, and leave that of the others as it were alone."""
    alone = _matrix()
    diverged = [
        make_record("native:fp16", seed, top1=0.5, status="diverged" if seed == 4 else "completed")
        for seed in range(5)
    ]
    other = [_with_lr(make_record("native:bf16", seed, top1=0.5), 0.7) for seed in range(5)]
    arms = ["fp32", "half", "native:fp16", "native:bf16"]
    one = _row(summarize(alone, arms=arms[:2], reference="fp32"), "half")
    several = make_comparison(alone + diverged + other, arms=arms)
    row = _row(several, "half")
    assert (row.quality.low, row.quality.high) == (
        one.quality.low,
        one.quality.high,
    )
    for arm, word in (("native:fp16", "diverged 1/5"), ("native:bf16", "not comparable (lr 0.7, not 0.05)")):
        assert str(_row(several, arm).quality) == word
        assert _row(several, arm).quality.effect is not None
        assert _row(several, arm).quality.low is None


def test_pairs_are_made_by_seed() -> None:
    """Runs are compared with the run of the same seed; what has no partner, or diverged, is no pair."""
    records = [
        *(make_record("fp32", seed, top1=0.1 * seed) for seed in (3, 1, 2)),
        *(make_record("half", seed, top1=0.1 * seed + 0.01 * (seed == 2)) for seed in (2, 3, 1, 9)),
        make_record("fp32", 9, status="diverged"),
    ]
    row = _row(make_comparison(records, arms=["fp32", "half"]), "half")
    assert row.quality.effect == pytest.approx(0.01 / 3)
    assert row.quality.low is not None


@pytest.mark.parametrize(
    ("half", "device", "said"),
    [
        ("fp16 emulated", "cpu", "was computed in fp32 and rounded (emulated) on this CPU"),
        ("fp16 native", "cpu", "ran natively on this CPU"),
        ("fp16 native", "cuda:0", None),
        ("bf16 emulated", "cpu", "bf16 was computed in fp32 and rounded (emulated) on this CPU"),
    ],
)
def test_fp16_on_a_cpu_is_remarked(half: str | None, device: str, said: str | None) -> None:
    """Where fp16 ran on a CPU the reading warns that its times say nothing about a GPU, and nowhere else."""
    records = [make_record("fp32", 0, device=device), make_record("half", 0, half=half, device=device)]
    text = _reading(make_comparison(records, arms=["fp32", "half"]))
    assert ("16-bit step times do not" in text) == (said is not None)
    assert said is None or said in text


def test_an_invalid_pair_is_left_out_where_enough_remain() -> None:
    """One bad cell among five costs its pair and not the verdict."""
    records = [
        *(make_record("fp32", seed, seconds=SECONDS[seed]) for seed in range(5)),
        *(make_record("half", seed, seconds=1.5 * SECONDS[seed] + 0.001 * seed) for seed in range(4)),
        make_record("half", 4, seconds=99.0, warmup_steps=95),
    ]
    row = _row(make_comparison(records, arms=["fp32", "half"]), "half")
    assert str(row.time) == "worse"
    assert row.time.effect == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize(("half", "is_below"), [(0.02, True), (0.10, False)])
def test_a_twin_is_the_floor_of_what_can_be_told(half: float, is_below: bool) -> None:
    """The headline is not about the twin; it names the arms whose difference is no larger than the twin's."""
    twin = "fp32 first_weights=twin"
    records = [make_record("fp32", seed, top1=0.5) for seed in range(3)]
    records += [make_record("half", seed, top1=0.5 - half) for seed in range(3)]
    for seed, change in enumerate((0.04, -0.04, 0.05)):
        made = make_record("fp32", seed, top1=0.5 + change)
        config = made.config.model_copy(update={"first_weights": "twin"})
        records.append(made.model_copy(update={"arm": twin, "config": config}))
    comparison = make_comparison(records, arms=["fp32", "half", twin])
    *others, floor = comparison.headline
    assert not any(twin in sentence for sentence in others)
    assert floor.startswith("fp32 again from weights changed by 1/512 differs by +5.2")
    assert ("the difference of half is no larger, so this training cannot tell it" in floor) == is_below
    assert _row(comparison, twin).pairs == 3


def test_the_headline_of_a_stored_comparison_speaks_of_the_twin_as_before() -> None:
    """`report report.json` makes the headline from the rows and records that the file has."""
    twin = "fp32 first_weights=twin"
    records = [make_record(arm, seed, top1=0.5) for arm in ("fp32", "half") for seed in range(3)]
    for seed, made in enumerate(records[:3]):
        config = made.config.model_copy(update={"first_weights": "twin"})
        changed = make_record("fp32", seed, top1=0.46)
        records.append(changed.model_copy(update={"arm": twin, "config": config}))
    comparison = make_comparison(records, arms=["fp32", "half", twin])
    assert "again from weights changed by 1/512" in comparison.headline[-1]
    assert headline(comparison) == comparison.headline


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ({"fp32": 1.0}, "by 1/512 differs"),
        ({"bf16": 1.0}, "by a unit in the last place of bf16 (1/256 to 1/128) differs"),
        (
            {"fp32": 0.5, "bf16": 0.5},
            "by 1/512, those in bf16 by a unit in the last place of bf16 (1/256 to 1/128), differs",
        ),
    ],
)
def test_the_change_of_a_twin_is_that_of_the_type_of_its_weights(
    weights: dict[str, float], size: str
) -> None:
    """A script's own bf16 weights, in which 1/512 rounds away, change by a unit in their last place."""
    twin, script = "fp32 first_weights=twin", ScriptConfig(name="train.py")
    records = [make_record("fp32", seed, top1=0.5) for seed in range(3)]
    for made in list(records):
        config = made.config.model_copy(update={"first_weights": "twin", "script": script})
        ledger = Ledger(groups=[GroupTypes(name="SGD 0", weights=weights)])
        records.append(made.model_copy(update={"arm": twin, "config": config, "ledger": ledger}))
    assert size in make_comparison(records, arms=["fp32", twin]).headline[-1]


def test_a_twin_that_ends_equal_is_known_as_far_as_values_are_rounded() -> None:
    twin = "fp32 first_weights=twin"
    records = [make_record(arm, seed, top1=0.5) for arm in ("fp32", "half") for seed in range(3)]
    for made in records[:3]:
        config = made.config.model_copy(update={"first_weights": "twin"})
        records.append(made.model_copy(update={"arm": twin, "config": config}))
    *_, floor = make_comparison(records, arms=["fp32", "half", twin]).headline
    assert "differs by no more than the rounding of its values, +" in floor
