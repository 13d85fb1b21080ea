"""Memory, disk and threads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from ampcompare.base.environment.threads import THREAD_VARIABLES
from ampcompare.doctor.finding import Check
from ampcompare.doctor.processor import usable_cores

__all__ = ["examine_machine"]

GIB = 2**30
MIN_MEMORY = 2 * GIB
MIN_DISK = 1 * GIB
MIN_SHARED = GIB // 2
MEMINFO = Path("/proc/meminfo")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
SHARED = Path("/dev/shm")


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
    cores = usable_cores()
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
