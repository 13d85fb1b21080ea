"""The four laws on what a prefix has shown."""

import math
from typing import Any

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.laws import expected_outlook_of, loss_distance
from ampcompare.results.records.outlook import RoundedStateDrift, ShareLost, WatchedFirstSteps


def _prefix(rest: float = 0.0, now: float = 0.0, **values: Any) -> WatchedFirstSteps:
    shares = {name: ShareLost(now=now, rest=rest) for name in ("bf16", "fp16")}
    return WatchedFirstSteps(steps=100, shares=shares, **{"basis": "its scheduler, to step 300", **values})


@pytest.mark.parametrize(
    ("arm", "rest", "word"),
    [
        ("half:bf16", 0.2, "cannot know"),
        ("half,state=fp32", 0.1, "no fault in sight"),
        ("half,state=fp32", 0.3, "cannot know"),
        ("half,state=fp32", 0.6, "will not hold"),
        ("half:bf16", 0.6, "will not hold"),
        ("half:bf16,masters=fp32", 0.6, "no fault in sight"),
        ("half:bf16,rounding=stochastic", 0.6, "no fault in sight"),
        ("O2", 0.6, "no fault in sight"),
        ("O3", 0.6, "will not hold"),
        ("fp32", 0.6, "no fault in sight"),
    ],
)
def test_lost_updates(arm: str, rest: float, word: str) -> None:
    """Only weights that are held in 16 bits and rounded to nearest lose them; a cure is an option that the arm has."""
    found = expected_outlook_of(Arm.parse(arm), _prefix(rest, 0.1), twin_distance=0.0)
    assert found.word == word
    if word == "will not hold":
        assert found.part == "weights"
        assert "60 % of the update is below half an ulp over the rest of the schedule (now 10 %)" in found.why
        fewer = {"O3": "masters=fp32", "half,state=fp32": "masters=fp32 or kahan"}
        assert found.cure == fewer.get(arm, "masters=fp32, kahan or rounding=stochastic")


@pytest.mark.parametrize(("arm", "part"), [("half:bf16", "weights"), ("native:bf16,state=bf16", "state")])
def test_what_was_not_measured_is_not_known(arm: str, part: str) -> None:
    """A training that ended before an update was rounded says nothing of 16-bit weights and state."""
    found = expected_outlook_of(Arm.parse(arm), WatchedFirstSteps(steps=9), twin_distance=0.0)
    assert (found.word, found.part) == ("cannot know", part)
    assert "ended after 9 steps" in found.why
    assert (
        expected_outlook_of(Arm.parse("O2"), WatchedFirstSteps(steps=9), twin_distance=0.0).word
        == "no fault in sight"
    )


def test_a_chaotic_training_cannot_be_known() -> None:
    """Where a twin goes elsewhere, a gap is a path; what was seen to overflow stays a fault."""
    for arm in ("half:bf16", "native:bf16", "O2"):
        assert expected_outlook_of(Arm.parse(arm), _prefix(0.6), twin_distance=0.05).word == "cannot know"
    assert (
        expected_outlook_of(Arm.parse("fp32"), _prefix(0.6), twin_distance=0.05).word == "no fault in sight"
    )
    assert (
        expected_outlook_of(Arm.parse("half"), _prefix(0.6, largest_gradient=1e6), twin_distance=0.05).word
        == "will not hold"
    )


def test_twins_speak_of_the_prefix_alone() -> None:
    """They may come together again: a longer prefix is proposed where there is one."""
    found = expected_outlook_of(Arm.parse("half:bf16"), _prefix(0.6, total=3000), twin_distance=0.05)
    assert found.why == (
        "twins differ by 5 % over these 100 steps, as any arm may, whatever they do later; "
        "--prefix 400 tells whether they come together again"
    )
    assert expected_outlook_of(
        Arm.parse("half:bf16"), _prefix(0.6, total=300), twin_distance=0.05
    ).why.endswith("compare the arm to the end")


@pytest.mark.parametrize(
    ("arm", "word"),
    [
        ("native:bf16,state=bf16", "cannot know"),
        ("half:bf16,kahan", "cannot know"),
        ("half:bf16,masters=fp32,state=bf16", "cannot know"),
        ("half:bf16,kahan,state=fp32", "no fault in sight"),
        ("native:bf16", "no fault in sight"),
        ("O2", "no fault in sight"),
    ],
)
def test_a_state_that_rounding_holds(arm: str, word: str) -> None:
    """It matters to the arms that hold the state in 16 bits, whatever their weights do."""
    error = RoundedStateDrift(steps=2900, decay=0.999, steady=0.05, falling=0.35)
    found = expected_outlook_of(Arm.parse(arm), _prefix(state_errors={"bf16": error}), twin_distance=0.0)
    assert found.word == word
    if word == "cannot know":
        assert found.part == "state"
        assert "decays by 0.1 % a step hardly falls in bf16: steps are 35 % away from fp32's" in found.why
        assert found.cure == f"{'state=fp32' if 'state' not in arm else 'no state=bf16'}, or a smaller beta2"
    small = RoundedStateDrift(steps=2900, decay=0.99, steady=0.01, falling=0.1)
    assert (
        expected_outlook_of(Arm.parse(arm), _prefix(state_errors={"bf16": small}), twin_distance=0.0).word
        == "no fault in sight"
    )


