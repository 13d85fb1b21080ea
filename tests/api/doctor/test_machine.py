"""Findings on CPU, switches, memory, disk, threads and extras."""

import ast
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampcompare.api.doctor import machine
from ampcompare.api.doctor.examine import EXTRAS, examine_numerics
from ampcompare.api.doctor.machine import examine_machine, examine_processor

ROOT = Path(__file__).resolve().parents[3]
BUILD: dict[str, Any] = {"cuda": None, "tf32_products": False, "tf32_convolutions": True}
GIB = 2**30


def _named(findings: list[Any]) -> dict[str, Any]:
    return {finding.name: finding for finding in findings}


def test_16_bit_types_on_the_cpu() -> None:
    """Without instructions for bf16 both are emulated, which is a note."""
    found = _named(examine_processor({**BUILD, "bf16_instructions": False}))
    assert (found["16-bit types"].value, found["16-bit types"].verdict) == ("bf16 and fp16 emulated", "note")
    found = _named(examine_processor({**BUILD, "bf16_instructions": True}))
    assert (found["16-bit types"].value, found["16-bit types"].verdict) == ("bf16 native, fp16 emulated", "ok")
    assert [finding.name for finding in examine_processor(None)] == ["processor"]


def test_tf32() -> None:
    """Switches that differ are a note on CUDA, with the way to set both, and nothing elsewhere."""
    assert _named(examine_numerics(BUILD, {}))["tf32"].verdict == "ok"
    finding = _named(examine_numerics({**BUILD, "cuda": "13.0"}, {}))["tf32"]
    assert (finding.verdict, finding.value) == ("note", "products in fp32, convolutions in TF32")
    assert finding.remedy[0].startswith("export NVIDIA_TF32_OVERRIDE=0")


def test_variables_for_cuda_on_a_cpu() -> None:
    """What works on CUDA alone is a note where torch has none, and a warning where it has."""
    variable = {"NVIDIA_TF32_OVERRIDE": "1"}
    assert _named(examine_numerics(BUILD, variable))["NVIDIA_TF32_OVERRIDE"].verdict == "note"
    assert _named(examine_numerics({**BUILD, "cuda": "13.0"}, variable))["NVIDIA_TF32_OVERRIDE"].verdict == "warning"
    assert (
        _named(examine_numerics(BUILD, {"ATEN_CPU_CAPABILITY": "default"}))["ATEN_CPU_CAPABILITY"].verdict == "warning"
    )


def test_switches_that_are_off() -> None:
    """A switch set to 0 is not set, and that nothing is set is said."""
    assert list(_named(examine_numerics(None, {"CUDA_LAUNCH_BLOCKING": "0", "HOME": "x"}))) == ["variables"]


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


def test_extras_are_those_of_the_package() -> None:
    """The table holds every extra of setup.py that users may want, with its distributions."""
    (table,) = [
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRAS"
    ]
    for name in ("dev", "docs", "test"):
        table.pop(name)
    names = {extra: [re.split("[<>=~!]", word)[0] for word in words] for extra, words in table.items()}
    assert {name: list(distributions) for name, (distributions, _) in EXTRAS.items()} == names
