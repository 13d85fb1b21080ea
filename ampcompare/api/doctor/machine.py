"""Memory, disk and threads."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ampcompare.api.doctor.finding import Check, Verdict
from ampcompare.base.environment.fingerprint import THREAD_VARIABLES, fingerprint
from ampcompare.base.processes.call import Answer

__all__ = [
    "cpu_flags",
    "examine_collectives",
    "examine_machine",
    "examine_processor",
    "examine_python",
    "examine_torch",
    "examine_vision",
    "fitting_torchvision",
]

GIB = 2**30
MIN_MEMORY = 2 * GIB
MIN_DISK = 1 * GIB
MIN_SHARED = GIB // 2
MEMINFO = Path("/proc/meminfo")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
SHARED = Path("/dev/shm")
CPUINFO = Path("/proc/cpuinfo")
SHOWN = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX512_BF16",
    "avx512_fp16": "AVX512_FP16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX_BF16",
    "amx_fp16": "AMX_FP16",
    "asimdhp": "NEON fp16",
    "bf16": "NEON bf16",
    "sve": "SVE",
}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def examine_machine(environment: Mapping[str, str]) -> list[Check]:
    """Check memory, shared memory, disk and threads."""
    checks = [_memory(), _shared(), _disk(Path.cwd()), _threads(environment)]
    return [finding for finding in checks if finding is not None]


def _memory() -> Check:
    total, available = _meminfo()
    limit = _limit()
    if limit is not None and (total is None or limit < total):
        total, available = limit, None if available is None else min(available, limit)
        where = ", the limit of this container"
    else:
        where = ""
    if total is None:
        return Check("Machine", "memory", "unknown", "note", "the system does not report it")
    free = "" if available is None else f", {available / GIB:.1f} GiB available"
    facts = {"total_bytes": total, "available_bytes": available}
    if (available if available is not None else total) < MIN_MEMORY:
        return Check(
            "Machine",
            "memory",
            f"{total / GIB:.1f} GiB{where}{free}",
            "warning",
            "torch with torchvision takes 0.3 GiB per process; a process that runs out of memory is killed without a "
            "message",
            ("ampcompare compare --workers 0 --batch-size 16",),
            facts,
        )
    return Check("Machine", "memory", f"{total / GIB:.1f} GiB{where}{free}", "ok", facts=facts)


def _meminfo() -> tuple[int | None, int | None]:
    """Return bytes in all and bytes available, as far as the system tells."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="utf-8").splitlines() if ":" in line)
        return int(lines["MemTotal"].split()[0]) * 1024, int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    except (AttributeError, OSError, ValueError):
        return None, None


