"""Which implementation of `apex.amp` an arm uses, and why. Decided from files: neither torch nor Apex is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampcompare.backends.apex_levels import ROCM_LEVELS
from ampcompare.base.environment.apex import ApexInstall, probe_apex
from ampcompare.base.errors import BackendUnavailable

__all__ = ["EngineChoice", "require_real_apex", "select_engine"]


@dataclass(frozen=True)
class EngineChoice:
    """The implementation that was chosen.

    Attributes:
        reason: one sentence.
        version: of the real Apex; empty for ampcompare's own engine.
        caution: what can go wrong with it, if anything.
    """

    name: Literal["nvidia", "compat"]
    reason: str
    version: str = ""
    caution: str = ""


def require_real_apex(device: str) -> ApexInstall:
    """Return the installed Apex.

    Args:
        device: where it is to run, such as "cpu" or "cuda:0".

    Raises:
        BackendUnavailable: it has no `apex.amp`, or the device is not a GPU.
    """
    installed = probe_apex()
    if not installed.has_amp:
        raise BackendUnavailable(installed.reason)
    if not _is_cuda(device):
        raise BackendUnavailable(f"the real Apex runs on CUDA only, and the device is {device}: use --engine compat")
    return installed


def select_engine(engine: str, opt_level: str, device: str, *, torch_version: str) -> EngineChoice:
    """Return the implementation that "nvidia", "compat" or "auto" stands for; "auto" is the real Apex if it can work.

    Raises:
        BackendUnavailable: "nvidia" was asked for and is not usable here.
    """
    o1_raises = f"O1 of the real Apex can raise on torch {torch_version}" if opt_level == "O1" else ""
    if opt_level in ROCM_LEVELS:
        if engine == "nvidia":
            raise BackendUnavailable(
                f"{opt_level} is a level of ROCm's Apex, which NVIDIA's does not have: use --engine compat"
            )
        return EngineChoice("compat", f"{opt_level} is a level of ROCm's Apex, which NVIDIA's does not have")
    if engine == "nvidia":
        return _real(require_real_apex(device), o1_raises)
    if engine == "compat":
        return EngineChoice("compat", "asked for")
    installed = probe_apex()
    if not installed.has_amp:
        return EngineChoice("compat", installed.reason.partition(";")[0])
    if not _is_cuda(device):
        return EngineChoice("compat", f"the real Apex runs on CUDA only, and the device is {device}")
    # Without its CUDA extensions the real Apex waits for the device at each parameter, which is not how it was used.
    if installed.kind != "full":
        return EngineChoice("compat", f"{installed.reason}; --engine nvidia uses it anyway")
    return EngineChoice("compat", o1_raises) if o1_raises else _real(installed, "")


def _real(installed: ApexInstall, o1_raises: str) -> EngineChoice:
    version = installed.version if installed.kind == "full" else f"{installed.version}, Python only"
    caution = (
        f"{o1_raises} (a weight used twice, a second forward, RNN modules, evaluation without no_grad); "
        "--engine compat does not"
    )
    return EngineChoice("nvidia", installed.reason, version, caution if o1_raises else "")


def _is_cuda(device: str) -> bool:
    return device.partition(":")[0] == "cuda"
