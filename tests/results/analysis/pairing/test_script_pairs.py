"""Runs of a script are pairs only if they began alike."""

from typing import Any

import pytest

from ampcompare.results.analysis.pairing.comparability import (
    may_runs_be_paired,
    quality_incomparable_reason,
    script_pairing_and_departure_sentences,
    start_difference_reason,
)
from ampcompare.results.analysis.pairing.record_checks import unique_and_duplicate_runs
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import metrics_of_script
from ampcompare.results.records.run import RunRecord, RunSummary, ScriptFacts
from ampcompare.results.report.documents.comparison import verdict_legend
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe
from ampcompare.settings.script import ScriptConfig, ScriptMetric
from ampcompare.settings.stack import parse_stacks
from ampcompare.testing import make_comparison


def record(arm: str, weights: str = "w", batches: tuple[str, ...] = ("b",), **more: Any) -> Any:
    config = RunConfig(arm=arm)
    facts = ScriptFacts(weights=[weights], batches=list(batches), **more)
    return RunRecord(cell=config.digest(), arm=arm, status="completed", config=config, script=facts)


def test_other_weights_or_batches_part_a_pair() -> None:
    """Batches count as far as both have seen them."""
    assert start_difference_reason(record("fp32"), record("half", weights="v")) == "began from other weights"
    assert (
        start_difference_reason(record("fp32"), record("half", batches=("c",))) == "saw other first batches"
    )
    assert start_difference_reason(record("fp32"), record("half", batches=("b", "c"))) == ""


def test_the_report_says_whether_runs_are_paired() -> None:
    """One sentence where all are, and one for each reason where not."""
    alike = [record("fp32"), record("half")]
    assert [text.partition(":")[0] for text in script_pairing_and_departure_sentences(alike, "fp32")] == [
        "Paired"
    ]
    (first,) = script_pairing_and_departure_sentences([record("fp32"), record("half", weights="v")], "fp32")
    assert first.startswith("Not paired: half, seed 0 began from other weights than fp32")


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"weights": "v"}, "--first-weights NAME lets all arms begin with the weights of one stack."),
        ({"batches": ("c",)}, "let Python or NumPy draw the order of the samples, which both draw alike."),
    ],
)
def test_another_torch_may_draw_otherwise(changed: dict[str, Any], advice: str) -> None:
    """The seed is the same then; within one torch it is what is missing."""
    stack = parse_stacks({"old": "/old/python"})["old"]
    here, there = record("fp32"), record("script", **changed)
    there = there.model_copy(update={"config": there.config.model_copy(update={"stack": stack})})
    runs = [
        one.model_copy(update={"environment": {"torch": torch}})
        for one, torch in ((here, "2.13.0"), (there, "1.8.1"))
    ]
    (sentence,) = script_pairing_and_departure_sentences(runs, "fp32")
    assert sentence.endswith(f"Torch 1.8.1 and 2.13.0 may draw otherwise from one seed: {advice}")
    (sentence,) = script_pairing_and_departure_sentences([here, there], "fp32")
    assert sentence.endswith("or pass the seed on with --seed-arg.")


def test_a_resumed_cell_is_no_pair() -> None:
    """Its first weights and batches may be those of any step."""
    resumed = record("half", resumed=["/cell/ck.pt"])
    assert start_difference_reason(record("fp32"), resumed) == "resumed from ck.pt of its own earlier attempt"
    (sentence,) = script_pairing_and_departure_sentences([record("fp32"), resumed], "fp32")
    assert sentence.startswith("Not paired: half, seed 0 resumed from ck.pt of its own earlier attempt, so")
    comparison = make_comparison([record("fp32"), resumed], arms=["fp32", "half"])
    assert "paired by seed" not in verdict_legend(comparison)
    assert "paired by seed" in verdict_legend(comparison.model_copy(update={"records": [record("fp32")]}))


def test_cells_of_other_code_are_not_called_paired() -> None:
    runs = [
        record("fp32").model_copy(update={"code": {"net.py": "1"}}),
        record("half").model_copy(update={"code": {"net.py": "2"}}),
    ]
    (sentence,) = script_pairing_and_departure_sentences(runs, "fp32")
    assert sentence.startswith("Not paired: cells are of other versions of net.py")
    assert not may_runs_be_paired(runs, "fp32")


