"""An Apex script under other arms trains as the same script written by hand for them, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.script.small_script import ARMS
from tests.script.stand_ins import arms
from tests.script.trainings import (
    Apex,
    Gan,
    Plain,
    Program,
    TorchAmp,
    Trained,
    assert_equal,
    train,
    train_gan,
)

pytestmark = pytest.mark.integration  # many trainings, each twice

BY_HAND: dict[str, Any] = {
    "fp32": partial(TorchAmp, None),
    "fp16": partial(TorchAmp, torch.float16, init_scale=1024, growth_interval=3),
    "odd": partial(TorchAmp, torch.float16, init_scale=1000, growth_interval=2),
    "bf16": partial(TorchAmp, torch.bfloat16),
}


def under(arm: str, run: Callable[[Callable[[], Plain]], Trained]) -> Trained:
    """Run a script for Apex whose `amp` is the arm's."""
    with arms() as behind:
        return run(lambda: Apex(behind.amp(arm), end=behind.end))


PROGRAMS = st.builds(
    Program,
    optimizer=st.sampled_from(["sgd", "adam", "fused"]),
    losses=st.integers(1, 2),
    micro=st.sampled_from([1, 3]),
    delay=st.booleans(),
    clip=st.sampled_from(["", "master", "model", "hand"]),
    overflow_at=st.sampled_from([-1, 0, 2, 4]),
    resume_at=st.sampled_from([-1, 0, 2]),
    evaluate=st.booleans(),
    schedule=st.booleans(),
)


# a first step that is skipped
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@settings(max_examples=24, deadline=None)
@given(PROGRAMS, st.sampled_from(sorted(ARMS)))
def test_a_script_for_apex_trains_as_written_by_hand(program: Program, arm: str) -> None:
    """One optimizer, accumulated and clipped in any way, with overflows, an evaluation, a schedule and a resumption."""
    if arm != "fp16" and arm != "odd":
        program = replace(program, overflow_at=-1)
    # To the end, one after the other: the casts of the first must not act on the second.
    ours = under(ARMS[arm], lambda make: train(program, make))
    assert_equal(ours, train(program, BY_HAND[arm]), (arm, program))


GANS = st.builds(
    Gan,
    together=st.tuples(*[st.booleans()] * 4),
    losses=st.integers(1, 2),
    micro=st.integers(1, 2),
    clip=st.booleans(),
    overflows=st.tuples(st.tuples(st.integers(-1, 3), st.sampled_from(["maker", "judge"]))),
)


@settings(max_examples=12, deadline=None)
@given(GANS)
def test_two_optimizers_share_a_scale(program: Gan) -> None:
    """A GAN trains as by hand with one GradScaler, whether its optimizers take turns or one waits for the other."""
    ours = under(ARMS["fp16"], lambda make: train_gan(program, make()))
    assert_equal(ours, train_gan(program, BY_HAND["fp16"]()), program)
