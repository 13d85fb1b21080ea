"""Findings on the driver and on GPUs, from answers made here."""

from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.processes.call import ChildAnswer
from ampcompare.doctor import gpu
from ampcompare.doctor.gpu import driver_version_and_evidence, examine_gpus, gpu_gains_text, has_nvidia_gpu

DRIVER = ("580.65.06", "from somewhere")
NO_DRIVER = (None, "there is no nvidia-smi")
H200 = {
    "index": 0, "name": "NVIDIA H200", "capability": [9, 0], "total_bytes": 140 * 2**30, "free_bytes": 139 * 2**30,
    "failure": None,
}  # fmt: skip


def _answer(*devices: dict[str, Any]) -> ChildAnswer:
    return ChildAnswer({"available": True, "devices": list(devices)}, "done")


@pytest.mark.parametrize(
    ("name", "capability", "words", "without"),
    [
        ("Tesla P100", (6, 0), ["no tensor cores"], ["bf16"]),
        ("Tesla V100", (7, 0), ["tensor cores for fp16;", "bf16 is emulated", "no TF32"], ["fp8"]),
        ("NVIDIA GeForce GTX 1660", (7, 5), ["no tensor cores", "bf16 is emulated"], []),
        ("NVIDIA A100", (8, 0), ["tensor cores for fp16, bf16, TF32", "no fp8"], []),
        ("NVIDIA L4", (8, 9), ["tensor cores for fp16, bf16, TF32, fp8"], ["no fp8"]),
        ("NVIDIA H200", (9, 0), ["TF32, fp8"], ["no fp8"]),
    ],
)
def test_gains(name: str, capability: tuple[int, int], words: list[str], without: list[str]) -> None:
    """What a GPU gains follows from its capability, but for one series without tensor cores."""
    text = gpu_gains_text(name, capability)
    assert all(word in text for word in words)
    assert not any(word in text for word in without)


@pytest.mark.parametrize(
    ("changed", "verdict", "part", "remedy"),
    [
        ({}, "ok", "fp8", ()),
        ({"free_bytes": 2**30}, "warning", "Another process holds more than half", ("nvidia-smi",)),
        (
            {"failure": "RuntimeError: no kernel image is available"}, "problem", "no kernel image",
            ("nvidia-smi", "pip install -U torch torchvision"),
        ),
    ],
    ids=["free", "busy", "computes nothing"],
)  # fmt: skip
def test_a_gpu(changed: dict[str, Any], verdict: str, part: str, remedy: tuple[str, ...]) -> None:
    """It has capability, memory and gains; one that others fill compares no times, one that fails is a problem."""
    driver, device = examine_gpus(_answer({**H200, **changed}), driver=DRIVER)
    assert (driver.value, driver.verdict) == ("580.65.06", "ok")
    assert (device.name, device.verdict, device.remedy) == ("cuda:0", verdict, remedy)
    assert device.value.startswith("NVIDIA H200, capability 9.0, 140.0 GiB, ")
    assert part in device.reason


def test_no_gpu() -> None:
    """Without a GPU or with a CPU build the machine is fine, and the meaning for times is said."""
    for answer in (None, ChildAnswer({"available": False, "devices": []}, "done")):
        findings = examine_gpus(answer, driver=NO_DRIVER)
        assert findings[-1].value == "none"
        assert "say nothing about a GPU" in findings[-1].reason
    assert examine_gpus(None, driver=NO_DRIVER)[0].verdict == "note"
    assert examine_gpus(None, driver=NO_DRIVER, build_known=False)[-1].value == "unknown"


def test_a_driver_and_no_gpu() -> None:
    """A driver without usable GPUs is a problem, with what torch warned of."""
    answer = ChildAnswer(
        {"available": False, "devices": []}, "done", "", ["The NVIDIA driver on your system is too old"]
    )
    finding = examine_gpus(answer, driver=DRIVER)[1]
    assert finding.verdict == "problem"
    assert "too old" in finding.reason


def test_cuda_that_crashes() -> None:
    finding = examine_gpus(ChildAnswer({}, "died", "the process was killed by SIGSEGV"), driver=DRIVER)[1]
    assert (finding.verdict, finding.facts["failure"]) == ("problem", "the process was killed by SIGSEGV")


def test_driver_from_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi tells its version, or why it cannot."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version_and_evidence() == (None, "there is no nvidia-smi")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 550.54.15\n")
    tool.chmod(0o755)
    assert driver_version_and_evidence() == ("550.54.15", "from nvidia-smi")
    tool.write_text("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    assert driver_version_and_evidence() == (None, "nvidia-smi does not answer (CalledProcessError)")


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        ([], False),
        (["dev/nvidia0"], True),
        (["dev/nvidiactl"], False),
        (["dev/dxg", "driver"], True),
        (["dev/dxg"], False),
    ],
)
def test_a_gpu_is_seen_by_its_files(
    files: list[str], seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Linux each GPU has a device file; under WSL2 there is one for all, which is of use with NVIDIA's library."""
    (tmp_path / "dev").mkdir()
    for file in files:
        (tmp_path / file).touch()
    monkeypatch.setattr(gpu, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(gpu, "WSL_DRIVER", tmp_path / "driver")
    assert has_nvidia_gpu() is seen
