"""Verdicts on the training loss over the last fifth of the steps: what is paired, tested, refused and said."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.results.analysis.effects.loss_tail import tail_loss_evidence_of_pairs
from ampcompare.results.analysis.gates import gate_outcomes, parse_gate
from ampcompare.results.analysis.inference.terms import Terms, terms_of_comparison
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.report.columns import columns_with_values, table_of_columns, verdict_columns
from ampcompare.results.report.documents.overview import make_overview_table
from ampcompare.testing import make_record

REFERENCE = (2.0, 2.1, 1.9, 2.05, 1.95)


def _compared(half: Sequence[float], reference: Sequence[float] = REFERENCE, **options: Any) -> Comparison:
    terms = Terms(loss_margin=options.pop("margin", 0.01))
    records = [
        make_record(arm, seed, loss_tail=loss, loss_tail_steps=20, **(options if arm == "half" else {}))
        for arm, losses in (("fp32", reference), ("half", half))
        for seed, loss in enumerate(losses)
    ]
    return summarize(records, arms=["fp32", "half"], reference="fp32", terms=terms)


@pytest.mark.parametrize(
    ("factors", "word"),
    [
        ([1.001, 0.999, 1.0005, 1.0, 0.9995], "equivalent (±1 %)"),
        ([1.05, 1.049, 1.051, 1.05, 1.0505], "worse"),
        ([0.95, 0.949, 0.951, 0.95, 0.9505], "better"),
        ([1.0, 0.99, 0.985, 0.995, 1.002], "non-inferior (margin 1 %)"),
        ([0.9, 1.1, 1.05, 0.95, 1.0], "inconclusive"),
    ],
)
def test_a_relative_difference_of_losses_has_a_verdict(factors: list[float], word: str) -> None:
    """The verdict is over seeds, on the ratio; a lower loss is better, and the mean difference is geometric."""
    comparison = _compared([loss * factor for loss, factor in zip(REFERENCE, factors, strict=True)])
    fp32, half = comparison.arms
    assert str(half.loss).startswith(word)
    assert half.loss.effect == pytest.approx(math.prod(factors) ** (1 / 5) - 1)
    assert (half.loss.low or 0) < (half.loss.effect or 0) < (half.loss.high or 0)
    assert (str(fp32.loss), fp32.loss.effect, fp32.loss_tail) == ("", None, pytest.approx(2.0))


def test_the_margin_is_that_which_was_asked_for() -> None:
    """A loss that is 5 % higher is equivalent at 10 %; the stored terms hold the margin."""
    comparison = _compared([1.05 * loss for loss in REFERENCE], margin=0.1)
    assert str(comparison.arms[1].loss) == "equivalent (±10 %)"
    assert terms_of_comparison(comparison).loss_margin == comparison.loss_margin == 0.1
    with pytest.raises(ConfigError, match="the loss margin is 0"):
        Terms(loss_margin=0)


def test_pairs_of_other_steps_or_without_a_ratio_are_not_compared() -> None:
    """Other numbers of steps, a rollback and a loss of 0 or NaN have no verdict, and the reason."""
    for options, losses, reason in (
        ({"num_steps": 90, "ended": "early stop"}, REFERENCE, "no steps in common"),
        ({"rollbacks": [40]}, REFERENCE, "no steps in common"),
        ({}, (2.0, 2.0, 0.0, 2.0, 2.0), "not a number above 0"),
        ({}, (2.0, 2.0, math.nan, 2.0, 2.0), "not a number above 0"),
    ):
        row = _compared(losses, **options).arms[1]
        assert str(row.loss).startswith("not comparable (")
        assert reason in str(row.loss)
        assert row.loss.effect is None


def test_a_pilot_gives_the_spread() -> None:
    """Seeds that were added by a pilot's spread are tested with that spread and its degrees of freedom."""
    pairs = [
        (make_record("half", seed, loss_tail=loss * 1.001), make_record(seed=seed, loss_tail=loss))
        for seed, loss in enumerate(REFERENCE)
    ]
    effect = tail_loss_evidence_of_pairs(pairs, frozenset({0, 1, 2})).effect
    assert effect is not None
    assert (effect.pairs, effect.freedom) == (5, 2)


def test_tables_and_gates_know_the_loss() -> None:
    """The one table, the table of verdicts and `--fail-on` show it."""
    comparison = _compared([1.05 * loss for loss in REFERENCE])
    overview = make_overview_table(comparison)
    place = overview.heads.index("Δ tail loss (%)")
    assert [row[place].text for row in overview.rows] == ["-", "+5.00 worse"]
    assert "tail loss" in columns_with_values(comparison)
    rows = dict(
        zip(
            verdict_columns(comparison),
            table_of_columns(verdict_columns(comparison), comparison).texts[1],
            strict=True,
        )
    )
    assert rows["tail loss verdict"] == "worse"
    assert rows["Δ tail loss (%)"].startswith("+5.00 [")

    gates = [
        parse_gate("tail-loss:worse"),
        parse_gate("tail-loss:non-inferior"),
        parse_gate("tail-loss:better"),
    ]
    failures = {check.gate: check.failure for check in gate_outcomes(gates, comparison)}
    assert all(failures.values())
    assert failures["tail-loss:worse"] == "tail-loss worse, and tail-loss:worse fails"
    older = _compared(REFERENCE)
    baseline = older.model_copy(update={"arms": older.arms[:1]})
    assert [check.arm for check in gate_outcomes([parse_gate("tail-loss:worse")], comparison, baseline)][
        :1
    ] == ["fp32"]
    with pytest.raises(ConfigError, match="has verdicts only"):
        parse_gate("tail-loss>1")
