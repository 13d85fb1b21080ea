"""The options of an amp session, and what each opt level sets them to.

Source: Apex 25.05, `apex/amp/frontend.py`; the briefs are printed, and scripts parse them. O4 and O5 are those of
ROCm's Apex, by the options that its `apex/amp/frontend.py` sets.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ampcompare.apex.amp._amp_state import warn_or_err

from .errors import AmpOptionValueError

PATCHING = ("O1", "O4")
_DEFAULTS: dict[str, Any] = {
    "enabled": False,
    "opt_level": None,
    "cast_model_type": None,
    "patch_torch_functions": False,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": 1.0,
}


class Properties:
    """The options of a session, checked against the opt level as they are set.

    Setting an unknown name does nothing; reading one raises `AttributeError`.
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        self.__dict__["options"] = dict(_DEFAULTS)

    @property
    def half_dtype(self) -> torch.dtype:
        """The 16-bit type of the level."""
        return torch.bfloat16 if self.opt_level in ("O4", "O5") else torch.float16

    def _update_options_dict(self, new_options: dict[str, Any]) -> None:
        for name, value in new_options.items():
            if name not in self.options:
                raise ValueError(f"Tried to set unexpected option {name}")
            self.options[name] = value

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            return
        check = getattr(self, f"_check_{name}", None)
        self.options[name] = value if check is None else check(value)

    def _check_cast_model_type(self, value: Any) -> Any:
        if self.opt_level in PATCHING and value not in (None, False, torch.float32):
            warn_or_err(
                f"{self.opt_level} inserts casts around torch functions instead of casting the model, but "
                f"cast_model_type={value} was given.  Leave it out, or use O2 or O3."
            )
        return value

    def _check_patch_torch_functions(self, value: Any) -> Any:
        if self.opt_level not in PATCHING and value:
            warn_or_err(
                f"patch_torch_functions={value} was given with {self.opt_level}; only O1 patches torch functions.  "
                "Use opt_level='O1'."
            )
        return value

    def _check_keep_batchnorm_fp32(self, value: Any) -> Any:
        if self.opt_level in PATCHING and value is not None:
            warn_or_err(
                f"keep_batchnorm_fp32={value} was given with {self.opt_level}, where batch norms keep fp32 weights and "
                "run in the type of their input anyway.  Leave it out."
            )
        if value in ("False", "True"):
            return value == "True"
        if value is not None and value is not True and value is not False:
            raise AmpOptionValueError(
                f"keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, got {value!r}."
            )
        return value

    def _check_master_weights(self, value: Any) -> Any:
        if self.opt_level in PATCHING and value is not None:
            warn_or_err(
                f"master_weights={value} was given with {self.opt_level}, whose model weights are fp32 and need no "
                "masters.  Leave it out."
            )
        return value

    def _check_loss_scale(self, value: Any) -> Any:
        return value if value == "dynamic" else float(value)


class OptLevel:
    """One opt level: its name, its one-line brief, what it is, and the options that it sets."""

    def __init__(self, name: str, brief: str, more: str, options: Sequence[Any]) -> None:
        self.name = name
        self.brief = brief
        self.more = more
        self.options = dict(zip(list(_DEFAULTS)[2:], options, strict=True))

    def __call__(self, properties: Properties) -> Properties:
        properties.options.update(self.options, enabled=True, opt_level=self.name)
        return properties


# cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
opt_levels = {
    "O3": OptLevel(
        "O3",
        "O3:  Pure FP16 training.",
        "The whole model is half: a bound for speed, not for accuracy.",
        (torch.float16, False, False, False, 1.0),
    ),
    "O2": OptLevel(
        "O2",
        "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n",
        "The model is half except batch norms; the optimizer steps fp32 masters.",
        (torch.float16, False, True, True, "dynamic"),
    ),
    "O1": OptLevel(
        "O1",
        "O1:  Insert automatic casts around Pytorch functions and Tensor methods.\n",
        "Weights stay fp32; inputs of each operation are cast to what suits it.",
        (None, True, None, None, "dynamic"),
    ),
    "O0": OptLevel(
        "O0",
        "O0:  Pure FP32 training.\n",
        "The model is checked, and otherwise trained in fp32.",
        (torch.float32, False, None, False, 1.0),
    ),
    "O4": OptLevel(
        "O4",
        "O4:  Insert automatic casts around Pytorch functions and Tensor methods.\n",
        "Weights stay fp32; inputs of each operation are cast to bfloat16 or fp32.",
        (None, True, None, None, 1.0),
    ),
    "O5": OptLevel(
        "O5",
        "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.\n",
        "The model is bfloat16 except batch norms; the optimizer steps fp32 masters.",
        (torch.bfloat16, False, True, True, 1.0),
    ),
}
