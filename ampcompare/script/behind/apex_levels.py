"""Arms of `apex`: the `amp.initialize` of a script takes the arm's level, and `torch.amp` trains by it too."""

import functools
import importlib
import sys
from typing import Any

import torch

from ampcompare.backends.apex_levels import LEVELS
from ampcompare.backends.arm import Arm
from ampcompare.script.behind.apex_amp import refuse_init_of_old_amp
from ampcompare.script.behind.side import ScriptProcessContext, as_list
from ampcompare.script.process.prepare import override_opt_level
from ampcompare.script.torch_amp.autocast_and_scaler import TorchAmpByAutocast
from ampcompare.script.torch_amp.half_weights import ApexLevelStepping, TorchAmpByHalfWeights
from ampcompare.script.torch_amp.o1 import TorchAmpByO1
from ampcompare.script.torch_amp.protocol import TorchAmpStandIn
from ampcompare.training.precision.base import half_dtype_of
from ampcompare.training.precision.keep_fp32 import kept_in_fp32, make_o1_casts_off_factory


def prepare_torch_amp_stand_in(arm: Arm, side: ScriptProcessContext) -> TorchAmpStandIn:
    """Let `amp.initialize` take the arm's level and options, and return what stands behind `torch.amp`."""
    options = dict(arm.options)
    options.pop("engine", None)
    options.pop("keep_fp32", None)
    level = options.pop("opt_level")
    if "cast_model_outputs" in options:
        options["cast_model_outputs"] = getattr(torch, options["cast_model_outputs"])
    frontend: Any = importlib.import_module("apex.amp.frontend")
    side.events.wrap(frontend, "_initialize", functools.partial(_initialize_at_arm_level, arm, side))
    side.events.put_innermost(sys.modules["apex.amp"], "init", functools.partial(refuse_init_of_old_amp, arm))
    override_opt_level(level, side.events, quiet=True, options=options)
    if LEVELS[level].patch_torch_functions and side.engine == "compat":
        return TorchAmpByO1(arm, side.has_initialized)
    if LEVELS[level].is_half and side.engine == "compat":
        scaling = ApexLevelStepping(arm, "cuda" if torch.cuda.is_available() else "cpu")
        return TorchAmpByHalfWeights(arm, scaling, side.rows, side.has_initialized, wrappers=side.wrappers)
    return TorchAmpByAutocast(arm, side.rows, side.has_initialized)


def _initialize_at_arm_level(
    arm: Arm,
    side: ScriptProcessContext,
    original: Any,
    models: Any,
    optimizers: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call Apex's own, once the first weights are recorded, with the modules that the arm keeps in fp32."""
    side.record_weights(as_list(models), as_list(optimizers))
    if not arm.keep_fp32:
        return original(models, optimizers, *args, **kwargs)
    patches = LEVELS[arm.options["opt_level"]].patch_torch_functions
    with kept_in_fp32(
        as_list(models),
        arm.keep_fp32,
        None if patches else half_dtype_of(arm),
        make_o1_casts_off_factory(sys.modules["apex.amp"]) if patches else None,
    ):
        return original(models, optimizers, *args, **kwargs)
