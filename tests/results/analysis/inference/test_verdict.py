"""Effects, tests, and the fixed words: against scipy's own tests, published tables and simulation."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from ampcompare.results.analysis.inference.effect import (
    MIN_PAIRS,
    Effect,
    interval_if_testable,
    p_values,
    paired_effect,
    unpaired_effect,
)
from ampcompare.results.analysis.inference.sample_size import pairs_needed_by_t_test
from ampcompare.results.analysis.inference.verdict import (
    Evidence,
    Margin,
    arms_in_opposite_directions,
    decide_verdicts,
)
from ampcompare.results.records.verdict import Verdict

FLOOR = 1e-9
POINT = Margin(0.5, "0.5")
SAMPLES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=12)


def _words(effects: list[Effect], margin: Margin) -> list[str]:
    return [str(verdict) for verdict in decide_verdicts(effects, margin)]


@given(SAMPLES, st.sampled_from([0.9, 0.95, 0.99375]))
def test_paired_effect_is_that_of_scipy(pairs: list[tuple[float, float]], confidence: float) -> None:
    """Interval and all three p values equal those of `ttest_rel` and of shifted one-sample t tests."""
    arm, reference = map(list, zip(*pairs, strict=True))
    differences = np.subtract(arm, reference)
    assume(np.ptp(differences) > 1e-6)
    effect = paired_effect(arm, reference, FLOOR)
    assert interval_if_testable(effect, confidence) == pytest.approx(
        tuple(stats.ttest_rel(arm, reference).confidence_interval(confidence)), rel=1e-9, abs=1e-12
    )
    p = p_values(effect, 0.1)
    lower = stats.ttest_1samp(differences, -0.1, alternative="greater").pvalue
    upper = stats.ttest_1samp(differences, 0.1, alternative="less").pvalue
    assert p.different == pytest.approx(stats.ttest_rel(arm, reference).pvalue, abs=1e-9)
    assert p.non_inferior == pytest.approx(lower, abs=1e-9)
    assert p.equivalent == pytest.approx(max(lower, upper), abs=1e-9)


@given(SAMPLES)
def test_unpaired_effect_is_welchs(pairs: list[tuple[float, float]]) -> None:
    """Samples of unequal size and spread give the p value and freedom of Welch's test."""
    arm, reference = [a for a, _ in pairs], [b for _, b in pairs][:-1]
    assume(np.ptp(arm) > 1e-3)
    assume(np.ptp(reference) > 1e-3)
    effect = unpaired_effect(arm, reference, FLOOR)
    welch = stats.ttest_ind(arm, reference, equal_var=False)
    assert p_values(effect, 1).different == pytest.approx(welch.pvalue, abs=1e-9)
    assert effect.freedom == pytest.approx(welch.df)


@pytest.mark.parametrize("pairs", range(1, MIN_PAIRS))
def test_too_few_pairs_give_no_interval_and_no_winner(pairs: int) -> None:
    """Below three pairs there is an estimate and nothing else, however large the difference."""
    effect = paired_effect([0.9] * pairs, [0.1] * pairs, FLOOR)
    assert interval_if_testable(effect) is None
    assert str(decide_verdicts([effect], POINT)[0]) == "inconclusive (fewer than 3 seeds)"


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([0.1, 0.0, -0.1, 0.05, -0.05], "equivalent (±0.5)"),
        ([2.0, 2.2, 1.9, 2.1, 2.0], "better"),
        ([-2.0, -2.2, -1.9, -2.1, -2.0], "worse"),
        ([1.0, 0.2, 1.4, -0.1, 0.6], "non-inferior (margin 0.5)"),
        ([3.0, -3.0, 2.0, -2.0, 0.5], "inconclusive (≤610 more seeds)"),
    ],
)
def test_each_word(differences: list[float], word: str) -> None:
    """Each pattern of differences in points gets its fixed word at a margin of half a point."""
    assert _words([paired_effect(differences, [0.0] * 5, FLOOR)], POINT) == [word]


def test_a_practical_margin_names_no_small_winner() -> None:
    """A difference that is sure but inside a practical margin is neither better nor worse."""
    effect = Effect(0.4, 0.1, 0.1, 20, 21)
    assert _words([effect], Margin(0.5, "0.5"))[0] == "better"
    assert _words([effect], Margin(0.5, "0.5", practical=True))[0] == "non-inferior (margin 0.5)"


def test_what_is_missing_stays_empty() -> None:
    """An arm without an effect has no verdict, and does not count among the tests of the others."""
    effect = paired_effect([1.0, 1.2, 0.9], [0.0, 0.0, 0.0], FLOOR)
    assert decide_verdicts([None, effect, None], POINT) == [
        Verdict(),
        *decide_verdicts([effect], POINT),
        Verdict(),
    ]


def test_holm_by_hand() -> None:
    """The smallest p value is tested at a third of 5 %, the next at a half, the last at all, up to a failure."""
    sharp, clear, open_ = (Effect(mean, 1.0, 0.4, 8, 9) for mean in (2.0, 1.35, 0.95))
    levels = [
        round(1 - (verdict.confidence or 0), 6)
        for verdict in decide_verdicts([open_, sharp, clear], Margin(0.01, "0.01"))
    ]
    assert levels == [0.05, round(0.05 / 3, 6), 0.025]
    p = [p_values(effect, 0.01).different for effect in (sharp, clear, open_)]
    assert p[0] < 0.05 / 3
    assert p[1] < 0.05 / 2
    assert p[2] < 0.05
    halted = decide_verdicts([open_, Effect(-0.9, 1.0, 0.4, 8, 9)], Margin(0.01, "0.01"))
    assert str(halted[1]).startswith("inconclusive")
    assert halted[1].confidence == pytest.approx(0.975)


