"""Python, torch with its libraries, the CPU, memory, disk and threads."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ampcompare.base.environment.extras import version_of_torch_on_path
from ampcompare.base.environment.fingerprint import THREAD_VARIABLES, environment_fingerprint
from ampcompare.base.environment.packages import installed_version
from ampcompare.base.formatting import GIB
from ampcompare.base.processes.call import ChildAnswer
from ampcompare.base.version import NEWEST_TORCH, OLDEST_TORCH
from ampcompare.doctor.finding import Check

MIN_MEMORY = 2 * GIB
MIN_DISK = GIB
MIN_SHARED = GIB // 2
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
SHARED = Path("/dev/shm")
WITHOUT_TORCH = "lint, migrate, explain ARM, list, judge and report work without"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def examine_machine(environment: Mapping[str, str]) -> list[Check]:
    """Check memory, shared memory, disk and threads."""
    return [_check_memory(), *_check_shared_memory(), _check_disk(Path.cwd()), _check_threads(environment)]


def _check_memory() -> Check:
    memory = psutil.virtual_memory()
    total = memory.total
    free = memory.available
    where = ""
    for file in LIMITS:
        try:
            limit = int(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # "max" means none
            continue
        if limit < total:
            total = limit
            free = min(free, limit)
            where = ", the limit of this container"
    value = f"{total / GIB:.1f} GiB{where}, {free / GIB:.1f} GiB available"
    facts = {"total_bytes": total, "available_bytes": free}
    if free >= MIN_MEMORY:
        return Check("Machine", "memory", value, "ok", facts=facts)
    reason = "torch with torchvision takes 0.3 GiB per process; one that runs out of memory is killed without a message"
    return Check("Machine", "memory", value, "warning", reason, ("ampcompare compare --workers 0",), facts)


def _check_shared_memory() -> list[Check]:
    """Check the size of shared memory, which is 64 MiB in a container by default."""
    if not SHARED.is_dir():
        return []
    total = shutil.disk_usage(SHARED).total
    value, facts = f"{total / GIB:.2g} GiB in {SHARED}", {"total_bytes": total}
    if total >= MIN_SHARED:
        return [Check("Machine", "shared memory", value, "ok", facts=facts)]
    reason = 'loader processes (--workers) and nccl pass data there, and end with "Bus error" when it is full'
    remedy = ("docker run --shm-size 8g ...", "ampcompare compare --workers 0")
    return [Check("Machine", "shared memory", value, "warning", reason, remedy, facts)]


def _check_disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    value, facts = f"{free / GIB:.1f} GiB free in {folder}", {"free_bytes": free}
    reason = "records and checkpoints of a comparison may not fit" if free < MIN_DISK else ""
    reason = reason if os.access(folder, os.W_OK) else "this folder cannot be written, and runs go to ./runs"
    remedy = ("ampcompare compare --output-dir ~/runs",) if reason else ()
    return Check("Machine", "disk", value, "warning" if reason else "ok", reason, remedy, facts)


def _check_threads(environment: Mapping[str, str]) -> Check:
    cores = _num_usable_cores()
    variables = {name: environment[name] for name in THREAD_VARIABLES if name in environment}
    value = ", ".join(f"{name}={text}" for name, text in variables.items()) or "no variable set"
    wide = [name for name, text in variables.items() if text.isdigit() and int(text) > cores]
    if wide:
        reason = f"{wide[0]} exceeds the {cores} available cores: threads wait for each other, step times are useless"
        return Check("Machine", "threads", value, "warning", reason, ("export OMP_NUM_THREADS=1",))
    more = "" if variables else "; ampcompare sets 1 in its own processes; your own script uses all cores"
    return Check("Machine", "threads", value, "ok", f"{cores} core{'s' * (cores > 1)} to use{more}")


def _num_usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def examine_processor(torch_facts: dict[str, Any] | None) -> list[Check]:
    """Check the CPU and how it computes in fp16 and bf16.

    Args:
        torch_facts: value of the probe `torch_build`; None where torch does not import.
    """
    cores = _num_usable_cores()
    value = f"{environment_fingerprint()['processor']}, {cores} core{'s' * (cores > 1)} to use, {platform.machine()}"
    processor = Check("CPU", "processor", value, "ok", facts={"cores": cores})
    if torch_facts is None:
        return [processor]
    is_native = torch_facts["bf16_instructions"] is True
    value = "bf16 native, fp16 emulated" if is_native else "bf16 and fp16 emulated"
    reason = "ampcompare computes in fp32 and rounds once, 15 to 100 times as fast as kernels for fp16 (--cpu-half)"
    return [
        processor,
        Check("CPU", "16-bit types", value, "ok" if is_native else "note", reason, facts={"bf16": is_native}),
    ]


def examine_torch(answer: ChildAnswer, *, has_gpu: bool) -> Check:
    """Check version and build of torch.

    Args:
        answer: of the probe `torch_build`.
        has_gpu: whether this machine has an NVIDIA GPU, whatever torch sees.
    """
    installed = installed_version("torch") or version_of_torch_on_path() or None
    if not answer.has_returned and installed is None and "No module named 'torch'" in answer.failure:
        for_cpu = f"pip install torch torchvision --index-url {CPU_INDEX}  # no GPU: before the other"
        remedy: tuple[str, ...] = ("pip install 'ampcompare[torch]'", for_cpu)
        return Check(
            "Software", "torch", "not installed", "problem", f"what trains needs it; {WITHOUT_TORCH}", remedy
        )
    numbers = _version_numbers(answer.value["version"] if answer.has_returned else installed or "")
    if (0, 0) < numbers < OLDEST_TORCH:
        value = answer.value["version"] if answer.has_returned else str(installed)
        oldest = "{}.{}".format(*OLDEST_TORCH)
        reason = f"what trains needs {oldest} or later; {WITHOUT_TORCH}"
        from_newer = f"ampcompare compare --stack old={sys.executable} --arm script@old,script -- train.py"
        remedy = (
            "pip install -U torch torchvision",
            f"{from_newer}  # in a newer environment, and this one stays",
        )
        return Check("Software", "torch", value, "problem", reason, remedy, {"version": value})
    if not answer.has_returned:
        value = f"{installed or 'of unknown version'}, which cannot be imported"
        remedy = (f"pip install --force-reinstall torch{f'=={installed}' if installed else ''}",)
        facts = {"version": installed, "failure": answer.failure}
        return Check("Software", "torch", value, "problem", f"import torch: {answer.failure}", remedy, facts)
    version, cuda, hip, cudnn = (answer.value[name] for name in ("version", "cuda", "hip", "cudnn"))
    facts = {"version": version, "cuda": cuda, "hip": hip, "cudnn": cudnn}
    with_cudnn = f" with cuDNN {cudnn}" if cudnn else " without cuDNN"
    build = f"CUDA {cuda}{with_cudnn}" if cuda else f"ROCm {hip}" if hip else "the CPU only"
    value = f"{version}, built for {build}"
    if has_gpu and cuda is None and hip is None:
        reason = "this machine has an NVIDIA GPU that a CPU build of torch cannot use"
        remedy = ("pip uninstall -y torch torchvision && pip install torch torchvision",)
        return Check("Software", "torch", value, "problem", reason, remedy, facts)
    tried = "{}.{}".format(*NEWEST_TORCH)
    if _version_numbers(version) > NEWEST_TORCH:
        reason = (
            f"newer than {tried}, the last torch that ampcompare was tried with; deprecated names may be gone"
        )
        return Check("Software", "torch", value, "note", reason, facts=facts)
    return Check("Software", "torch", value, "ok", facts=facts)


def examine_torchvision(answer: ChildAnswer, torch_version: str | None) -> Check:
    """Check whether torchvision fits torch and imports.

    Args:
        answer: of the probe `vision`.
        torch_version: None where it is not known.
    """
    version, fitting = installed_version("torchvision"), version_of_fitting_torchvision(torch_version)
    on_cpu = (torch_version or "").endswith("+cpu")
    wanted = f"=={fitting}.*" if fitting else f"=={version}" if version else ""
    install = f"pip install --no-deps --force-reinstall 'torchvision{wanted}'"
    remedy = (install + f" --index-url {CPU_INDEX}" * on_cpu,)
    if version is None:
        reason = (
            "torchvision's models, image folders and its data sets need it; built-in models and digits do not"
        )
        return Check("Software", "torchvision", "not installed", "note", reason, remedy)
    fits = fitting is None or _version_numbers(version) == _version_numbers(fitting)
    facts = {"version": version, "fits": fits, "failure": answer.failure or None}
    pair = "" if fits else f"torch {torch_version} takes torchvision {fitting}, and {version} is installed. "
    if not answer.has_returned:
        value, reason = f"{version}, which cannot be imported", f"{pair}import torchvision: {answer.failure}"
        return Check("Software", "torchvision", value, "problem", reason, remedy, facts)
    if not fits:
        value, reason = (
            f"{version}, of another torch",
            f"{pair}It imports here; its compiled operators may be missing",
        )
        return Check("Software", "torchvision", value, "warning", reason, remedy, facts)
    return Check(
        "Software", "torchvision", version, "ok", "the one for this torch" if fitting else "", facts=facts
    )


def version_of_fitting_torchvision(torch_version: str | None) -> str | None:
    """Return the torchvision that is released with a torch, such as "0.28" for 2.13; None for an unknown torch."""
    numbers = _version_numbers(torch_version or "")
    if (1, 4) <= numbers < (1, 14):
        return f"0.{numbers[1] + 1}"  # 1.4/0.5 to 1.13/0.14
    if len(numbers) < 2 or numbers[0] != 2:
        return None
    return f"0.{numbers[1] + 15}"  # so since 2.0 and 0.15: 2.11/0.26, 2.12/0.27, 2.13/0.28, 2.14/0.29


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2])
