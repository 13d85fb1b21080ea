"""What the result of a cell depends on outside its configuration: versions, processor, variables of the environment."""

import functools
import os
import platform
from pathlib import Path
from typing import Any

from ampcompare.base.environment.packages import installed_version
from ampcompare.base.environment.variables import APEX_STRICT, reproduces_apex_defects
from ampcompare.base.version import __version__

# Variables of the environment that change numbers. They are recorded where they are set.
SWITCHES = (
    *(APEX_STRICT, "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHDYNAMO_DISABLE"),
    *("PYTORCH_JIT", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
)
# By which the libraries below torch take their number of threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def environment_fingerprint() -> dict[str, Any]:
    """Return what the result of a cell depends on outside its configuration: versions, processor and switches."""
    return {"ampcompare": __version__, **_facts_of_installation(), **_environment_switches_that_are_set()}


@functools.cache
def _facts_of_installation() -> dict[str, str | None]:
    """Return what no run changes, read once: every checkpoint has it, and torch's metadata is long."""
    return {
        "torch": installed_version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor_name(),
    }


def _environment_switches_that_are_set() -> dict[str, str]:
    found = {name: os.environ.get(name, "").strip() for name in SWITCHES}
    if not reproduces_apex_defects():
        found[APEX_STRICT] = ""
    return {name: value for name, value in found.items() if value}


def host_name() -> str:
    """Return the name of this machine."""
    return platform.node() or "unknown"


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