def _scored(arm: str, seed: int, value: float, difference: str) -> RunRecord:
    metric = ScriptMetric(name="reward", difference=difference)  # type: ignore[arg-type]
    script = ScriptConfig(name="train.py", metrics=(metric,))
    config = RunConfig(arm=arm, script=script, recipe=Recipe(seed=seed))
    facts = ScriptFacts(weights=[f"w{seed}"], batches=["b"])
    (described,) = metrics_of_script(script)
    epoch = EpochResult(epoch=0, samples=1, values={"reward": value}, train_seconds=1.0, eval_seconds=0.0)
    return RunRecord(
        cell=config.digest(), arm=arm, status="completed", config=config, script=facts, metrics=[described],
        summary=RunSummary(metric_final=value, num_steps=100, epochs=[epoch]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("difference", "word"),
    [("ratio", "not comparable (reward -5.1000 has no ratio"), ("points", "equivalent")],
)
def test_a_value_below_zero_has_differences_and_no_ratio(difference: str, word: str) -> None:
    """Without `points` the arm is not said to have learned nothing, and the verdict names the option."""
    records = [
        _scored(arm, seed, -5.1 + 0.1 * seed + (0.001 * (seed % 3) if arm == "half" else 0.0), difference)
        for arm in ("fp32", "half")
        for seed in range(6)
    ]
    row = make_comparison(records, arms=["fp32", "half"]).arms[1]
    assert str(row.quality).startswith(word)
    assert "learned nothing" not in str(row.quality)
    assert ("--metric reward:points" in str(row.quality)) == (difference == "ratio")


def test_runs_that_evaluated_unlike_often_are_no_pair() -> None:
    """One of them has lost evaluations; records of older versions do not say."""
    runs = [_scored(arm, 0, 3.0, "points") for arm in ("half", "fp32")]
    seen = [
        run.model_copy(update={"script": ScriptFacts(weights=["w"], seen={"reward": count})})
        for run, count in zip(runs, (3, 2), strict=True)
    ]
    assert quality_incomparable_reason(*seen) == "reward was evaluated 3 times, not 2"
    assert quality_incomparable_reason(seen[0], runs[1]) == ""


def _started(
    seed: int, weights: str, batches: tuple[str, ...], losses: str, status: str = "completed"
) -> RunRecord:
    config = RunConfig(arm="fp32", script=ScriptConfig(name="train.py"), recipe=Recipe(seed=seed))
    return RunRecord(
        cell=config.digest(), arm="fp32", status=status, config=config,  # type: ignore[arg-type]
        script=ScriptFacts(weights=[weights], batches=list(batches)), summary=RunSummary(losses_sha256=losses),
    )  # fmt: skip


def test_seeds_that_begin_alike_are_one_run() -> None:
    """Whatever the losses; weights of a checkpoint with other batches are another run, and so is an unknown start."""
    runs = [_started(seed, "w", ("b",), f"losses {seed}") for seed in range(3)]
    kept, copies = unique_and_duplicate_runs(runs)
    assert [run.config.recipe.seed for run in kept] == [0]
    assert copies[0].by_script
    assert copies[0].text.startswith("fp32, seed 1: its first weights and batches are those of seed 0")
    assert (
        len(
            unique_and_duplicate_runs([_started(seed, "w", (f"b{seed}",), f"{seed}") for seed in range(3)])[0]
        )
        == 3
    )
    assert len(unique_and_duplicate_runs([_started(seed, "w", (), f"{seed}") for seed in range(3)])[0]) == 3
    assert (
        len(unique_and_duplicate_runs([_started(seed, "w", ("b",), "e", "failed") for seed in range(3)])[0])
        == 3
    )


def test_losses_that_are_alike_from_other_starts_are_no_fault_of_the_seeds() -> None:
    """As of a network whose outputs are all 0 in fp16: its seeds act, and nothing of the script is to blame."""
    runs = [_started(seed, f"w{seed}", (f"b{seed}",), "equal losses") for seed in range(2)]
    kept, (copy,) = unique_and_duplicate_runs(runs)
    assert [run.config.recipe.seed for run in kept] == [0]
    assert not copy.by_script
    assert copy.text == (
        "fp32, seed 1: its losses are those of seed 0 to the last bit, though it began from other weights or batches: "
        "they decide nothing there, as where all outputs are 0, so it is not an independent run"
    )


@pytest.mark.parametrize(
    ("printed", "word"), [(0.1, "inconclusive"), (1e-4, "better")], ids=["one digit", "four digits"]
)
def test_what_a_script_prints_has_its_digits(printed: float, word: str) -> None:
    """Three equal differences of the last digit are no spread of 0, and are one if more digits were printed."""
    records = [
        record.model_copy(
            update={"script": ScriptFacts(weights=[f"w{seed}"], batches=["b"], printed={"reward": printed})}
        )
        for seed in range(3)
        for record in (
            _scored("fp32", seed, 3.1 + 0.1 * seed, "ratio"),
            _scored("half", seed, 3.2 + 0.1 * seed + 1e-3 * seed * (printed < 0.01), "ratio"),
        )
    ]
    row = make_comparison(records, arms=["fp32", "half"]).arms[1]
    assert str(row.quality).startswith(word)


@pytest.mark.parametrize("rounds", ["half", "fp32"])
def test_an_arm_that_rounds_labels_has_no_verdict_on_its_quality(rounds: str) -> None:
    """It trains something else than the arm that it is compared with; one run of a side is enough."""
    text = "half trains on other labels or codes than the script gives it: 4999 becomes 4992 (train.py:3)"
    records = [
        _scored(arm, seed, 3.0 + 0.1 * seed, "points").model_copy(
            update={
                "script": ScriptFacts(
                    weights=["w"], rounded_codes=text if arm == rounds and seed == 2 else ""
                )
            }
        )
        for arm in ("fp32", "half")
        for seed in range(6)
    ]
    row = make_comparison(records, arms=["fp32", "half"]).arms[1]
    assert str(row.quality) == f"not comparable ({text})"
