"""Check that a checkpoint fits the models and optimizers of a run before any of it is loaded.

A run reads its own files, whose checksum holds and whose recipe and arm are those of the run; what is left to differ is
the model that the user's code builds, and its order and groups of parameters.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.errors import CheckpointError
from ampcompare.checkpoints.store.layout import CONVERTED, list_of_one_or_several
from ampcompare.training.precision.base import owned_params

# Each tensor that these keep of a parameter has its shape, except counts.
LIKE_THEIR_PARAMETER = (
    "SGD",
    "Adam",
    "AdamW",
    "FusedAdam",
    "FusedLAMB",
    "FusedNovoGrad",
    "FusedSGD",
    "FusedAdagrad",
)
MAX_NAMED = 10

Names = Sequence[Sequence[tuple[int, str]]]
"""Per optimizer and parameter, in order: the index of the model, and the name of the parameter in it."""


def parameter_names_by_model(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Names:
    """Map the parameters of torch optimizers to names in their models. Call it before `Precision.prepare`."""
    names = {
        id(param): (index, name)
        for index, model in enumerate(models)
        for name, param in model.named_parameters()
    }
    return [[names[id(param)] for param in owned_params(optimizer)] for optimizer in optimizers]


def check_training_state(
    state: Mapping[str, Any], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Check that weights and optimizers of a state are those of this run, in name and shape."""
    saved_models, saved_optimizers = (
        list_of_one_or_several(state["model"]),
        list_of_one_or_several(state["optimizer"]),
    )
    if len(saved_models) != len(models) or len(saved_optimizers) != len(optimizers):
        raise CheckpointError(
            f"the checkpoint holds {len(saved_models)} models and {len(saved_optimizers)} optimizers, but the run has "
            f"{len(models)} and {len(optimizers)}; use one of this model"
        )
    # another program may save other types than its arm holds
    is_own = "arm" in state and CONVERTED not in state
    for model, weights in zip(models, saved_models, strict=True):
        check_weights_fit_model(model, weights, same_types=is_own)
    faults: list[str] = []
    for optimizer, saved in zip(optimizers, saved_optimizers, strict=True):
        faults += _state_faults_of_optimizer(optimizer, saved)
    _raise_on_faults(faults, "does not fit this run", "entries")


def check_weights_fit_model(
    model: nn.Module, weights: Mapping[str, Any], *, same_types: bool = False
) -> None:
    """Check that weights have the names and shapes of a model, and its dtypes if asked for."""
    wanted = model.state_dict()
    faults = [f"{name} is missing" for name in wanted if name not in weights]
    faults += [f"{name} is unexpected" for name in weights if name not in wanted]
    for name, tensor in wanted.items():
        if name in weights and (
            fault := _tensor_difference_text(weights[name], tensor, same_type=same_types)
        ):
            faults.append(f"{name} {fault}")
    _raise_on_faults(faults, "is of another model", "tensors")


def check_run_position(progress: Mapping[str, Any], steps_per_epoch: int, total_steps: int) -> None:
    """Check that a position is one that a run of this length can have."""
    step = progress["step"]
    epoch = progress["epoch"]
    batch = progress["batch"]
    # A run that was stopped after the last update of an epoch still lacks its evaluation.
    inside = step == epoch * steps_per_epoch + batch and batch <= steps_per_epoch
    cut_short = step == total_steps and batch == 0 and epoch == math.ceil(total_steps / steps_per_epoch)
    if step > total_steps or not (inside or cut_short):
        raise CheckpointError(
            f"progress of the checkpoint is {step} steps, {epoch} epochs and {batch} batches, and an epoch of this run "
            f"has {steps_per_epoch} of {total_steps} steps; use the checkpoint before it"
        )


def _raise_on_faults(faults: Sequence[str], what: str, kind: str) -> None:
    if faults:
        more = f" and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
        raise CheckpointError(
            f"the checkpoint {what}: {len(faults)} of its {kind} do not fit: {'; '.join(faults[:MAX_NAMED])}{more}; "
            "use one of this model"
        )


def _state_faults_of_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> list[str]:
    """Return which states of parameters are not of their shapes."""
    there = [len(group["params"]) for group in saved["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        return [f"the optimizer has groups of {there} parameters there and of {here} here"]
    faults = []
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, owned_params(optimizer), strict=True):
        for name, value in saved["state"].get(number, {}).items():
            is_like = (
                isinstance(value, Tensor) and value.dim() and type(optimizer).__name__ in LIKE_THEIR_PARAMETER
            )
            if is_like and (fault := _tensor_difference_text(value, param)):
                faults.append(f"optimizer.state.{number}.{name} {fault}")
    return faults


def _tensor_difference_text(saved: Any, wanted: Tensor, *, same_type: bool = False) -> str:
    """Return how a tensor differs in kind, shape or dtype; "" if it does not. Any floats fit floats by default."""
    if not isinstance(saved, Tensor):
        return f"is a {type(saved).__name__} there and a tensor here"
    if saved.shape != wanted.shape:
        return f"is {list(saved.shape)} there and {list(wanted.shape)} here"
    castable = saved.is_floating_point() and wanted.is_floating_point() and not same_type
    return (
        "" if castable or saved.dtype is wanted.dtype else f"is {saved.dtype} there and {wanted.dtype} here"
    )
