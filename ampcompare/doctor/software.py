"""Python, torch and what belongs to it: how it was built, torchvision, and ways for processes to talk."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from ampcompare.base.isolate.call import Answer
from ampcompare.base.version import __version__
from ampcompare.doctor.finding import Check, Verdict

__all__ = ["examine_collectives", "examine_python", "examine_torch", "examine_vision", "fitting_torchvision"]

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 4)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def examine_python() -> Check:
    """Check the version of Python."""
    value = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return Check("Software", "python", value, "ok")
    return Check(
        "Software",
        "python",
        value,
        "problem",
        f"ampcompare {__version__} needs Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or later",
        ("python3.11 -m venv .venv && . .venv/bin/activate",),
    )


def examine_torch(answer: Answer, *, has_gpu: bool, path: Sequence[str] | None = None) -> list[Check]:
    """Check version and build of torch, its CUDA and its cuDNN.

    Args:
        answer: of the probe `torch_build`.
        has_gpu: whether this machine has an NVIDIA GPU, whatever torch sees.
        path: folders that distributions are looked for in.
    """
    installed = _version("torch", path)
    if not answer.done:
        return [_torch_fails(answer, installed)]
    facts = answer.value
    version = facts["version"]
    cuda, hip = facts["cuda"], facts["hip"]
    build = f"built for CUDA {cuda}" if cuda else f"built for ROCm {hip}" if hip else "built for the CPU only"
    common: dict[str, Any] = {"version": version, "cuda": cuda, "hip": hip}
    verdict: Verdict = "ok"
    reason = ""
    remedy: tuple[str, ...] = ()
    if _numbers(version) < OLDEST_TORCH:
        verdict, reason = "problem", "ampcompare needs torch 2.4 or later"
        remedy = ("pip install -U torch torchvision",)
    elif has_gpu and cuda is None and hip is None:
        verdict = "problem"
        reason = "this machine has an NVIDIA GPU that a CPU build of torch cannot use"
        remedy = ("pip uninstall -y torch torchvision && pip install torch torchvision",)
    findings = [Check("Software", "torch", f"{version}, {build}", verdict, reason, remedy, common)]
    if cuda:
        findings.append(Check("Software", "cuda", f"{cuda}, with torch", "ok", facts={"version": cuda}))
        cudnn = facts["cudnn"]
        findings.append(
            Check("Software", "cudnn", _cudnn(cudnn), "ok", facts={"version": cudnn})
            if cudnn
            else Check(
                "Software",
                "cudnn",
                "not found",
                "problem",
                "convolutions on the GPU need it, and it comes with torch",
                (f"pip install --force-reinstall torch=={version.partition('+')[0]}",),
            )
        )
    else:
        why = "ROCm has MIOpen instead" if hip else "torch is built without CUDA"
        findings += [Check("Software", name, "none", "ok" if hip else "note", why) for name in ("cuda", "cudnn")]
    return findings


def _torch_fails(answer: Answer, installed: str | None) -> Check:
    if installed is None and "No module named 'torch'" in answer.failure:
        return Check(
            "Software",
            "torch",
            "not installed",
            "problem",
            "every arm needs it",
            ("pip install torch torchvision", f"pip install torch torchvision --index-url {CPU_INDEX}  # no GPU"),
        )
    return Check(
        "Software",
        "torch",
        f"{installed or 'of unknown version'}, which cannot be imported",
        "problem",
        f"import torch: {answer.failure}",
        (f"pip install --force-reinstall torch{f'=={installed}' if installed else ''}",),
        {"version": installed, "failure": answer.failure},
    )


def examine_vision(answer: Answer, torch_version: str | None, *, path: Sequence[str] | None = None) -> Check:
    """Check whether torchvision fits torch and imports.

    Args:
        answer: of the probe `vision`.
        torch_version: None where it is not known.
        path: folders that distributions are looked for in.
    """
    version = _version("torchvision", path)
    needed = "torchvision's models, image folders and its data sets need it; built-in models and digits do not"
    if version is None:
        fitting = fitting_torchvision(torch_version)
        wanted = f"=={fitting}.*" if fitting else ""
        return Check("Software", "torchvision", "not installed", "note", needed, (_install(wanted, torch_version),))
    fitting = fitting_torchvision(torch_version)
    matches = fitting is None or _numbers(version) == _numbers(fitting)
    facts = {"version": version, "fits": matches, "failure": answer.failure or None, "plain": answer.value.get("plain")}
    pair = f"torch {torch_version} takes torchvision {fitting}, and {version} is installed"
    wanted = f"=={fitting}.*" if fitting else f"=={version}"
    if not answer.done:
        reason = f"import torchvision: {answer.failure}"
        return Check(
            "Software",
            "torchvision",
            f"{version}, which cannot be imported",
            "problem",
            reason if matches else f"{pair}. {reason}",
            (_install(wanted, torch_version),),
            facts,
        )
    if not matches:
        return Check(
            "Software",
            "torchvision",
            f"{version}, of another torch",
            "warning",
            f"{pair}. It imports here, but its compiled operators may be missing",
            (_install(wanted, torch_version),),
            facts,
        )
    if answer.value["plain"]:
        return Check(
            "Software",
            "torchvision",
            f"{version}, whose compiled operators do not load",
            "note",
            f'it was built for CUDA and torch is not: a plain import ends with "{answer.value["plain"]}". '
            "ampcompare imports it anyway; timm and others that import it by themselves fail",
            (_install(wanted, torch_version, cpu=True),),
            facts,
        )
    return Check("Software", "torchvision", version, "ok", "the one for this torch" if fitting else "", facts=facts)


def fitting_torchvision(torch_version: str | None) -> str | None:
    """Return the torchvision that is released with a torch, such as "0.28" for 2.13; None for an unknown torch."""
    numbers = _numbers(torch_version or "")
    if len(numbers) < 2 or numbers[0] != 2:
        return None
    return f"0.{numbers[1] + 15}"  # so since 2.0 and 0.15: 2.11/0.26, 2.12/0.27, 2.13/0.28, 2.14/0.29


def _install(wanted: str, torch_version: str | None, *, cpu: bool = False) -> str:
    on_cpu = cpu or (torch_version or "").endswith("+cpu")
    return f"pip install --no-deps --force-reinstall 'torchvision{wanted}'" + (f" --index-url {CPU_INDEX}" * on_cpu)


def examine_collectives(facts: dict[str, Any], nccl: Sequence[int] | None) -> Check:
    """Check which backends torch.distributed has.

    Args:
        facts: value of the probe `torch_build`.
        nccl: version, where it is known.
    """
    if not facts["distributed"]:
        return Check(
            "Software",
            "torch.distributed",
            "none",
            "warning",
            "this torch is built without it: one process only",
            ("pip install --force-reinstall torch",),
        )
    version = f" {'.'.join(map(str, nccl))}" if nccl else ""
    names = [name + (version if name == "nccl" else "") for name in ("nccl", "gloo", "mpi") if facts[name]]
    lacks_nccl = facts["cuda"] and not facts["nccl"]
    return Check(
        "Software",
        "torch.distributed",
        ", ".join(names) or "no backend",
        "warning" if lacks_nccl or not names else "ok",
        "several GPUs need nccl, which this build lacks" if lacks_nccl else "nccl for GPUs, gloo for CPUs",
        ("pip install --force-reinstall torch",) if lacks_nccl else (),
        {name: facts[name] for name in ("nccl", "gloo", "mpi")},
    )


def _version(distribution: str, path: Sequence[str] | None) -> str | None:
    distributions = metadata.distributions(name=distribution, path=list(sys.path if path is None else path))
    return next((one.version for one in distributions), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2])


def _cudnn(version: int) -> str:
    """Return a cuDNN version as it is spoken: 91002 is 9.10.2, and before 9 it was 8907 for 8.9.7."""
    major, rest = divmod(version, 10000 if version >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}, with torch"
