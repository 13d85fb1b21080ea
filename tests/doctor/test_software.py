"""Findings on Python, torch and its build, from answers made here."""

import sys
from typing import Any

import pytest

from ampcompare.base.processes.call import ChildAnswer
from ampcompare.base.version import NEWEST_TORCH
from ampcompare.doctor import machine
from ampcompare.doctor.finding import ask
from ampcompare.doctor.machine import examine_torch

BUILD = {"version": "2.13.0", "cuda": "13.0", "hip": None, "cudnn": 91301}


def test_a_cpu_build_beside_a_gpu() -> None:
    answer = ChildAnswer({**BUILD, "cuda": None, "cudnn": None}, "done")
    assert examine_torch(answer, has_gpu=False).verdict == "ok"
    finding = examine_torch(answer, has_gpu=True)
    assert finding.verdict == "problem"
    assert "pip install torch torchvision" in finding.remedy[0]


def test_no_torch(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, it is said how to get it, with and without a GPU."""
    monkeypatch.setattr(machine, "installed_version", {}.get)
    monkeypatch.setattr(machine, "version_of_torch_on_path", str)
    finding = examine_torch(ask("torch_build", path=site.path), has_gpu=False)
    assert (finding.value, finding.verdict) == ("not installed", "problem")
    assert len(finding.remedy) == 2


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What works next to it is said, and how it may stay, whether or not it can be imported."""
    monkeypatch.setattr(machine, "installed_version", {"torch": "1.13.1+cu117"}.get)
    for answer in (
        ChildAnswer({**BUILD, "version": "1.13.1+cu117"}, "done"),
        ChildAnswer({}, "raised", "AttributeError: no Tensor"),
    ):
        finding = examine_torch(answer, has_gpu=True)
        assert (finding.value, finding.verdict) == ("1.13.1+cu117", "problem")
        assert "lint, migrate" in finding.reason
        assert finding.remedy[0] == "pip install -U torch torchvision"
        assert f"--stack old={sys.executable} " in finding.remedy[1]


@pytest.mark.parametrize(("beyond", "verdict"), [(0, "ok"), (1, "note")])
def test_a_torch_newer_than_what_was_tried(beyond: int, verdict: str) -> None:
    """It is said to be so, and is no problem."""
    version = f"{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + beyond}.3"
    finding = examine_torch(ChildAnswer({**BUILD, "version": version}, "done"), has_gpu=True)
    assert finding.verdict == verdict
    assert ("newer than {}.{}".format(*NEWEST_TORCH) in finding.reason) == bool(beyond)
