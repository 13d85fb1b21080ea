"""The GPUs and other accelerators of this machine, as files and nvidia-smi tell: torch and the driver are not loaded.

Accelerators besides CUDA and ROCm train what needs nothing but torch: one process, in fp32, under `torch.autocast` or
in 16-bit weights.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ampcompare.base.formatting import GIB, MIB

QUERY = ("index", "uuid", "name", "pci.bus_id", "memory.used")
LISTED = re.compile(
    r"^(?P<mig>\s+MIG (?P<profile>\S+)\s+Device\s+\d+:|GPU (?P<index>\d+):).*\(UUID: (?P<uuid>[^)]+)\)"
)
# a driver, a display or monitoring takes some; a container hides the processes of others
MAX_IDLE_BYTES = 2 * GIB
SECONDS = 20.0
FACT = re.compile(r"""^(cuda|hip|xpu)\b[^=\n]*=\s*(None|'[^']*'|"[^"]*")\s*$""", flags=re.MULTILINE)


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one that MIG has split, which shares its clock and power with other instances.

    Attributes:
        token: how CUDA_VISIBLE_DEVICES names it.
        number: as torch counts visible GPUs, in cuda:0.
        bus: PCI address, such as 00000000:1B:00.0.
        in_use: what others do on it; "" if nothing.
    """

    token: str
    number: int
    name: str
    is_mig: bool = False
    bus: str = ""
    in_use: str = ""


def visible_gpus() -> list[Gpu]:
    """Return the GPUs in the order of CUDA_VISIBLE_DEVICES, or else of the PCI bus; none without nvidia-smi."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = _all_gpus()
    visible: list[Gpu] = found if chosen is None else []
    for token in filter(None, map(str.strip, (chosen or "").split(","))):
        gpu = _find_named_gpu(found, token)
        if gpu is None or any(gpu.token == other.token for other in visible):
            break  # as CUDA does: what follows an invalid entry is not visible
        visible.append(gpu)
    return [replace(gpu, number=number) for number, gpu in enumerate(visible)]


def _find_named_gpu(found: list[Gpu], token: str) -> Gpu | None:
    """Return the GPU that an index or the beginning of a UUID names; an index counts GPUs, not MIG instances."""
    if token.isdigit():
        buses = list(dict.fromkeys(gpu.bus for gpu in found))
        of_gpu = [gpu for gpu in found if int(token) < len(buses) and gpu.bus == buses[int(token)]]
        return of_gpu[0] if of_gpu else None
    matches = [gpu for gpu in found if gpu.token.startswith(token)]
    return matches[0] if len(matches) == 1 else None


def _all_gpus() -> list[Gpu]:
    facts = {}
    for line in _query_nvidia_smi(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"):
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(QUERY):
            facts[words[1]] = words
    processes = (
        _query_nvidia_smi("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader") if facts else []
    )
    gpus: list[Gpu] = []
    whole: Gpu | None = None
    for match in filter(None, map(LISTED.match, _query_nvidia_smi("-L") if facts else [])):
        if match["index"] is not None:
            fact = facts.get(match["uuid"])
            if fact is None:
                whole = None
                continue
            whole = Gpu(
                match["uuid"],
                0,
                fact[2],
                bus=fact[3],
                in_use=_gpu_use_text(match["uuid"], fact[4], processes),
            )
            gpus.append(whole)
        elif whole is not None:
            if gpus[-1] is whole:  # a GPU that is split can only be used by its instances
                gpus.pop()
            name = f"{whole.name} MIG {match['profile']}"
            gpus.append(
                Gpu(match["uuid"], 0, name, True, whole.bus, _gpu_use_text(match["uuid"], "0", processes))
            )
    return gpus


def _gpu_use_text(uuid: str, memory: str, processes: list[str]) -> str:
    """Return what uses a GPU, given its memory in MiB and the compute processes of all GPUs."""
    pids = [line.partition(",")[2].strip() for line in processes if line.startswith(uuid)]
    pids = [pid for pid in pids if pid != str(os.getpid())]
    if pids:
        return f"process {pids[0]} uses it" if len(pids) == 1 else f"processes {', '.join(pids[:3])} use it"
    used = float(memory) * MIB if memory.replace(".", "").isdigit() else 0.0
    return f"{used / GIB:.1f} GiB of its memory are in use" if used > MAX_IDLE_BYTES else ""


def _query_nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it cannot answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def cores_near_device(bus: str, root: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Return the numbers of the cores next to a PCI device; none where the machine does not say.

    Args:
        bus: address of the device as nvidia-smi writes it, such as "00000000:3B:00.0".
        root: the folder in which the kernel lists devices.
    """
    try:
        # nvidia-smi writes eight digits of the domain, the kernel four.
        text = (root / bus[-12:].lower() / "local_cpulist").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return set()
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def platform_versions_of_torch(folder: Path | None = None) -> dict[str, str | None] | None:
    """Return the versions of CUDA (`cuda`), ROCm (`hip`) and XPU (`xpu`) that torch is built for; None if not known."""
    if folder is None:
        spec = importlib.util.find_spec("torch")
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        if not folders:
            return None
        folder = Path(folders[0])
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    facts = {name: None if value == "None" else value[1:-1] for name, value in FACT.findall(text)}
    return facts if "cuda" in facts else None


@dataclass(frozen=True)
class _AcceleratorKind:
    """A type of device: whether there may be several, as `xpu:1`, and whether torch counts the peak of its memory."""

    title: str
    numbered: bool
    counts_peak: bool
    remedy: str


ACCELERATORS = {
    "mps": _AcceleratorKind("an Apple GPU", False, False, "torch supports it on macOS 14 and later"),
    "xpu": _AcceleratorKind("an Intel GPU", True, True, "install torch for XPU and Intel's driver"),
}
"""By the name of torch's device type. No arm was ever run on one by ampcompare's own tests, which have none."""


def non_cuda_accelerator_type(device: str) -> str:
    """Return the type of a device that is one of `ACCELERATORS`; "" for a CPU or a GPU of CUDA."""
    kind = device.partition(":")[0]
    return kind if kind in ACCELERATORS else ""


def why_no_accelerator(kind: str, *, platform: str = sys.platform) -> str:
    """Return why torch certainly has no accelerator of this type; "" where it may.

    It reads files of torch and imports nothing.

    Args:
        kind: "mps" or "xpu".
        platform: as `sys.platform` has it.
    """
    if kind == "mps":
        return "" if platform == "darwin" else "this is not a Mac"
    build = platform_versions_of_torch()
    return "" if build is None or build.get("xpu") is not None else "this torch is built without XPU"