def _limit() -> int | None:
    for file in LIMITS:
        try:
            return int(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # "max" means none
            continue
    return None


def _shared() -> Check | None:
    """Check the size of shared memory, which is 64 MiB in a container by default."""
    try:
        total = shutil.disk_usage(SHARED).total
    except OSError:
        return None
    value = f"{total / GIB:.2g} GiB in {SHARED}"
    if total >= MIN_SHARED:
        return Check("Machine", "shared memory", value, "ok", facts={"total_bytes": total})
    return Check(
        "Machine",
        "shared memory",
        value,
        "warning",
        'loader processes (--workers) and nccl pass data there, and end with "Bus error" when it is full',
        ("docker run --shm-size 8g ...", "ampcompare compare --workers 0"),
        {"total_bytes": total},
    )


def _disk(folder: Path) -> Check:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Check("Machine", "disk", "unknown", "warning", f"{folder}: {error.strerror}")
    value = f"{usage.free / GIB:.1f} GiB free in {folder}"
    facts = {"free_bytes": usage.free}
    if not os.access(folder, os.W_OK):
        return Check(
            "Machine",
            "disk",
            value,
            "warning",
            "this folder cannot be written, and runs go to ./runs",
            ("ampcompare compare --output-dir ~/runs",),
            facts,
        )
    if usage.free < MIN_DISK:
        return Check(
            "Machine",
            "disk",
            value,
            "warning",
            "records and checkpoints of a comparison may not fit",
            ("ampcompare compare --output-dir ~/runs", "du -sh runs"),
            facts,
        )
    return Check("Machine", "disk", value, "ok", facts=facts)


def _threads(environment: Mapping[str, str]) -> Check:
    cores = _usable_cores()
    set_ones = {name: environment[name] for name in THREAD_VARIABLES if name in environment}
    value = ", ".join(f"{name}={text}" for name, text in set_ones.items()) or "no variable set"
    wide = [name for name, text in set_ones.items() if text.isdigit() and int(text) > cores]
    if wide:
        return Check(
            "Machine",
            "threads",
            value,
            "warning",
            f"{wide[0]} exceeds the {cores} available cores: threads wait for each other, and step times are useless",
            ("export OMP_NUM_THREADS=1",),
        )
    said = "" if set_ones else "; ampcompare sets 1 in its own processes; your own script uses all cores"
    return Check("Machine", "threads", value, "ok", f"{cores} core{'s' * (cores > 1)} to use{said}")


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the abilities that the kernel lists; none where it lists nothing, as on macOS and Windows."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next(
        (
            frozenset(line.partition(":")[2].split())
            for line in lines
            if line.partition(":")[0].strip() in ("flags", "Features")
        ),
        frozenset(),
    )


def _usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def examine_processor(facts: dict[str, Any] | None, flags: frozenset[str]) -> list[Check]:
    """Check the CPU and how it computes in fp16 and bf16.

    Args:
        facts: value of the probe `torch_build`; None where torch does not import.
        flags: from `cpu_flags`.
    """
    cores = _usable_cores()
    abilities = [text for flag, text in SHOWN.items() if flag in flags]
    with_torch = f"; torch uses {facts['capability']}" if facts and facts["capability"] else ""
    findings = [
        Check(
            "CPU",
            "processor",
            f"{fingerprint()['processor']}, {cores} core{'s' * (cores > 1)} to use, {platform.machine()}",
            "ok",
            f"{', '.join(abilities) or 'no abilities listed'}{with_torch}",
            facts={"cores": cores, "abilities": abilities},
        )
    ]
    if facts is None:
        return findings
    findings.append(_products("fp16", facts["fp16_products"], "AVX512_FP16 or AMX_FP16", flags))
    findings.append(_products("bf16", facts["bf16_products"], "AVX-512 or AMX", flags))
    return findings


def _products(name: str, fast: bool | None, wanted: str, flags: frozenset[str]) -> Check:
    if fast:
        slow = name == "bf16" and flags and not flags & {"avx512_bf16", "amx_bf16", "bf16"}
        reason = "but without native instructions: emulated (--cpu-half)" if slow else ""
        if name == "fp16":
            reason = "but not for every backward pass: emulated by default (--cpu-half)"
        return Check("CPU", f"{name} on the cpu", "in oneDNN", "ok", reason, facts={"fast": not slow})
    if fast is None:
        return Check(
            "CPU", f"{name} on the cpu", "unknown", "note", "this torch cannot report it", facts={"fast": None}
        )
    if name == "fp16":
        reason = f"no {wanted}: ampcompare computes in fp32 and rounds once, 15 to 100 times as fast (--cpu-half)"
    else:
        reason = f"no {wanted}: ampcompare computes in fp32 and rounds once (--cpu-half)"
    return Check("CPU", f"{name} on the cpu", "by slow kernels", "note", reason, facts={"fast": False})


def examine_python() -> Check:
    """Report the version of Python; an older one than needed runs no command."""
    return Check("Software", "python", f"{platform.python_version()} ({sys.executable})", "ok")


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
    if has_gpu and cuda is None and hip is None:
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
            "warning",
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