def test_a_state_that_moves_in_an_unknown_way() -> None:
    found = expected_outlook_of(
        Arm.parse("native:bf16,state=bf16"), _prefix(state_is_known=False), twin_distance=0.0
    )
    assert (found.word, found.part) == ("cannot know", "state")
    assert (
        expected_outlook_of(Arm.parse("native:bf16"), _prefix(state_is_known=False), twin_distance=0.0).word
        == "no fault in sight"
    )


def test_rates_that_are_not_known() -> None:
    """They leave a judgment only where the present rate already loses too much."""
    unknown = {"rates_known": False, "basis": "a plateau of a metric decides them"}
    found = expected_outlook_of(
        Arm.parse("half:bf16"), _prefix(0.0, 0.1, is_floor=True, **unknown), twin_distance=0.0
    )
    assert found.word == "cannot know"
    assert found.why == (
        "the learning rates ahead are not known (a plateau of a metric decides them); "
        "at least 10 % of the update is below half an ulp if the rate stays"
    )
    assert (
        expected_outlook_of(Arm.parse("half:bf16"), _prefix(0.0, 0.5, **unknown), twin_distance=0.0).word
        == "will not hold"
    )


@pytest.mark.parametrize(
    ("arm", "largest", "word"),
    [
        ("half", 65505.0, "will not hold"),
        ("half", 65504.0, "no fault in sight"),
        ("O2,loss_scale=1024", 64.0, "will not hold"),
        ("O2", 1e9, "no fault in sight"),
        ("native:fp16", 1e9, "no fault in sight"),
    ],
)
def test_overflow_that_was_seen(arm: str, largest: float, word: str) -> None:
    """The largest gradient times a static scale is compared with fp16's largest number; a dynamic one makes way."""
    found = expected_outlook_of(Arm.parse(arm), _prefix(largest_gradient=largest), twin_distance=0.0)
    assert found.word == word
    assert (found.part == "gradients") == (word == "will not hold")


def test_a_denominator_of_zero() -> None:
    """It ends a training at once where the optimizer's state is fp16, and not where it is wider."""
    zero = _prefix(zero_denominators={"fp16": 0.41})
    found = expected_outlook_of(Arm.parse("half"), zero, twin_distance=0.0)
    assert (found.word, found.part) == ("will not hold", "state")
    assert "0 in fp16 for 41 % of the elements" in found.why
    assert found.cure == "state=fp32, or a larger eps"
    assert (
        expected_outlook_of(Arm.parse("O3"), zero, twin_distance=0.0).cure == "masters=fp32, or a larger eps"
    )
    assert expected_outlook_of(Arm.parse("O2"), zero, twin_distance=0.0).word == "no fault in sight"


def test_the_script_as_it_is_written() -> None:
    """Its weights are of the type in which the script holds them."""
    found = expected_outlook_of(Arm.parse("script"), _prefix(0.6, 0.1, weights="bf16"), twin_distance=0.0)
    assert found.word == "will not hold"
    assert found.why == "your script loses 60 % of its updates over the rest of the schedule (now 10 %)"
    assert found.cure == "half:bf16 with masters=fp32, kahan or rounding=stochastic"
    assert (
        expected_outlook_of(Arm.parse("script"), _prefix(0.6), twin_distance=0.0).word == "no fault in sight"
    )


@pytest.mark.parametrize("arm", ["fp8:tensorwise", "gemm:mxfp8", "gemm:bf16,dgrad=nvfp4"])
def test_noise_of_products_depends_on_what_is_still_to_learn(arm: str) -> None:
    found = expected_outlook_of(Arm.parse(arm), _prefix(), twin_distance=0.0)
    assert (found.word, found.part) == ("cannot know", "products")
    assert (
        expected_outlook_of(Arm.parse("gemm:bf16"), _prefix(), twin_distance=0.0).word == "no fault in sight"
    )


def test_the_distance_of_a_twin() -> None:
    """The last three tenths count; a number that is not finite is without limit, and too few losses say nothing."""
    one = [1.0] * 10
    assert loss_distance(one, [9.0] * 7 + [1.01] * 3) == pytest.approx(0.01)
    assert loss_distance(one, [1.0] * 9 + [math.nan]) == math.inf
    assert loss_distance(one[:2], one[:2]) is None
