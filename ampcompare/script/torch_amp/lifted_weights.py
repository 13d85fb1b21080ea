"""16-bit weights that a script trains, lifted to fp32 when an optimizer gets them: an arm acts on those.

No number changes, since fp32 has all numbers of fp16 and bf16. Weights that are frozen, and tensors that the script
casts, keep their type, and each module gets inputs of the type of its own weights.
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.base.live_objects import live_objects_of
from ampcompare.base.location import user_location
from ampcompare.base.patches import Subscriptions
from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.base.tensors.tree import map_tensors_in_tree, tensors_in_value, widen_halves
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.torch_amp.parallel_wrappers import ParallelWrappers
from ampcompare.training.precision.base import owned_params
from ampcompare.training.precision.keep_fp32 import own_tensors_of_module

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
LERPS = ((Tensor, "lerp"), (Tensor, "lerp_"), (torch, "_foreach_lerp_"))


class HalfWeightLifter:
    """Lifts weights, and fits inputs to modules once it has.

    Attributes:
        types: that were lifted, such as "bfloat16".
    """

    def __init__(self, wrappers: ParallelWrappers, rows: RecordedSteps | None, events: Subscriptions) -> None:
        self.types: list[str] = []
        self._rows = rows
        self._events = events
        self._wrappers = wrappers
        self._notes: set[str] = set()
        # that may be thawed
        self._frozen: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()

    def lift_weights_of(self, optimizer: Any) -> None:
        """Make the 16-bit weights that `optimizer` trains fp32, and all tensors of the modules that hold them."""
        halves = [param for param in owned_params(optimizer) if param.dtype in HALF_DTYPES]
        trained = [param for param in halves if param.requires_grad]
        self._frozen[optimizer] = [param for param in halves if not param.requires_grad]
        if not trained:
            return
        if not self.types:  # an average that the script has copied before stays narrow
            allow_averages_across_types(self._events)
        types = sorted({str(param.dtype).removeprefix("torch.") for param in trained})
        self.types += [name for name in types if name not in self.types]
        ids = set(map(id, trained))
        modules = [
            one
            for one in all_modules_of_process()
            if any(id(param) in ids for param in one._parameters.values())
        ]
        wrapped = self._wrappers.wrapped_models_with(ids)
        self._wrappers.refuse_communication_hooks(wrapped, "an arm that lifts 16-bit weights")
        for param in trained:
            _make_param_and_gradient_fp32(param)
        for module in modules:
            for tensor in own_tensors_of_module(module):
                if tensor.dtype in HALF_DTYPES:
                    _make_param_and_gradient_fp32(tensor)
        self._wrappers.make_wrappers_again(wrapped)
        self._note_departure(f"weights lifted from {' and '.join(types)} ({user_location()})")
        if torch.get_default_dtype() in HALF_DTYPES:
            default = str(torch.get_default_dtype()).removeprefix("torch.")
            self._note_departure(
                f"the default type of the script is {default}: an arm lifts weights alone, and data, noise and buffers "
                "that the script makes keep that type"
            )

    def _note_departure(self, note: str) -> None:
        """Note once in what the arm departs from the script."""
        if self._rows is not None and note not in self._notes:
            self._rows.add_arm_departure_note(note)
        self._notes.add(note)

    def lift_thawed_weights(self) -> None:
        """Lift what the script has frozen when an optimizer got it, and trains by now."""
        for optimizer, frozen in list(self._frozen.items()):
            if any(param.requires_grad for param in frozen):
                self.lift_weights_of(optimizer)

    def inputs_in_weight_type(self, module: nn.Module, values: Any, *, narrows: bool, widens: bool) -> Any:
        """Return the inputs of a module in the type of its own weights.

        Args:
            narrows: fp32 becomes the 16-bit type of frozen weights, as it does for a norm, which takes no two types.
            widens: 16 bits become fp32.
        """
        # torch calls the modules inside of it by no hook
        compiled = type(module).__name__ == "OptimizedModule"
        own = module.parameters() if compiled else module._parameters.values()
        held = next((one.dtype for one in own if one is not None), None)
        others: tuple[torch.dtype, ...] = ()
        if held is torch.float32 and widens:
            others = HALF_DTYPES
        elif held in HALF_DTYPES:
            narrows = narrows or isinstance(module, NORMS)
            others = tuple(one for one in HALF_DTYPES if one is not held)
            if narrows:
                others += (torch.float32,)
        if not any(tensor.dtype in others for tensor in tensors_in_value(values)):
            return values
        return map_tensors_in_tree(
            values, lambda tensor: tensor.to(held) if tensor.dtype in others else tensor
        )

    def frozen_result_in_input_type(self, result: Any, given_inputs: Any, fitted_inputs: Any) -> Any:
        """Return the result of a frozen module in fp32 where its inputs were, as the parts around it get both."""
        was_wide = any(tensor.dtype is torch.float32 for tensor in tensors_in_value(given_inputs))
        if not was_wide or any(tensor.dtype is torch.float32 for tensor in tensors_in_value(fitted_inputs)):
            return result
        return widen_halves(result)


def allow_averages_across_types(events: Subscriptions) -> None:
    """Let an average and weights of different types be averaged, one of which an arm has cast or lifted."""
    for owner, name in LERPS:
        events.wrap(owner, name, functools.partial(_lerp_between_types, name.endswith("_")))


def _lerp_between_types(
    is_in_place: bool, original: Any, start: Any, end: Any, *args: Any, **kwargs: Any
) -> Any:
    """Move an average towards weights of another type, which `lerp` refuses, unlike `add_` and `mul_`."""
    if isinstance(start, Tensor) and isinstance(end, Tensor):
        if not is_in_place and start.dtype in HALF_DTYPES:
            start = _as_floating_type_of(start, end)
        end = _as_floating_type_of(end, start)
    elif isinstance(end, list | tuple):
        end = list(map(_as_floating_type_of, end, start))
    return original(start, end, *args, **kwargs)


def _as_floating_type_of(value: Tensor, other: Tensor) -> Tensor:
    """Return a tensor in the type of another, if one is fp32 and the other of 16 bits, or both are of 16 bits."""
    types = (*HALF_DTYPES, torch.float32)
    fits = value.dtype is other.dtype or value.dtype not in types or other.dtype not in types
    return value if fits else value.to(other.dtype)


@torch.no_grad()
def _make_param_and_gradient_fp32(param: Tensor) -> None:
    grad, param.grad = param.grad, None
    param.data = param.data.float()
    if getattr(param, "grad_dtype", None) in HALF_DTYPES:  # of torch 2.13
        param.grad_dtype = torch.float32
    param.grad = None if grad is None else grad.float()


def all_modules_of_process() -> list[nn.Module]:
    """Return all modules of this process."""
    # `vars`: the objects of libraries may answer `hasattr` by code of their own.
    return [one for one in live_objects_of(nn.Module) if "_modules" in vars(one)]
