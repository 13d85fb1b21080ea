"""The NVIDIA GPUs that torch will see, and who uses them, from nvidia-smi: torch and the driver are not loaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Gpu", "local_cores", "visible_gpus"]

QUERY = ("index", "uuid", "name", "pci.bus_id", "memory.used")
LISTED = re.compile(r"^(?P<mig>\s+MIG (?P<profile>\S+)\s+Device\s+\d+:|GPU (?P<index>\d+):).*\(UUID: (?P<uuid>[^)]+)\)")
MIB = 2**20
MAX_IDLE_BYTES = 2 * 2**30  # a driver, a display or monitoring takes some; a container hides the processes of others
SECONDS = 20.0


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one that MIG has split.

    Attributes:
        token: how CUDA_VISIBLE_DEVICES names it.
        number: as torch counts visible GPUs, in cuda:0.
        name: such as NVIDIA H200; with the profile of a MIG instance.
        is_mig: whether it shares the clock and power of its GPU with other instances.
        bus: PCI address, such as 00000000:1B:00.0.
        in_use: what others do on it; "" if nothing.
    """

    token: str
    number: int
    name: str
    is_mig: bool = False
    bus: str = ""
    in_use: str = ""


def visible_gpus(environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """Return the GPUs in the order of CUDA_VISIBLE_DEVICES, or else of the PCI bus; none where nvidia-smi is missing.

    Args:
        environment: variables; those of this process by default.
    """
    chosen = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    found = _all_gpus()
    if chosen is None:
        return [_numbered(gpu, number) for number, gpu in enumerate(found)]
    visible: list[Gpu] = []
    for token in filter(None, map(str.strip, chosen.split(","))):
        gpu = _named(found, token)
        if gpu is None or any(gpu.token == other.token for other in visible):
            break  # as CUDA does: what follows an invalid entry is not visible
        visible.append(gpu)
    return [_numbered(gpu, number) for number, gpu in enumerate(visible)]


def _numbered(gpu: Gpu, number: int) -> Gpu:
    return Gpu(gpu.token, number, gpu.name, gpu.is_mig, gpu.bus, gpu.in_use)


def _named(found: list[Gpu], token: str) -> Gpu | None:
    """Return the GPU that an index or the beginning of a UUID names; an index counts GPUs, not MIG instances."""
    if token.isdigit():
        buses = list(dict.fromkeys(gpu.bus for gpu in found))
        of_gpu = [gpu for gpu in found if int(token) < len(buses) and gpu.bus == buses[int(token)]]
        return of_gpu[0] if of_gpu else None
    matches = [gpu for gpu in found if gpu.token.startswith(token)]
    return matches[0] if len(matches) == 1 else None


def _all_gpus() -> list[Gpu]:
    facts = {}
    for line in _ask(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"):
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(QUERY):
            facts[words[1]] = words
    processes = _ask("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader") if facts else []
    gpus: list[Gpu] = []
    whole: Gpu | None = None
    for match in filter(None, map(LISTED.match, _ask("-L") if facts else [])):
        if match["index"] is not None:
            fact = facts.get(match["uuid"])
            if fact is None:
                whole = None
                continue
            whole = Gpu(match["uuid"], 0, fact[2], bus=fact[3], in_use=_use(match["uuid"], fact[4], processes))
            gpus.append(whole)
        elif whole is not None:
            if gpus[-1] is whole:  # a GPU that is split can only be used by its instances
                gpus.pop()
            name = f"{whole.name} MIG {match['profile']}"
            gpus.append(Gpu(match["uuid"], 0, name, True, whole.bus, _use(match["uuid"], "0", processes)))
    return gpus


def _use(uuid: str, memory: str, processes: list[str]) -> str:
    """Return what uses a GPU, given its memory in MiB and the compute processes of all GPUs."""
    pids = [line.partition(",")[2].strip() for line in processes if line.startswith(uuid)]
    pids = [pid for pid in pids if pid != str(os.getpid())]
    if pids:
        return (
            f"process {' and '.join(pids[:3])} uses it" if len(pids) == 1 else f"processes {', '.join(pids[:3])} use it"
        )
    used = float(memory) * MIB if memory.replace(".", "").isdigit() else 0.0
    return f"{used / 2**30:.1f} GiB of its memory are in use" if used > MAX_IDLE_BYTES else ""


def _ask(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it cannot answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def local_cores(bus: str, root: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Return the cores next to a PCI device; none where the machine does not say.

    Args:
        bus: as nvidia-smi writes it, with eight digits of the domain; the kernel writes four.
    """
    try:
        text = (root / bus[-12:].lower() / "local_cpulist").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return set()
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
