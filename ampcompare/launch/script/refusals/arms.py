"""Arms that certainly cannot train a script, with line and reason, before any cell starts.

Only what no branch of the script can change is refused here. Everything else is refused by the cell, at the call.
"""

from __future__ import annotations

import functools
from pathlib import Path

from ampcompare.backends.apex_levels import apex_level
from ampcompare.backends.arm import Arm
from ampcompare.launch.script.refusals.files import SourceFiles, read_files
from ampcompare.launch.script.refusals.precisions import foreign_precision
from ampcompare.launch.script.refusals.uses import Uses, find_uses
from ampcompare.settings.script import ScriptConfig

__all__ = ["why_refused"]

APEX = {"apex", "ampcompare", "fp16_utils", "FP16_Optimizer"}
TORCH = {"autocast", "GradScaler"}
ENTRIES = {"initialize", "init"}
NO_SOURCE = SourceFiles((), complete=False)


def why_refused(script: ScriptConfig, arm: Arm) -> str:
    """Return why an arm certainly cannot train a script, with its line; "" where that is not certain."""
    path = _path_of(script)
    source = None
    if path is not None:
        source = _source(path, Path() if script.is_module else path.parent, script.sha256)
    if arm.backend != "script" and (why := foreign_precision(source or NO_SOURCE, script.arguments)):
        return why
    uses = _uses(source) if source is not None and source.complete else None
    if uses is None:
        return ""
    uses_apex, uses_torch = bool(uses.words & APEX), bool(uses.words & TORCH)
    if uses_apex and uses_torch:
        return ""  # which of both depends on branches
    if uses_apex and uses.words & ENTRIES:
        return _for_apex(uses, arm)
    return _for_closures(uses, arm)


def _path_of(script: ScriptConfig) -> Path | None:
    """Return the file of a script, or of a module below this folder."""
    if not script.is_module:
        return Path(script.name)
    base = Path(*script.name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__main__.py") if path.is_file()), None)


@functools.lru_cache(maxsize=8)
def _source(path: Path, root: Path, _sha256: str | None) -> SourceFiles:
    return read_files(path, root)


@functools.lru_cache(maxsize=8)
def _uses(source: SourceFiles) -> Uses:
    return find_uses(source)


def _for_closures(uses: Uses, arm: Arm) -> str:
    """Return why an arm cannot run the closures of a script that lacks `apex.amp`."""
    if not uses.closures or uses.steps or not _unscales(arm):
        return ""
    place = uses.closures[0].place
    if "GradScaler" in uses.words:
        return (
            f"{place}: scaler.step is called with a closure, which this arm does not support, since a step may have to "
            "be skipped; call it without one"
        )
    if "LBFGS" in uses.words:
        return (
            f"{place}: LBFGS runs its closure several times in one step, and this arm unscales gradients once per "
            "step; compare fp32 or native:bf16"
        )
    return ""


def _for_apex(uses: Uses, arm: Arm) -> str:
    calls = uses.calls["initialize"]
    if calls and all(use.enabled is False for use in calls) and not _is_fp32(arm):
        return (
            f"{calls[0].place}: amp.initialize has enabled=False, so no arm has any effect; run the script with "
            f"amp enabled"
        )
    if uses.calls["init"] and "initialize" not in uses.words and arm.backend != "apex":
        return (
            f"{uses.calls['init'][0].place}: amp.init has no models and optimizers, which this arm prepares; call "
            "amp.initialize instead"
        )
    if uses.closures and not uses.steps and (arm.backend in ("native", "half") or arm.options.get("opt_level") == "O2"):
        return (
            f"{uses.closures[0].place}: optimizer.step is called with a closure, which this arm does not support, "
            f"since a step may have to be skipped; call step() without one"
        )
    return ""


def _unscales(arm: Arm) -> bool:
    """Return whether an arm unscales gradients, or moves them to master weights, once per step."""
    if arm.backend == "native":
        return bool(arm.options.get("dtype") == "float16")
    if arm.backend == "half":
        return bool(arm.options.get("master_weights") or arm.options.get("loss_scale"))
    if arm.backend != "apex":
        return False
    level = apex_level(arm.options)
    return level.patch_torch_functions or bool(level.master_weights) or level.loss_scale != 1.0


def _is_fp32(arm: Arm) -> bool:
    return arm.backend == "fp32" or arm.options.get("opt_level") == "O0"