@given(
    st.lists(st.tuples(st.floats(-4, 4), st.floats(0.01, 3), st.integers(3, 12)), min_size=1, max_size=9),
    st.booleans(),
)
def test_word_and_interval_agree(arms: list[tuple[float, float, int]], practical: bool) -> None:
    """Whatever the effects and however many arms, the printed interval says what the word says."""
    effects = [Effect(mean, spread, spread / n**0.5, n - 1, n) for mean, spread, n in arms]
    for effect, verdict in zip(effects, decide_verdicts(effects, Margin(0.5, "0.5", practical)), strict=True):
        _check_agreement(effect, verdict, 0.5, practical)


def _check_agreement(effect: Effect, verdict: Verdict, margin: float, practical: bool) -> None:
    low, high, word = verdict.low, verdict.high, str(verdict).partition(" (")[0]
    assert low is not None
    assert high is not None
    assert verdict.confidence is not None
    assert interval_if_testable(effect, verdict.confidence) == (low, high)
    inside, above, differs = low > -margin and high < margin, low > -margin, low > 0 or high < 0
    matters = not practical or abs(effect.mean) > margin
    assert {
        "equivalent": inside,
        "better": low > 0 and matters and not inside,
        "worse": high < 0 and matters and not inside,
        "non-inferior": above,
        "inconclusive": not above and not inside and not (differs and matters),
    }[word]


@pytest.mark.parametrize(("error", "word"), [(0.05, "worse"), (0.07, "inconclusive")])
def test_worse_is_not_inside_the_margin(error: float, word: str) -> None:
    """Among seven bad arms, the claim of no difference goes a step further than that of equivalence.

    At 95 % the interval is inside the margin. At the stricter level of equivalence it is not, and leaves 0 out or not.
    """
    bad = [Effect(-5, 0.1, 0.05, 4, 5)] * 7
    effect = Effect(-0.3, error * 5**0.5, error, 4, 5)
    low, high = interval_if_testable(effect, 0.95) or (0, 0)
    assert low > -0.5
    assert high < 0
    verdict = decide_verdicts([effect, *bad], Margin(0.5, "0.5"))[0]
    assert str(verdict).startswith(word)
    assert verdict.low is not None
    assert verdict.low < -0.5


def test_the_level_of_a_one_sided_test() -> None:
    """Equivalent and non-inferior have the 90 % interval, better and worse the 95 % one, all by scipy."""
    for differences, confidence in (
        ([0.1, 0.0, -0.1, 0.05, -0.05], 0.9),
        ([1.0, 0.2, 1.4, -0.1, 0.6], 0.9),
        ([2.0, 2.2, 1.9, 2.1, 2.0], 0.95),
        ([-2.0, -2.2, -1.9, -2.1, -2.0], 0.95),
        ([3.0, -3.0, 2.0, -2.0, 0.5], 0.95),
    ):
        verdict = decide_verdicts([paired_effect(differences, [0.0] * 5, FLOOR)], POINT)[0]
        assert verdict.confidence == pytest.approx(confidence)
        expected = stats.ttest_1samp(differences, 0).confidence_interval(confidence)
        assert (verdict.low, verdict.high) == pytest.approx(tuple(expected))


@pytest.mark.parametrize(
    ("sd", "needed"), [(0.15, {0.1: 16, 0.2: 6, 0.3: 4, 0.5: 3}), (0.2, {0.1: 27, 0.2: 8, 0.3: 5, 0.5: 3})]
)
def test_pairs_needed_are_those_of_the_tables(sd: float, needed: dict[float, int]) -> None:
    """One-sided tests at 5 % with power 80 % need the known numbers of pairs."""
    assert {margin: pairs_needed_by_t_test(sd, margin, 0.05) for margin in needed} == needed


def test_pairs_needed_end_somewhere() -> None:
    """A difference of next to nothing asks for the largest number there is, not for a search without end."""
    assert pairs_needed_by_t_test(1.0, 1e-9, 0.05) == 10_000
    assert pairs_needed_by_t_test(1e-9, 1.0, 0.05) == 2


@pytest.mark.usefixtures("quick_verdicts")
@pytest.mark.parametrize("arms", [1, 4])
def test_equal_arms_win_at_most_one_time_in_twenty(arms: int) -> None:
    """Over simulated comparisons of equal arms, any arm is called better or worse in at most 5 % of them."""
    generator = np.random.default_rng(arms)
    runs, wrong = 600, 0
    for _ in range(runs):
        reference = generator.normal(size=5)
        effects = [paired_effect(list(generator.normal(size=5)), list(reference), FLOOR) for _ in range(arms)]
        wrong += any(word in ("better", "worse") for word in _words(effects, Margin(0.01, "0.01")))
    assert stats.binomtest(wrong, runs, 0.05, alternative="greater").pvalue > 0.01
    assert wrong > 0


def test_opposite_directions_by_chance() -> None:
    """Of arms whose losses are worse and whose metrics are equal, one is named in at most 5 % of the comparisons."""
    generator, runs, wrong, zeros = np.random.default_rng(3), 400, 0, [0.0] * 5
    for _ in range(runs):
        metric, loss = (
            {
                arm: Evidence(paired_effect(list(generator.normal(mean, size=5)), zeros, FLOOR))
                for arm in range(3)
            }
            for mean in (0.0, -40.0)
        )
        wrong += bool(arms_in_opposite_directions(metric, loss))
    assert stats.binomtest(wrong, runs, 0.05, alternative="greater").pvalue > 0.01
    assert wrong > 0
