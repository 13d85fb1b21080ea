"""The options of each opt level, and those of an arm that overrides some.

Source: Apex 25.05, `apex/amp/frontend.py`; for O4 and O5 that of ROCm's Apex. A test holds the table against our
engine's.

Which functions O1 and autocast cast: Apex 25.05, `apex/amp/lists`; torch's documentation of autocast on CUDA.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ampcompare.base.environment.apex import ApexInstall, find_installed_apex
from ampcompare.base.errors import BackendUnavailable

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
MAX_SCALE = 2.0**24
ROCM_LEVELS = ("O4", "O5")  # which NVIDIA's Apex never had
# Visible differences: name, type under O1, type under autocast on CUDA.
OTHERWISE_IN_AUTOCAST: tuple[tuple[str, str, str], ...] = (
    ("F.gelu", "fp32", "as its input"),
    ("std, var", "fp32", "as their input"),
    ("x.softmax(), torch.softmax", "as their input", "fp32"),
    ("log1p, logsumexp, cdist", "as their input", "fp32"),
    ("x.cpu()", "fp32", "as its input"),
    ("products of fp64", "fp16", "fp64"),
)


@dataclass(frozen=True)
class OptLevel:
    """The options that `amp.initialize` sets; None where the level leaves an option open.

    Attributes:
        cast_model_type: "float32", "float16", "bfloat16" or None.
        loss_scale: a number or "dynamic".
        half_dtype: the 16-bit type of the level.
    """

    cast_model_type: str | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    cast_model_outputs: str | None = None
    min_loss_scale: float | None = None
    max_loss_scale: float = MAX_SCALE
    half_dtype: str = "float16"

    @property
    def is_half(self) -> bool:
        """Whether the model's weights become 16-bit."""
        return self.cast_model_type in ("float16", "bfloat16")

    @property
    def is_static(self) -> bool:
        """Whether the loss scale of the level stays as it is."""
        return self.loss_scale != "dynamic"

    @property
    def half_name(self) -> str:
        """The 16-bit type of the level, "fp16" or "bf16"."""
        return "bf16" if self.half_dtype == "bfloat16" else "fp16"


LEVELS: dict[str, OptLevel] = {
    "O0": OptLevel("float32", False, None, False, 1.0),
    "O1": OptLevel(None, True, None, None, "dynamic"),
    "O2": OptLevel("float16", False, True, True, "dynamic"),
    "O3": OptLevel("float16", False, False, False, 1.0),
    "O4": OptLevel(None, True, None, None, 1.0, half_dtype="bfloat16"),
    "O5": OptLevel("bfloat16", False, True, True, 1.0, half_dtype="bfloat16"),
}


def has_half_weights(level: str | None) -> bool:
    """Return whether the weights of the model are 16-bit at an opt level; None for none."""
    return level is not None and LEVELS[level].is_half


def level_with_overrides(options: Mapping[str, Any]) -> OptLevel:
    """Return the options of an `apex` arm: those of its level, and what the arm overrides."""
    settled = dict(LEVELS[options.get("opt_level", "O1")].__dict__)
    settled.update({name: value for name, value in options.items() if name in settled})
    return OptLevel(**settled)


@dataclass(frozen=True)
class _EngineChoice:
    """The implementation that was chosen, why, the version of the real Apex, and what can go wrong with it."""

    name: Literal["nvidia", "compat"]
    reason: str
    version: str = ""
    caution: str = ""


def require_real_apex_on_device(device: str) -> ApexInstall:
    """Return the installed Apex, if it can run on a device."""
    installed = find_installed_apex()
    if not installed.has_amp:
        raise BackendUnavailable(installed.reason)
    if not _is_cuda_device(device):
        raise BackendUnavailable(
            f"the real Apex runs on CUDA only, and the device is {device}: use --engine compat"
        )
    return installed


def select_engine(engine: str, opt_level: str, device: str, *, torch_version: str) -> _EngineChoice:
    """Return the implementation that an engine stands for, with the reason.

    Args:
        engine: "nvidia", "compat", or "auto": the real Apex if that can work.
        opt_level: such as "O2"; O4 and O5 are of ampcompare's engine alone.
        device: such as "cuda:0"; the real Apex runs on CUDA only.
        torch_version: named in the caution about O1 of the real Apex.

    Raises:
        BackendUnavailable: the real Apex is asked for, and is not installed or does not do that here.
    """
    o1_raises = f"O1 of the real Apex can raise on torch {torch_version}" if opt_level == "O1" else ""
    if opt_level in ROCM_LEVELS:
        if engine == "nvidia":
            raise BackendUnavailable(
                f"{opt_level} is a level of ROCm's Apex, which NVIDIA's does not have: use --engine compat"
            )
        return _EngineChoice("compat", f"{opt_level} is a level of ROCm's Apex, which NVIDIA's does not have")
    if engine == "nvidia":
        return _choice_of_real_engine(require_real_apex_on_device(device), o1_raises)
    if engine == "compat":
        return _EngineChoice("compat", "asked for")
    installed = find_installed_apex()
    if not installed.has_amp:
        return _EngineChoice("compat", installed.reason.partition(";")[0])
    if not _is_cuda_device(device):
        return _EngineChoice("compat", f"the real Apex runs on CUDA only, and the device is {device}")
    # Without its CUDA extensions the real Apex waits for the device at each parameter, which is not how it was used.
    if installed.kind != "full":
        return _EngineChoice("compat", f"{installed.reason}; --engine nvidia uses it anyway")
    return _EngineChoice("compat", o1_raises) if o1_raises else _choice_of_real_engine(installed, "")


def _choice_of_real_engine(installed: ApexInstall, o1_raises: str) -> _EngineChoice:
    version = installed.version if installed.kind == "full" else f"{installed.version}, Python only"
    caution = (
        f"{o1_raises} (a weight used twice, a second forward, RNN modules, evaluation without no_grad); "
        "--engine compat does not"
    )
    return _EngineChoice("nvidia", installed.reason, version, caution if o1_raises else "")


def _is_cuda_device(device: str) -> bool:
    return device.partition(":")[0] == "cuda"
