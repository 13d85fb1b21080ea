"""The printed interval and the verdict beside it are one statement, whatever the numbers."""

import math
import random
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ampcompare.results.analysis.effects.step_time import time_ratio_of_log
from ampcompare.results.analysis.inference.effect import Effect
from ampcompare.results.analysis.inference.verdict import Margin, decide_verdicts
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.verdict import Verdict
from ampcompare.results.report.columns import format_interval
from ampcompare.results.report.terminal import Terminal, color_text, has_color
from ampcompare.testing import make_comparison, make_record

NUMBER = r"([+-]?[\d.]+)"
INTERVAL = re.compile(rf"{NUMBER} +\[ *{NUMBER}, +{NUMBER}\]")
LIMITS = (-0.5, 0.0, 0.5)
TIME_MARGIN = 0.02


def _bounds(text: str) -> tuple[float, float, float]:
    match = INTERVAL.fullmatch(text)
    assert match is not None, text
    return float(match[1]), float(match[2]), float(match[3])


def _sides(value: float, limits: tuple[float, ...]) -> list[int]:
    return [(value > limit) - (value < limit) for limit in limits]


@given(st.floats(-3, 3), st.floats(0, 3), st.floats(0, 3))
@example(0.0, 0.4996, 0.4)
@example(0.4, 0.4 - 1e-9, 1.0)
@example(-0.25, 0.25 - 1e-13, 0.25 + 1e-13)
@settings(max_examples=300, deadline=None)
def test_rounding_moves_no_bound_over_a_limit(mean: float, below: float, above: float) -> None:
    """Each printed bound lies on the side of 0 and of the margin that the number lies on."""
    low, high = mean - below, mean + above
    _, shown_low, shown_high = _bounds(format_interval(mean, low, high, LIMITS, sign="+"))
    assert _sides(shown_low, LIMITS) == _sides(low, LIMITS)
    assert _sides(shown_high, LIMITS) == _sides(high, LIMITS)
    assert shown_low == pytest.approx(low, abs=0.0051)
    assert shown_high == pytest.approx(high, abs=0.0051)


def test_digits_are_added_only_where_they_are_needed() -> None:
    """Two digits are the rule; a bound next to a limit gets more, and a zero never has a minus."""
    assert format_interval(0.0901, -0.73, 0.91, LIMITS, sign="+") == "+0.09 [-0.73, +0.91]"
    assert format_interval(-0.001, -0.4996, 0.4, LIMITS, sign="+") == "+0.00 [-0.4996, +0.40]"
    assert format_interval(-1.0, -2.0, -0.002, LIMITS, sign="+") == "-1.00 [-2.00, -0.002]"
    assert format_interval(1.0, None, None, LIMITS) == "1.00"
    assert format_interval(1.0, 0.5, math.inf, (1.0,)) == "1.00 [0.50, inf]"


def _random_effects(draw: random.Random, margin: float) -> list[Effect]:
    """Effects as pairs would give them, many of them near a limit."""
    effects = []
    for _ in range(draw.randint(1, 8)):
        spread = margin * 10 ** draw.uniform(-2, 0.7)
        pairs = draw.randint(3, 12)
        near = draw.choice([0.0, margin, -margin, draw.uniform(-3, 3) * margin])
        mean = near + draw.choice([0.0, 1.0]) * draw.gauss(0, spread / math.sqrt(pairs))
        effects.append(Effect(mean, spread, spread / math.sqrt(pairs), pairs - 1, pairs))
    return effects


def _row(arm: str, accuracy: Verdict, mean: float, time: Verdict, time_mean: float) -> ArmSummary:
    return ArmSummary(
        arm=arm, engine=None, half=None, lr=0.1, seeds=[0, 1, 2], completed=3, diverged=0, failed=0, status="ok",
        metric_mean=0.9, quality=accuracy.model_copy(update={"effect": mean}),
        time=time.model_copy(
            update={
                "effect": time_ratio_of_log(-time_mean),
                "low": None if time.high is None else time_ratio_of_log(-time.high),
                "high": None if time.low is None else time_ratio_of_log(-time.low),
            }
        ),
    )  # fmt: skip


