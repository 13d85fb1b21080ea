"""The driver and each GPU, with what 16-bit and 8-bit formats gain on it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ampcompare.api.doctor.finding import Check, Verdict
from ampcompare.base.processes.call import Answer

__all__ = ["driver_version", "examine_gpus", "gains", "has_nvidia_gpu"]

GIB = 2**30
DEVICES = Path("/dev")
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DRIVER_SECONDS = 20.0


def driver_version() -> tuple[str | None, str]:
    """Return the version of NVIDIA's driver, and how it is known or why not; torch is not asked."""
    try:
        match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", DRIVER_FILE.read_text(encoding="utf-8"))
        if match:
            return match[1], f"from {DRIVER_FILE}"
    except OSError:
        pass
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, "there is no nvidia-smi and no loaded driver"
    try:
        done = subprocess.run(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DRIVER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"nvidia-smi does not answer ({type(error).__name__})"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (lines or done.stderr.strip().splitlines() or ["no message"])[0]
        return None, f"nvidia-smi ends with exit code {done.returncode}: {said[:200]}"
    return lines[0].strip(), "from nvidia-smi"


def has_nvidia_gpu() -> bool:
    """Return whether the driver offers a GPU here, by its device files; under WSL2 that is one for all GPUs."""
    return any(DEVICES.glob("nvidia[0-9]*")) or ((DEVICES / "dxg").exists() and WSL_DRIVER.exists())


def gains(name: str, capability: tuple[int, int]) -> str:
    """Return what an NVIDIA GPU of a compute capability gains from formats below fp32."""
    if "GTX 16" in name:
        return "no tensor cores: fp16 saves memory and some time, bf16 is emulated"
    if capability < (7, 0):
        return "no tensor cores (7.0 has them): 16-bit formats save memory, hardly time"
    if capability < (8, 0):
        return "tensor cores for fp16; bf16 is emulated and slow (8.0 has it), no TF32"
    fp8 = ", fp8" if capability >= (8, 9) else "; no fp8 (8.9 has it)"
    return f"tensor cores for fp16, bf16, TF32{fp8}"


def examine_gpus(answer: Answer | None, *, driver: tuple[str | None, str], hip: str | None = None) -> list[Check]:
    """Check the driver and each GPU.

    Args:
        answer: of the probe `gpus`; None where torch cannot use any.
        driver: from `driver_version`.
        hip: version of ROCm that torch is built for.
    """
    version, how = driver
    findings = []
    if hip is None:
        missing: Verdict = "problem" if answer is not None else "note"
        findings.append(
            Check("GPU", "driver", version, "ok", how, facts={"version": version})
            if version
            else Check("GPU", "driver", "none", missing, how, ("nvidia-smi",) if answer is not None else ())
        )
    if answer is None:
        return [*findings, _none("torch has no CUDA")]
    if not answer.done:
        return [
            *findings,
            Check(
                "GPU",
                "gpus",
                "cannot be started",
                "problem",
                f"querying torch for its GPUs failed: {answer.failure}",
                ("nvidia-smi", "CUDA_LAUNCH_BLOCKING=1 python -c 'import torch; print(torch.ones(2).cuda())'"),
                {"failure": answer.failure},
            ),
        ]
    if not answer.value["available"]:
        said = f" ({'; '.join(answer.warnings)})" if answer.warnings else ""
        if version is None:
            return [*findings, _none(f"torch sees none{said}")]
        return [
            *findings,
            Check(
                "GPU",
                "gpus",
                "none that torch can use",
                "problem",
                f"there is a driver, and torch sees no GPU{said}. The driver may be older than torch's CUDA, the "
                "container may have been started without GPUs, or CUDA_VISIBLE_DEVICES may hide them",
                ("nvidia-smi", 'echo "$CUDA_VISIBLE_DEVICES"', "docker run --gpus all ...  # in a container"),
            ),
        ]
    return [*findings, *(_device(device, answer.value["built_for"], hip) for device in answer.value["devices"])]


def _none(why: str) -> Check:
    reason = f"{why}: arms run on the CPU, and fp16 times there say nothing about a GPU"
    return Check("GPU", "gpus", "none", "note", reason)


def _device(device: dict[str, Any], built_for: list[str], hip: str | None) -> Check:
    capability = tuple(device["capability"])
    free = "" if device["free_bytes"] is None else f", {device['free_bytes'] / GIB:.1f} free"
    shown = "" if hip else f", capability {capability[0]}.{capability[1]}"
    value = f"{device['name']}{shown}, {device['total_bytes'] / GIB:.1f} GiB{free}"
    verdict: Verdict = "ok"
    reason = "ROCm: see its own tables" if hip else gains(device["name"], capability)
    remedy: tuple[str, ...] = ()
    if device["failure"]:
        verdict, reason = "problem", f"a small fp16 product fails: {device['failure']}"
        remedy = ("nvidia-smi",)
        if not hip and not _covered(capability, built_for):
            reason += f". This torch is built for {' '.join(built_for)}, not for this GPU"
            remedy = ("pip install -U torch torchvision",)
    elif device["free_bytes"] is not None and device["free_bytes"] < 0.5 * device["total_bytes"]:
        verdict = "warning"
        reason = f"{reason}. Another process holds more than half of its memory, and may slow down this GPU"
        remedy = ("nvidia-smi",)
    return Check("GPU", f"cuda:{device['index']}", value, verdict, reason, remedy, device)


def _covered(capability: tuple[int, ...], built_for: list[str]) -> bool:
    """Return whether code for a capability is in the build: binaries run within a major version, PTX from it on."""
    for arch in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", arch)
        if match:
            built = (int(match[2]), int(match[3]))
            if built <= capability and (match[1] == "compute" or built[0] == capability[0]):
                return True
    return False
