"""The accelerators besides CUDA that torch sees."""

from types import SimpleNamespace

import pytest
import torch

from ampcompare.api.doctor.examine import examine_accelerators
from ampcompare.api.doctor.probes import accelerators
from ampcompare.base.processes.call import Answer


def test_each_accelerator_is_named_with_the_arms_that_train_on_it() -> None:
    """One that computes is ok; one whose product fails is a problem."""
    broken = {"name": "xpu:1", "failure": "RuntimeError: no kernel"}
    answer = Answer({"devices": [{"name": "xpu:0", "failure": None}, broken]}, "done")
    works, fails = examine_accelerators(answer)
    assert (works.name, works.value, works.verdict) == ("xpu:0", "an Intel GPU", "ok")
    assert works.reason.startswith("--device xpu:0 trains fp32, native, half in one process")
    assert (fails.verdict, fails.reason) == ("problem", "a small fp16 product fails: RuntimeError: no kernel")
    (unknown,) = examine_accelerators(Answer({}, "raised", "ImportError"))
    assert unknown.verdict == "warning"


def test_the_probe_asks_each_device_for_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that torch counts and cannot compute on is named with torch's error."""
    seen = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(torch, "xpu", seen)
    monkeypatch.setattr(torch, "mps", SimpleNamespace(is_available=lambda: False))
    found = accelerators(["mps", "xpu", "none"])["devices"]
    assert [device["name"] for device in found] == ["xpu:0", "xpu:1"]
    assert all(device["failure"] for device in found)  # this torch has no kernels for them
