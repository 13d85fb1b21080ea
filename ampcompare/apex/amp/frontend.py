"""`initialize`, and the amp state for checkpoints.

Source: Apex 25.05, `apex/amp/frontend.py`; scripts parse the printed lines.
"""

from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Any

import torch

from ampcompare.apex import deprecated_warning, is_strict_by_environment

from ._amp_state import _amp_state, maybe_print
from ._engine.errors import AmpCheckpointError, AmpNotInitialized, AmpOptionError
from ._engine.properties import Properties, opt_levels
from ._initialize import _initialize


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    strict: bool | None = None,
) -> Any:
    """Prepare models and optimizers for mixed precision, in place, before any parallel wrapper.

    Options from `cast_model_type` to `loss_scale` override the level's; `min_loss_scale` and `max_loss_scale` bound a
    dynamic scale.

    Args:
        models, optimizers: an fp32 module or a list; an optimizer, a list, or None.
        opt_level: "O0", "O1", "O2" or "O3" (letter O); "O4" and "O5", bfloat16's O1 and O2, are of ROCm's Apex.
        cast_model_outputs: dtype of the model's floating-point outputs.
        verbosity: 0 prints nothing, 1 the options and overflows, 2 also O1's casts.
        strict: also reproduce Apex's defects (`docs/deviations.md`); None takes the environment
            variable `AMPCOMPARE_APEX_STRICT`.

    Returns:
        The same objects: `models` alone if `optimizers` is None, else `(models, optimizers)`.

    Raises:
        AmpOptionError: an option that the level does not allow (a RuntimeError, as in Apex).
        AmpOptionValueError: `keep_batchnorm_fp32` is not a boolean (an AssertionError).
        AmpPreparationError: wrapped or half models, optimizers that were prepared before (a RuntimeError).
        AmpPreparationTypeError: models or optimizers of another type (a TypeError).

    Source: Apex 25.05, `amp.initialize`.
    """
    deprecated_warning(
        "apex.amp was removed from Apex in May 2025; `torch.amp` is its successor.  ampcompare keeps this function for "
        "comparisons and for scripts that still need it."
    )
    _amp_state.strict = is_strict_by_environment() if strict is None else bool(strict)
    _amp_state.verbosity = verbosity
    properties = Properties()
    if not enabled:
        _amp_state.opt_properties = properties
        return models if optimizers is None else (models, optimizers)
    if not torch.backends.cudnn.enabled:
        raise AmpOptionError("amp needs torch.backends.cudnn.enabled = True; it is False.")
    if opt_level not in opt_levels:
        raise AmpOptionError(
            f"Unexpected optimization level {opt_level!r}.  Options are 'O0', 'O1', 'O2', 'O3', 'O4', 'O5'.  Note that "
            "in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
        )
    level = opt_levels[opt_level]
    level(properties)
    maybe_print(f"Selected optimization level {level.brief}", True)
    maybe_print("Defaults for this optimization level are:", True)
    _print_options(properties)
    overrides = {
        "enabled": enabled,
        "opt_level": opt_level,
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    maybe_print("Processing user overrides (additional kwargs that are not None)...", True)
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)
    maybe_print("After processing overrides, optimization options are:", True)
    _print_options(properties)
    _warn_about_lost_scales()
    _amp_state.opt_properties = properties
    _amp_state.min_loss_scale = min_loss_scale
    _amp_state.max_loss_scale = max_loss_scale
    return _initialize(models, optimizers, properties, num_losses, cast_model_outputs)


def _print_options(properties: Properties) -> None:
    for name, value in properties.options.items():
        maybe_print(f"{name:22} : {value}", True)


def _warn_about_lost_scales() -> None:
    """Warn that a second `initialize` resets the loss scales of the first one."""
    scalers = _amp_state.__dict__.get("loss_scalers", ())
    moved = [scaler for scaler in scalers if scaler.dynamic and scaler.has_scale_history()]
    if moved and not _amp_state.strict:
        scales = ", ".join(f"{scaler.loss_scale():g}" for scaler in moved)
        maybe_print(
            f"Warning:  amp.initialize was called again: loss scales of the earlier call ({scales}) are reset.  "
            "Initialize all models and optimizers in one call, or carry the scales over with amp.state_dict() and "
            "amp.load_state_dict().",
            True,
        )


def state_dict(destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
    """Return `{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}`, in `destination` if it is a mapping.

    With `enabled=False` it is empty, where Apex raises; before `initialize` it is an `AmpNotInitialized`.
    """
    if destination is None:
        destination = OrderedDict()
    for index, scaler in enumerate(_require_loss_scalers()):
        destination[f"loss_scaler{index}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return destination


def _require_loss_scalers() -> list[Any]:
    scalers: list[Any] | None = _amp_state.__dict__.get("loss_scalers")
    if scalers is not None:
        return scalers
    if "opt_properties" in _amp_state.__dict__ and not _amp_state.strict:  # disabled
        return []
    raise AmpNotInitialized("amp has no loss scalers: call amp.initialize (with enabled=True) first.")


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Set the loss scalers from a state dict, the n-th entry filling the n-th scaler; surplus entries are skipped.

    Raises:
        AmpCheckpointError: entries that are not loss scalers; the others are still loaded (a RuntimeError).
    """
    scalers = _require_loss_scalers()
    if not scalers and "loss_scalers" not in _amp_state.__dict__:
        return
    if len(state_dict) != len(scalers):
        print(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used"
        )
    entries = state_dict.copy()
    unexpected: list[str] = []
    index = 0
    for key in entries:
        if "loss_scaler" not in key:
            unexpected.append(key)
            continue
        if index >= len(scalers):
            print(f"Skipping loss_scaler[{index}], since num_losses was set to {len(scalers)}")
            break
        scalers[index]._loss_scale = entries[key]["loss_scale"]
        scalers[index]._unskipped = entries[key]["unskipped"]
        index += 1
    if unexpected:
        names = ", ".join(repr(key) for key in unexpected)
        raise AmpCheckpointError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {names}.  Pass what amp.state_dict() "
            "returned, not the whole checkpoint."
        )
