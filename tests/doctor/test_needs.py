"""Whether arms can run, for machines made here."""

from dataclasses import replace
from typing import Any

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.backends.library import Library
from ampcompare.doctor.finding import Check
from ampcompare.doctor.needs import MachineFacts, examine_arm

GPU = {"index": 0, "capability": [9, 0]}


def _facts(
    state: str = "absent", *, usable: bool = False, devices: tuple[Any, ...] = (), torch: str = "ok"
) -> MachineFacts:
    apex = Check("Apex", "apex", f"{state}.", "ok", "", ("fix apex",), {"state": state, "usable": usable})
    facts = {"failure": "broken"} if torch == "problem" else {"version": "2.13.0"}
    found = Check("Software", "torch", "as it is", torch, "", ("fix torch",), facts)  # type: ignore[arg-type]
    return MachineFacts(found, devices, apex, fast_bf16=True)


@pytest.mark.parametrize("arm", ["fp32", "apex:O1", "apex:O2,engine=compat", "native:bf16", "half"])
def test_ordinary_arms_need_torch_alone(arm: str) -> None:
    """Without Apex and without a GPU all of them run, and without torch none does."""
    needs = examine_arm(Arm.parse(arm), _facts())
    assert (needs.can_run, needs.device) == (True, "cpu")
    broken = examine_arm(Arm.parse(arm), _facts(torch="problem"))
    assert (broken.can_run, broken.remedy) == (False, ("fix torch",))


@pytest.mark.parametrize(
    ("facts", "missing"),
    [
        (_facts(), 2),
        (_facts("no_amp", devices=(GPU,)), 1),
        (_facts("full", usable=True), 1),
        (_facts("other_build", usable=True, devices=(GPU,)), 0),
        (_facts("full", usable=True, devices=(GPU,)), 0),
    ],
)
def test_the_real_apex_needs_itself_and_a_gpu(facts: MachineFacts, missing: int) -> None:
    """engine=nvidia fits where `apex.amp` imports and there is a GPU; else each lack is named, and our engine too."""
    needs = examine_arm(Arm.parse("apex:O2,engine=nvidia"), facts)
    assert len(needs.missing) == missing
    assert needs.can_run is (missing == 0)
    if missing:
        assert needs.remedy[-1].startswith("ampcompare run --arm apex:O2,engine=compat")


def test_o1_of_the_real_apex_is_noted() -> None:
    needs = examine_arm(Arm.parse("apex:O1,engine=nvidia"), _facts("full", usable=True, devices=(GPU,)))
    assert needs.can_run
    assert "O1 of the real Apex raises" in needs.notes[0]


def test_auto_meets_a_broken_apex() -> None:
    """On CUDA `auto` takes an Apex that is there by its files, so a broken one stops the arm; O1 is not taken there."""
    facts = _facts("broken", devices=(GPU,))
    assert not examine_arm(Arm.parse("apex:O2"), facts).can_run
    assert examine_arm(Arm.parse("apex:O1"), facts).can_run
    assert examine_arm(Arm.parse("apex:O2"), _facts("broken")).can_run


def test_bf16_on_an_old_gpu_and_fp16_on_a_cpu() -> None:
    old = _facts(devices=({"index": 0, "capability": [7, 0]},))
    assert "bf16" in examine_arm(Arm.parse("native:bf16"), old).notes[0]
    assert examine_arm(Arm.parse("apex:O5"), old).notes == examine_arm(Arm.parse("native:bf16"), old).notes
    for arm in ("native:fp16", "half:masters=fp32", "fsdp:fp16", "apex:O1", "apex:O2"):
        assert examine_arm(Arm.parse(arm), _facts()).notes == ("fp16 is emulated on this CPU",)
    slow = replace(_facts(), fast_bf16=False)
    for arm in ("native:bf16", "half:bf16,kahan", "fsdp:bf16", "apex:O4", "apex:O5"):
        assert examine_arm(Arm.parse(arm), _facts()).notes == ()
        assert examine_arm(Arm.parse(arm), slow).notes == ("bf16 is emulated on this CPU",)
    assert examine_arm(Arm.parse("apex:O0"), _facts()).notes == ()


def test_libraries_that_cannot_run_or_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not installed is named with the line to type."""
    monkeypatch.setattr(Library, "why_missing", lambda self: f"not installed: {self.install}")
    needs = examine_arm(Arm.parse("accelerate:no"), _facts())
    assert (needs.missing, needs.remedy) == (
        ("accelerate is not installed: pip install accelerate",),
        ("pip install accelerate",),
    )


def test_backend_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = {"good": "json:loads", "bad": "no_such_module_here:Class"}
    monkeypatch.setattr("ampcompare.backends.catalog.third_party_backends", lambda: registered)
    assert examine_arm(Arm.parse("good"), _facts()).can_run
    needs = examine_arm(Arm.parse("bad"), _facts())
    assert "No module named 'no_such_module_here'" in needs.missing[0]