def _random_comparison(seed: int, points: float = 0.28, families: int = 1) -> Comparison:
    draw = random.Random(seed)
    margin, time_margin = (
        Margin(points / 100, f"{points:g}"),
        Margin(math.log1p(TIME_MARGIN), "2 %", practical=True),
    )
    verdicts: list[tuple[Effect, Verdict, Effect, Verdict]] = []
    for _ in range(families):
        effects = _random_effects(draw, margin.size)
        times = _random_effects(draw, time_margin.size)[: len(effects)]
        times += times[:1] * (len(effects) - len(times))
        verdicts += zip(
            effects, decide_verdicts(effects, margin), times, decide_verdicts(times, time_margin), strict=True
        )
    rows = [
        _row(f"arm{n}", verdict, e.mean, speed, t.mean) for n, (e, verdict, t, speed) in enumerate(verdicts)
    ]
    reference = _row("fp32", Verdict(), 0.0, Verdict(), 0.0)
    return Comparison(
        command="", reference="fp32", seeds=[0, 1, 2], margin=points, time_margin=TIME_MARGIN,
        arms=[reference, *rows], reading=[], records=[],
    )  # fmt: skip


def _printed(comparison: Comparison, text: str) -> dict[str, list[str]]:
    """Return the cells of each arm's row in a printed table, by their places."""
    lines = text.splitlines()
    rule = next(place for place, line in enumerate(lines) if line.startswith("---"))
    widths = [match.span() for match in re.finditer("-+", lines[rule])]
    return {
        (cells := [line[start:end].strip() for start, end in widths])[0]: cells
        for line in lines[rule + 1 : rule + 1 + len(comparison.arms)]
    }


def _check(word: str, low: float, high: float, margin: tuple[float, float], less_is_better: bool) -> None:
    """Check that what the bounds show is what the word says, and no more."""
    inside = margin[0] < low and high < margin[1]
    keeps = high < margin[1] if less_is_better else low > margin[0]
    zero = 1.0 if less_is_better else 0.0
    better, worse = (high < zero, low > zero) if less_is_better else (low > zero, high < zero)
    if word == "equivalent":
        assert inside
    elif word == "non-inferior":
        assert keeps
    elif word == "better":
        assert better
    elif word == "worse":
        assert worse
    else:
        assert word == "inconclusive"
        assert not inside
        assert not keeps
        # a practical difference is one beyond the margin
        assert not less_is_better or not better or margin[0] < high


@pytest.mark.parametrize("points", [0.1, 0.28, 0.5, 1.0, 2.5])
def test_a_printed_interval_says_what_its_verdict_says(points: float) -> None:
    """Over random families of arms, as printed: equivalent is inside the margin, non-inferior above its lower end."""
    comparison = _random_comparison(0, points, families=30)
    margin = (-comparison.margin, comparison.margin)
    time_margin = (1 / (1 + TIME_MARGIN), 1 + TIME_MARGIN)
    cells = _printed(comparison, Terminal().render(comparison))
    for row in comparison.arms[1:]:
        shown = cells[row.arm]
        word = shown[3].partition(" (")[0]
        assert str(row.quality).startswith(word)
        _, low, high = _bounds(shown[2])
        _check(word, low, high, margin, less_is_better=False)
        _, low, high = _bounds(shown[4])
        _check(str(row.time).partition(" (")[0], low, high, time_margin, less_is_better=True)


def test_an_arm_that_did_not_finish_widens_no_interval() -> None:
    """Beside a diverged and a failed arm the others have the intervals that they have alone."""
    arms = {"fp32": 0.9, "apex:O1": 0.902, "native:fp16": 0.897}
    records = [
        make_record(arm, seed, top1=top1 + 0.001 * ((seed * 7 + len(arm)) % 5))
        for arm, top1 in arms.items()
        for seed in range(4)
    ]
    broken = [
        *(make_record("half", seed, status="diverged") for seed in range(4)),
        *(make_record("apex:O3", seed, status="failed") for seed in range(4)),
    ]
    alone = make_comparison(records, arms=list(arms))
    together = summarize([*records, *broken], arms=[*arms, "half", "apex:O3"], reference="fp32")
    for before, after in zip(alone.arms, together.arms, strict=False):
        assert (before.quality, before.time) == (after.quality, after.time)
    assert alone.arms[1].quality.low is not None


class _Screen:
    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("environment", "on_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_color_follows_the_conventions(
    environment: dict[str, str], on_terminal: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Color is for terminals, unless a variable says otherwise."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert [has_color(_Screen(True)), has_color(_Screen(False))] == [on_terminal, elsewhere]  # type: ignore[arg-type]


def test_color_changes_no_text() -> None:
    """Without its codes a colored report is the plain one; nothing is colored that has no tone."""
    comparison = _random_comparison(3)
    colored = Terminal(100, color=True).render(comparison)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[\d+m", "", colored) == Terminal(100).render(comparison)
    assert color_text("text", "") == "text"
