"""Arms of ampcompare's own: `fp32`, `native`, `half`, and backends of other packages that enter scripts as these do."""

import torch

from ampcompare.backends.arm import Arm
from ampcompare.script.behind.side import ScriptProcessContext
from ampcompare.script.torch_amp.autocast_and_scaler import TorchAmpByAutocast
from ampcompare.script.torch_amp.half_weights import HalfArmStepping, TorchAmpByHalfWeights
from ampcompare.script.torch_amp.parallel_wrappers import make_wrappers_reduce_in_dtype
from ampcompare.training.precision.base import make_precision


def prepare_torch_amp_stand_in(arm: Arm, side: ScriptProcessContext) -> TorchAmpByAutocast:
    """Return what stands behind `torch.amp`: by autocast, or by weights in 16 bits where the arm holds those."""
    if arm.roles is not None and arm.roles.operand_type == "tf32":
        # which sets the switches of this process
        make_precision(arm, device=side.device_type).prepare([], [])
    if (reduce := arm.options.get("reduce")) is not None:
        make_wrappers_reduce_in_dtype(getattr(torch, reduce), str(arm), side.events)
    if arm.roles is None or arm.roles.weights == "fp32":
        return TorchAmpByAutocast(arm, side.rows)
    scaling = HalfArmStepping(arm, "cuda" if torch.cuda.is_available() else "cpu")
    return TorchAmpByHalfWeights(arm, scaling, side.rows, wrappers=side.wrappers)
