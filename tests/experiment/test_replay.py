"""Which arms a step can be repeated under."""

import pytest

from ampcompare.base.errors import AmpCompareError
from ampcompare.experiment.replay import replay_sides_of_changes


def test_an_arm_is_a_change_in_its_one_spelling() -> None:
    (side, other) = replay_sides_of_changes(["arm=bf16", "arm=O1"], {}, None, ["train.py"])
    assert (side.name, side.changes) == ("arm=native:bf16", {"arm": "native:bf16"})
    assert other.name == "arm=apex:O1"


@pytest.mark.parametrize(
    ("arm", "why"),
    [
        ("O2", "it holds weights in 16 bits, so that its step does not start from the numbers of the capsule"),
        ("half", "arm=native:fp16 computes from those, and compare trains half"),
        ("half:bf16", "arm=native:bf16 computes from those"),
        ("bf16,state=bf16", "it holds the state of the optimizer in 16 bits"),
        ("gemm:fp8", "its products have number formats of their own"),
        ("fp8", "cannot replace amp in a script"),
        ("script", "it is the step as it is"),
        ("nosuch", "unknown backend"),
    ],
)
def test_other_arms_are_refused_with_the_reason(arm: str, why: str) -> None:
    with pytest.raises(AmpCompareError, match=why):
        replay_sides_of_changes([f"arm={arm}"], {}, None, ["train.py"])
