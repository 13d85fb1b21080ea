"""Findings on the machine and its libraries: CPU, accelerators, memory, disk, threads, extras and torchvision."""

import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import setuptools
import torch

from ampcompare.base.processes.call import ChildAnswer
from ampcompare.doctor import machine
from ampcompare.doctor.examine import EXTRAS, examine_accelerators, examine_switches_and_variables
from ampcompare.doctor.finding import Check, ask
from ampcompare.doctor.machine import (
    examine_machine,
    examine_processor,
    examine_torchvision,
    version_of_fitting_torchvision,
)
from ampcompare.doctor.probes import accelerators

ROOT = Path(__file__).resolve().parents[2]
BUILD: dict[str, Any] = {"cuda": None, "tf32_products": False, "tf32_convolutions": True}
GIB = 2**30


def _named(findings: list[Any]) -> dict[str, Any]:
    return {finding.name: finding for finding in findings}


def test_16_bit_types_on_the_cpu() -> None:
    """Without instructions for bf16 both are emulated, which is a note."""
    found = _named(examine_processor({**BUILD, "bf16_instructions": False}))
    assert (found["16-bit types"].value, found["16-bit types"].verdict) == ("bf16 and fp16 emulated", "note")
    found = _named(examine_processor({**BUILD, "bf16_instructions": True}))
    assert (found["16-bit types"].value, found["16-bit types"].verdict) == (
        "bf16 native, fp16 emulated",
        "ok",
    )
    assert [finding.name for finding in examine_processor(None)] == ["processor"]


def test_tf32() -> None:
    """Switches that differ are a note on CUDA, with the way to set both, and nothing elsewhere."""
    assert _named(examine_switches_and_variables(BUILD, {}))["tf32"].verdict == "ok"
    finding = _named(examine_switches_and_variables({**BUILD, "cuda": "13.0"}, {}))["tf32"]
    assert (finding.verdict, finding.value) == ("note", "products in fp32, convolutions in TF32")
    assert finding.remedy[0].startswith("export NVIDIA_TF32_OVERRIDE=0")


def test_variables_for_cuda_on_a_cpu() -> None:
    """What works on CUDA alone is a note where torch has none, and a warning where it has."""
    variable = {"NVIDIA_TF32_OVERRIDE": "1"}
    assert _named(examine_switches_and_variables(BUILD, variable))["NVIDIA_TF32_OVERRIDE"].verdict == "note"
    assert (
        _named(examine_switches_and_variables({**BUILD, "cuda": "13.0"}, variable))[
            "NVIDIA_TF32_OVERRIDE"
        ].verdict
        == "warning"
    )
    assert (
        _named(examine_switches_and_variables(BUILD, {"ATEN_CPU_CAPABILITY": "default"}))[
            "ATEN_CPU_CAPABILITY"
        ].verdict
        == "warning"
    )


def test_switches_that_are_off() -> None:
    """A switch set to 0 is not set, and that nothing is set is said."""
    assert list(_named(examine_switches_and_variables(None, {"CUDA_LAUNCH_BLOCKING": "0", "HOME": "x"}))) == [
        "variables"
    ]


def test_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a container counts, not the memory of its host; little of it is a warning."""
    memory = SimpleNamespace(total=64 * GIB, available=32 * GIB)
    (tmp_path / "max").write_text("max\n")
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(machine, "LIMITS", (tmp_path / "max",))
    found = _named(examine_machine({}))
    assert (found["memory"].value, found["memory"].verdict) == ("64.0 GiB, 32.0 GiB available", "ok")
    (tmp_path / "max").write_text(f"{GIB}\n")
    found = _named(examine_machine({}))
    assert found["memory"].value == "1.0 GiB, the limit of this container, 1.0 GiB available"
    assert found["memory"].verdict == "warning"


def test_disk_and_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room on either is a warning with the words to paste."""
    small = type("Usage", (), {"total": 64 * 2**20, "free": 2**20})()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: small)
    found = _named(examine_machine({}))
    assert (found["shared memory"].verdict, found["disk"].verdict) == ("warning", "warning")
    assert found["shared memory"].value == "0.062 GiB in /dev/shm"
    assert "docker run --shm-size" in found["shared memory"].remedy[0]


def test_threads() -> None:
    """More threads than cores are a warning; an odd value is shown as it is."""
    assert _named(examine_machine({"OMP_NUM_THREADS": "9999"}))["threads"].verdict == "warning"
    assert _named(examine_machine({"OMP_NUM_THREADS": "1"}))["threads"].verdict == "ok"
    assert _named(examine_machine({"OMP_NUM_THREADS": "4,2"}))["threads"].value == "OMP_NUM_THREADS=4,2"
    assert "sets 1 in its own processes" in _named(examine_machine({}))["threads"].reason


