"""A step that is repeated under an arm, each module judged as the arm computes it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ampcompare.results.analysis.replay import ReplayJudgment, judge_replay
from ampcompare.script.replay.arm import StandInPrecision
from ampcompare.script.replay.one_step import StepRefused, StepReplay
from tests.script.replay.steps import Sides, watched
from tests.script.stand_ins import Behind

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
x, y = torch.randn(16, 8), torch.randint(0, 2, (16,))
for begin in range(0, 16, 4):
    loss = nn.functional.cross_entropy(net(x[begin : begin + 4]), y[begin : begin + 4])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
"""
NARROW = ["1", "2", "3", "4"]  # linear layers, and what gets the 16 bits of one


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    return Sides(SCRIPT, tmp_path_factory.mktemp("steps") / "capsule.pt", 2)


@pytest.fixture
def judge(sides: Sides, behind: Behind) -> Any:
    def judge_under(arm: str, script: str = SCRIPT) -> ReplayJudgment:
        change = StepReplay(sides.capsule, sides.base.answers, arm=StandInPrecision(behind(arm)))
        return judge_replay(arm, vars(sides.base), vars(watched(script, change)))

    return judge_under


def test_fp32_is_the_step_as_it_is(judge: Any) -> None:
    found = judge("fp32")
    assert (found.answer, found.notes, found.unjudged) == ("noise", [], {})


@pytest.mark.parametrize(("arm", "bits"), [("native:bf16", 8), ("native:fp16", 11)])
def test_16_bits_are_less_exact_where_the_arm_computes_in_them(arm: str, bits: int, judge: Any) -> None:
    """Gradients are those of a scaled loss, divided by its scale: no error is larger than roundings of the type."""
    found = judge(arm)
    assert (found.answer, found.exit_code, found.module_names, found.unjudged) == (
        "less exact",
        1,
        NARROW,
        {},
    )
    assert all(one.apart < 4 * 2.0**-bits for one in found.findings), found.findings
    assert {one.part for one in found.findings if one.module == "1"} == {"fwd", "dgrad", "wgrad"}


def test_a_mistake_is_another_function_under_an_arm_too(judge: Any) -> None:
    found = judge("native:fp16", SCRIPT.replace("nn.Tanh()", "nn.Tanhshrink()"))
    assert {one.module for one in found.findings if one.answer == "another function"} == {"2"}, found.findings
    found = judge("native:fp16", SCRIPT.replace("clip_grad_norm_(net.parameters(), 0.1)", "clip_grad_norm_"))
    assert "(gradients)" in found.module_names


def test_a_step_that_overflows_is_judged_all_the_same(judge: Any) -> None:
    """The modules whose gradients have overflowed have no end of an error."""
    found = judge("native:fp16,init_scale=1e15")
    assert found.notes == ["the step is skipped: at the loss scale 2.5e+14 gradients overflow"]
    assert found.answer == "less exact"
    assert "4" in [one.module for one in found.findings if one.apart == math.inf]


def test_a_script_that_scales_its_loss_is_refused(sides: Sides, behind: Behind) -> None:
    script = SCRIPT.replace("for begin", "scaler = torch.amp.GradScaler('cpu')\nfor begin")
    script = script.replace("net(x[begin : begin + 4])", "torch.autocast('cpu')(net)(x[begin : begin + 4])")
    script = script.replace(
        "loss.backward()", "scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)"
    )
    script = script.replace("optimizer.step()", "scaler.step(optimizer)\n    scaler.update()")
    change = StepReplay(sides.capsule, sides.base.answers, arm=StandInPrecision(behind("native:fp16")))
    with pytest.raises(StepRefused, match="the script scales its loss by itself, by a GradScaler"):
        watched(script, change)
