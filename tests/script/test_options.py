"""Each option of an arm acts in a script as in ampcompare's own loop, bit for bit, however the script is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ampcompare.base.errors import BackendUnavailable
from tests.covering import covering
from tests.script.trainings import (
    Apex,
    OurLoop,
    Plain,
    Program,
    TorchAmp,
    Trained,
    assert_equal,
    has_bits,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
ARMS = {
    "half:bf16,kahan": "half:bf16",
    "half:bf16,rounding=stochastic": "half:bf16",
    "half:bf16,state=fp32": "half:bf16",
    "half:bf16,kahan,dynamic": "half:bf16",
    "half:bf16,masters=fp32,state=bf16": "half:bf16,masters=fp32",
    "native:bf16,state=bf16": "native:bf16",
    "native:bf16,weights=bf16": "native:bf16",
    "native:bf16,weights=bf16,state=fp32": "native:bf16,weights=bf16",
    "native:bf16,weights=bf16,masters=fp32": "native:bf16",
    "native:fp16,state=bf16": "native:fp16",
    "O2,cast_model_outputs=fp16": "O2",
}
DOORS = ("plain", "closure", "autocast", "scaler", "apex.amp")
OPTIMIZERS = ("plain", "sgd", "groups")


def by_script(door: str, optimizer: str) -> Trained:
    """Train by a script that is written without mixed precision, for torch.amp or for Apex."""
    from apex import amp

    sides: dict[str, Callable[[], Plain]] = {
        "autocast": lambda: TorchAmp(torch.bfloat16, whole=False),
        "scaler": lambda: TorchAmp(torch.float16, whole=False),
        "apex.amp": lambda: Apex(amp, end=lambda: None),
    }
    program = Program(optimizer, clip="master", early=True, closure=door == "closure")
    return train(program, sides.get(door, Plain), lambda side: None)


def in_our_loop(arm: str, optimizer: str) -> Trained:
    return train(Program(optimizer, clip="master", early=True), lambda: OurLoop(arm), lambda side: None)


@pytest.mark.integration
@covering({"arm": list(ARMS), "door": DOORS, "optimizer": list(OPTIMIZERS)})
def test_an_option_acts_as_in_our_loop(behind: Any, arm: str, door: str, optimizer: str) -> None:
    """The bits are those of the own loop, and not those of the arm without the option wherever they differ there."""
    expected, without = in_our_loop(arm, optimizer), in_our_loop(ARMS[arm], optimizer)
    behind.end()  # the patches and levels of the own loop
    behind(arm)
    trained = by_script(door, optimizer)
    assert_equal(trained, expected)
    if "state" not in arm or optimizer != "plain":  # which has no state
        assert not all(map(has_bits, expected[-1][0], without[-1][0])) or "cast_model_outputs" in arm


def test_a_model_param_shows_the_gradient_of_its_copy(behind: Any) -> None:
    """In a script for Apex that clips the parameters of the model, under an arm that scales and steps copies."""
    trained = []
    for clip in ("model", "master"):
        program, amp = Program("groups", clip=clip, early=True), behind.amp("half:bf16,kahan,dynamic")
        trained.append(train(program, lambda amp=amp: Apex(amp, end=behind.end)))
    assert_equal(*trained)


def test_tf32_is_refused_where_the_device_lacks_it(behind: Any) -> None:
    with pytest.raises(BackendUnavailable, match="TF32"):
        behind("fp32:tf32")