def test_extras_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table holds every extra of setup.py that users may want, with its distributions."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", asked.update)
    runpy.run_path(str(ROOT / "setup.py"))
    table = asked["extras_require"]
    for name in ("dev", "docs", "test", "torch"):  # the last is above, with its versions
        table.pop(name)
    names = {
        extra: [re.split("[<>=~!]", word)[0] for word in words if not word.startswith("ampcompare[")]
        for extra, words in table.items()
    }
    assert {name: list(distributions) for name, (distributions, _) in EXTRAS.items()} == names


def test_each_accelerator_is_named_with_the_arms_that_train_on_it() -> None:
    """One that computes is ok; one whose product fails is a problem."""
    broken = {"name": "xpu:1", "failure": "RuntimeError: no kernel"}
    answer = ChildAnswer({"devices": [{"name": "xpu:0", "failure": None}, broken]}, "done")
    works, fails = examine_accelerators(answer)
    assert (works.name, works.value, works.verdict) == ("xpu:0", "an Intel GPU", "ok")
    assert works.reason.startswith("--device xpu:0 trains fp32, native, half in one process")
    assert (fails.verdict, fails.reason) == ("problem", "a small fp16 product fails: RuntimeError: no kernel")
    (unknown,) = examine_accelerators(ChildAnswer({}, "raised", "ImportError"))
    assert unknown.verdict == "warning"


def test_the_probe_asks_each_device_for_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that torch counts and cannot compute on is named with torch's error."""
    seen = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(torch, "xpu", seen)
    monkeypatch.setattr(torch, "mps", SimpleNamespace(is_available=lambda: False))
    found = accelerators(["mps", "xpu", "none"])["devices"]
    assert [device["name"] for device in found] == ["xpu:0", "xpu:1"]
    assert all(device["failure"] for device in found)  # this torch has no kernels for them


@pytest.mark.parametrize(
    ("torch", "vision"),
    [
        ("2.4.1", "0.19"),
        ("2.11.0+cu130", "0.26"),
        ("2.12.0", "0.27"),
        ("1.4.0", "0.5"),
        ("1.13.1+cu117", "0.14"),
        ("1.14.0a0", None),
        ("2.13.0+cpu", "0.28"),
        ("2.14.1", "0.29"),
        ("3.0", None),
        (None, None),
    ],
)
def test_pairs(torch: str | None, vision: str | None) -> None:
    """The torchvision of a torch is known from 1.4 on, and no guess is made beyond."""
    assert version_of_fitting_torchvision(torch) == vision


@pytest.fixture
def examined(site: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Check]:
    """Return a function that examines a torchvision of a version next to a torch of a version."""

    def examine(torch: str, vision: str) -> Check:
        monkeypatch.setattr(machine, "installed_version", {"torchvision": vision}.get)
        return examine_torchvision(ask("torchvision_import", path=site.path), torch)

    return examine


def test_mismatch(site: Any, examined: Callable[[str, str], Check]) -> None:
    """A torchvision of another torch is told by its metadata, with the version to install."""
    site.write("torchvision/__init__.py")
    finding = examined("2.13.0+cpu", "0.20.1")
    assert (finding.verdict, finding.facts["fits"]) == ("warning", False)
    assert "torch 2.13.0+cpu takes torchvision 0.28, and 0.20.1 is installed" in finding.reason
    assert finding.remedy[0].startswith(
        "pip install --no-deps --force-reinstall 'torchvision==0.28.*' --index-url "
    )


def test_mismatch_that_does_not_import(site: Any, examined: Callable[[str, str], Check]) -> None:
    """Where it fails to import too, both the pair and the error are said."""
    site.write("torchvision/__init__.py", "raise ImportError('undefined symbol: x')")
    finding = examined("2.12.0", "0.28.0")
    assert finding.verdict == "problem"
    assert "torch 2.12.0 takes torchvision 0.27" in finding.reason
    assert "undefined symbol: x" in finding.reason
    assert finding.remedy == ("pip install --no-deps --force-reinstall 'torchvision==0.27.*'",)


def test_no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its absence is a note: built-in models need none."""
    monkeypatch.setattr(machine, "installed_version", {}.get)
    finding = examine_torchvision(ChildAnswer({}, "raised", "not installed"), "2.13.0")
    assert (finding.value, finding.verdict) == ("not installed", "note")
    assert "torchvision==0.28.*" in finding.remedy[0]
