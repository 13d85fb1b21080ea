"""The driver and each GPU, with what 16-bit and 8-bit formats gain on it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

from ampcompare.base.formatting import GIB
from ampcompare.base.processes.call import ChildAnswer
from ampcompare.doctor.finding import Check

DEVICES = Path("/dev")
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
DRIVER_SECONDS = 20.0


def driver_version_and_evidence() -> tuple[str | None, str]:
    """Return the version of NVIDIA's driver, and how it is known or why not; torch is not asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, "there is no nvidia-smi"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"nvidia-smi does not answer ({type(error).__name__})"
    return done.stdout.partition("\n")[0].strip(), "from nvidia-smi"


def has_nvidia_gpu() -> bool:
    """Return whether the driver offers a GPU here, by its device files; under WSL2 that is one for all GPUs."""
    return any(DEVICES.glob("nvidia[0-9]*")) or ((DEVICES / "dxg").exists() and WSL_DRIVER.exists())


def gpu_gains_text(name: str, capability: tuple[int, int]) -> str:
    """Return what an NVIDIA GPU of a compute capability gains from formats below fp32."""
    if "GTX 16" in name:
        return "no tensor cores: fp16 saves memory and some time, bf16 is emulated"
    if capability < (7, 0):
        return "no tensor cores (7.0 has them): 16-bit formats save memory, hardly time"
    if capability < (8, 0):
        return "tensor cores for fp16; bf16 is emulated and slow (8.0 has it), no TF32"
    fp8 = ", fp8" if capability >= (8, 9) else "; no fp8 (8.9 has it)"
    return f"tensor cores for fp16, bf16, TF32{fp8}"


def examine_gpus(
    answer: ChildAnswer | None,
    *,
    driver: tuple[str | None, str],
    hip: str | None = None,
    build_known: bool = True,
) -> list[Check]:
    """Check the driver and each GPU.

    Args:
        answer: of the probe `gpus`; None where torch cannot use any.
        driver: from `driver_version_and_evidence`.
        hip: version of ROCm that torch is built for.
        build_known: whether torch told what it is built for; an old or absent one does not.
    """
    version, how = driver
    findings = []
    if hip is None and version:
        findings.append(Check("GPU", "driver", version, "ok", how, facts={"version": version}))
    elif hip is None:
        remedy: tuple[str, ...] = ("nvidia-smi",) if answer is not None else ()
        findings.append(Check("GPU", "driver", "none", "problem" if remedy else "note", how, remedy))
    if answer is not None and not answer.has_returned:
        reason = f"querying torch for its GPUs failed: {answer.failure}"
        remedy = (
            "nvidia-smi",
            "CUDA_LAUNCH_BLOCKING=1 python -c 'import torch; print(torch.ones(2).cuda())'",
        )
        facts = {"failure": answer.failure}
        return [*findings, Check("GPU", "gpus", "cannot be started", "problem", reason, remedy, facts)]
    if answer is not None and answer.value["available"]:
        return [*findings, *(_check_gpu(device, hip) for device in answer.value["devices"])]
    if not build_known:
        reason = "there is no torch here that can be asked"
        return [*findings, Check("GPU", "gpus", "unknown", "note", reason)]
    why = "torch has no CUDA" if answer is None else "; ".join(["torch sees none", *answer.warnings])
    if answer is None or version is None:
        reason = f"{why}: arms run on the CPU, and fp16 times there say nothing about a GPU"
        return [*findings, Check("GPU", "gpus", "none", "note", reason)]
    reason = (
        f"there is a driver, and {why}. The driver may be older than torch's CUDA, the container may have been started "
        "without GPUs, or CUDA_VISIBLE_DEVICES may hide them"
    )
    remedy = ("nvidia-smi", 'echo "$CUDA_VISIBLE_DEVICES"', "docker run --gpus all ...  # in a container")
    return [*findings, Check("GPU", "gpus", "none that torch can use", "problem", reason, remedy)]


def _check_gpu(device: dict[str, Any], hip: str | None) -> Check:
    major, minor = device["capability"]
    free, name = device["free_bytes"], f"cuda:{device['index']}"
    known = "" if free is None else f", {free / GIB:.1f} free"
    capability = "" if hip else f", capability {major}.{minor}"
    value = f"{device['name']}{capability}, {device['total_bytes'] / GIB:.1f} GiB{known}"
    reason = "ROCm: see its own tables" if hip else gpu_gains_text(device["name"], (major, minor))
    if device["failure"]:
        reason = f"a small fp16 product fails: {device['failure']}. This torch may be built for other GPUs"
        remedy = ("nvidia-smi", "pip install -U torch torchvision")
        return Check("GPU", name, value, "problem", reason, remedy, device)
    if free is not None and free < 0.5 * device["total_bytes"]:
        reason += ". Another process holds more than half of its memory, and may slow down this GPU"
        return Check("GPU", name, value, "warning", reason, ("nvidia-smi",), device)
    return Check("GPU", name, value, "ok", reason, facts=device)
