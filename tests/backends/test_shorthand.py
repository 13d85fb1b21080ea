"""Short ways to write an arm, and several arms in one text."""

import pytest

from ampcompare.backends.arm import Arm, full_name, parse_arms, same_arm
from ampcompare.base.errors import ConfigError

SPELLINGS = {
    "fp32": ["FP32", "float32"],
    "apex:O0": ["o0", "Apex:O0"],
    "apex:O1": ["apex", "APEX:O1", "apex:opt_level=o1", "O1"],
    "apex:O2": ["O2", "apex:o2"],
    "apex:O5": ["O5", "o5"],
    "native:fp16": ["fp16", "AMP", "float16", "native", "native:FP16", "amp:fp16"],
    "native:bf16": ["BF16", "bfloat16", "amp:bf16"],
    "half:bn_fp32": ["HALF:bn_fp32"],
    "half:dtype=bf16": ["half:BF16", "half:dtype=bfloat16"],
    "apex:O2,loss_scale=128": ["o2:loss_scale=128", "Apex:O2,loss_scale=128.0"],
    "fp32:tf32": ["fp32,tf32"],
}
CASES = [(text, arm) for arm, texts in SPELLINGS.items() for text in texts]


@pytest.mark.parametrize(("text", "arm"), CASES)
def test_every_spelling_is_the_canonical_arm(text: str, arm: str) -> None:
    assert str(Arm.parse(text)) == arm
    assert Arm.parse(text) == Arm.parse(arm)


@pytest.mark.parametrize(
    ("texts", "arms"),
    [
        (["fp32,bf16,O2"], ["fp32", "native:bf16", "apex:O2"]),
        (["half,bf16"], ["half", "native:bf16"]),
        (["half:bf16,fp32"], ["half:dtype=bf16", "fp32"]),
        (["half:bn_fp32,dtype=bf16,bf16"], None),
        (["half:bn_fp32,native:bf16"], ["half:bn_fp32", "native:bf16"]),
        (["fp32", "O1, O2 ,"], ["fp32", "apex:O1", "apex:O2"]),
        (["actnn:bits=2,over=apex:O2+loss_scale=128,fp32"], ["actnn:bits=2,over=apex:O2+loss_scale=128", "fp32"]),
    ],
)
def test_lists(texts: list[str], arms: list[str] | None) -> None:
    """A word is an arm unless it is an option of the arm before it; where it could be both, that is an error."""
    if arms is None:
        with pytest.raises(ConfigError, match="'bf16' can be an option of the arm before it, or the arm 'native:bf16'"):
            parse_arms(texts)
        return
    assert [str(arm) for arm in parse_arms(texts)] == arms


def test_a_backend_in_python() -> None:
    """`Arm.make` takes the backend in any case, and names the arm where a shorthand is given as a backend."""
    assert Arm.make("Apex", opt_level="o2") == Arm.parse("apex:O2")
    assert Arm.make("amp", dtype="bf16") == Arm.parse("bf16")
    with pytest.raises(ConfigError, match="did you mean the arm 'native:bf16'"):
        Arm.make("bf16")
    assert full_name("nothing") is None


def test_the_arm_of_a_table() -> None:
    """A reference is found under another spelling; what is no arm stays as it is."""
    assert same_arm("O2", ["baseline", "apex:O2"]) == "apex:O2"
    assert same_arm("apex:O2", ["o2", "fp32"]) == "o2"
    assert same_arm("Baseline", ["baseline"]) == "Baseline"
    assert same_arm("bf16", ["fp32"]) == "bf16"
    assert same_arm(None, ["fp32"]) is None
