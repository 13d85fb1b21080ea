"""Keep one step of a training script, or repeat it module by module in fp64, with Python 3.7 and torch 1.8 or later.

    python one_step.py keep CAPSULE STEP [-m] SCRIPT [ARGS...]
    python one_step.py base CAPSULE ANSWERS ROWS [-m] SCRIPT [ARGS...]
    python one_step.py change CAPSULE ANSWERS ROWS [NAME=VALUE...] [-m] SCRIPT [ARGS...]

This file needs nothing but torch and the standard library, since another environment may have no more. `base` runs the
script until the step, restores the capsule, and stores of each module what it was given: inputs, output gradients and
generators. `change` gives the same to the modules of another torch, another script or other settings. Both write for
each module how far it is from itself in fp64; `change` also how far its fp64 answers are from those of `base`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import random
import runpy
import sys
import types
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
if VERSION >= (1, 13):
    from torch.overrides import TorchFunctionMode
else:  # which has none, or one of another kind
    TorchFunctionMode = object  # type: ignore[assignment, misc]

FORMAT, SCHEMA = "ampcompare-step", 1
MAX_BYTES = 200 * 10**6
BATCH, LOSS, GRADIENTS = "(batch)", "(loss)", "(gradients)"
LEFT = "(left)"  # gradients that a step leaves to the next one
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NARROW = ("half", "bfloat16", "float")
# Attributes of tensors, and what computes nothing.
NO_OPERATIONS = ("get", "set", "detach", "clone", "requires_grad")
TORCH = os.path.dirname(torch.__file__)
DROPOUTS = ("dropout", "dropout_", "feature_dropout", "feature_dropout_")
Rows = List[Dict[str, Any]]
Named = Dict[str, Tensor]


class StepRefused(Exception):
    """A step that cannot be kept or repeated: what was seen, and what to do."""


class StepJudged(BaseException):
    """Ends the script once its step was judged."""


# Trees of tensors.


def with_tensors_changed(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a value with each tensor of its lists, tuples and dicts changed; other objects stay."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        items = {key: with_tensors_changed(change, one) for key, one in value.items()}
        if type(value) is dict:
            return items
        with contextlib.suppress(Exception):  # such as what a transformer of Hugging Face returns
            return type(value)(**items)
        return items
    if isinstance(value, (list, tuple)):
        parts = [with_tensors_changed(change, one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def tensors_in(value: Any) -> List[Tensor]:
    """Return the tensors of a value, in order."""
    found: List[Tensor] = []
    with_tensors_changed(found.append, value)
    return found


def is_storable(value: Any) -> bool:
    """Return whether a value can be stored: tensors, numbers and texts in lists, tuples and dicts."""
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_storable(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_storable, value))
    return value is None or isinstance(value, (Tensor, str, int, float, bool, torch.dtype))


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU."""
    return tensor.detach().cpu().clone()


def is_floating_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor is one that is computed with."""
    return tensor.dtype in FLOATS or tensor.dtype == torch.float64


def have_equal_shapes_and_types(one: Any, other: Any) -> bool:
    """Return whether two values have tensors of the same shapes and types."""
    first, second = tensors_in(one), tensors_in(other)
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(first, second)
    )


# Generators.


def torch_generator_states() -> Dict[str, Any]:
    """Return the states of the generators of torch."""
    states: Dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_torch_generators(states: Dict[str, Any]) -> None:
    """Restore the generators of torch."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.device_count() >= len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])


def all_generator_states() -> Dict[str, Any]:
    """Return the states of the generators of torch, Python and NumPy."""
    states = {**torch_generator_states(), "python": random.getstate()}
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [str(name), [int(word) for word in words], *[float(one) for one in rest]]
    return states


def restore_all_generators(states: Dict[str, Any]) -> None:
    """Restore them."""
    restore_torch_generators(states)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in states and "numpy" in sys.modules:
        name, words, place, has_gauss, gauss = states["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(words, dtype="uint32"), int(place), int(has_gauss), gauss))


def seed_all_generators(seed: Optional[int]) -> None:
    """Seed torch, Python and NumPy; None leaves them as they are."""
    if seed is None:
        return
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def autocast_types_by_device() -> Dict[str, Any]:
    """Return which types autocast computes in, by device; empty outside of it."""
    state: Dict[str, Any] = {}
    if hasattr(torch, "get_autocast_dtype"):  # from torch 2.4 on
        devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        return {device: torch.get_autocast_dtype(device) for device in devices}
    if torch.is_autocast_enabled():
        state["cuda"] = torch.get_autocast_gpu_dtype()
    if getattr(torch, "is_autocast_cpu_enabled", bool)():
        state["cpu"] = torch.get_autocast_cpu_dtype()
    return state


@contextlib.contextmanager
def autocast_restored(state: Dict[str, Any]) -> Iterator[None]:
    """Compute as autocast did."""
    with contextlib.ExitStack() as stack:
        for device, dtype in state.items():
            stack.enter_context(torch.autocast(device, dtype=dtype))
        yield


# Modules in fp64.


class Fp64AndDropoutReplayMode(TorchFunctionMode):
    """Computes in fp64 what asks for a narrower type, and draws the dropout of the narrower type.

    Args:
        drawn: the type of the values that dropout has in the training.
        masks: gets what was drawn, each with what was asked for.
        given: masks to use, in the place of those that this torch would draw, where the same is asked for.
        double: False leaves the types as they are, and only uses the given masks.
    """

    def __init__(self, drawn: torch.dtype, masks: List[Any], given: List[Any], *, double: bool) -> None:
        super().__init__()
        self._drawn = drawn
        self._masks = masks
        self._given = list(given)
        self._double = double

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        if name in DROPOUTS and isinstance(args[0], Tensor) and is_floating_tensor(args[0]):
            return self._dropout_with_noted_mask(function, args[0], args[1:], kwargs)
        if not self._double:
            return function(*args, **kwargs)
        if name in NARROW and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            return args[0]
        args = (
            tuple(map(_fp64_for_narrower_dtype, args))
            if args and isinstance(args[0], Tensor) and is_floating_tensor(args[0])
            else args
        )
        return function(*args, **{key: _fp64_for_narrower_dtype(one) for key, one in kwargs.items()})

    def _dropout_with_noted_mask(self, function: Any, tensor: Tensor, args: Any, kwargs: Any) -> Tensor:
        asked = repr((tuple(tensor.shape), args, sorted(kwargs.items())))
        mask = function(torch.ones_like(tensor, dtype=self._drawn), *args, **kwargs)
        if self._given:
            before, given = self._given.pop(0)
            mask = given.to(mask) if before == asked else mask
        self._masks.append([asked, copy_to_cpu(mask)])
        dropped: Tensor = tensor * mask.to(tensor.dtype)
        return dropped


class OwnOperationsRecorder(TorchFunctionMode):
    """Notes what a module computes by itself: its operations, without those of modules inside of it.

    Attributes:
        noted: of each operation its name, the line of the caller's file, and a copy of its first floating output.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.noted: List[Tuple[str, str, Tensor]] = []
        self._inside = 0  # calls of modules inside that are not over
        self._hooks = []
        for inner in module.modules():
            if inner is not module:
                self._hooks.append(
                    inner.register_forward_pre_hook(lambda _, given: self._change_module_depth(1))
                )
                self._hooks.append(
                    inner.register_forward_hook(lambda _, given, output: self._change_module_depth(-1))
                )

    def _change_module_depth(self, by: int) -> None:
        self._inside += by

    def remove_hooks(self) -> None:
        """Leave the modules as they were."""
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "").strip("_")
        if not self._inside and name not in NO_OPERATIONS:
            output = next((one for one in tensors_in(result) if is_floating_tensor(one)), None)
            if output is not None:
                self.noted.append((name, _location_text_of_caller(), output.detach().clone()))
        return result


def _location_text_of_caller() -> str:
    """Return the file and line that called an operation, in its own words; "" for modules of torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return "" if file == __file__ else "%s:%d" % (os.path.basename(file), frame.f_lineno)


def operation_error_rows(
    own_results: List[Tuple[str, str, Tensor]], fp64_results: List[Tuple[str, str, Tensor]]
) -> List[Dict[str, Any]]:
    """Return of each operation its error against fp64, and two numbers that tell its fp64 answer from others.

    There is none where fp64 takes another way.
    """
    if [one[0] for one in own_results] != [one[0] for one in fp64_results]:
        return []
    rows = []
    for (name, line, output), (_, _, answer) in zip(own_results, fp64_results):
        flat = torch.nan_to_num(answer.cpu().double().flatten(), nan=3.0, posinf=2.0, neginf=-2.0)
        mark = float((flat * torch.cos(torch.arange(flat.numel(), dtype=torch.float64))).sum())
        unit = torch.finfo(output.dtype).eps / 2
        rows.append({"name": name, "line": line, "error": relative_distance(output, answer), "unit": unit,
                     "size": float(flat.norm()), "mark": mark})  # fmt: skip
    return rows


def seeded_dropout_mask(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what this torch draws for dropout of a type from a known seed."""
    states = torch_generator_states()
    torch.manual_seed(0)
    mask = nn.functional.dropout(torch.ones(1000, dtype=dtype), 0.5).float()
    restore_torch_generators(states)
    return mask


def _fp64_for_narrower_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in FLOATS else value


@contextlib.contextmanager
def weights_and_buffers_changed_in(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the weights and buffers of a module, and restore both, and what the module does with its buffers."""
    weights = [(one, one.data) for one in module.parameters()]
    buffers = [(each, dict(each._buffers)) for each in module.modules()]
    copies = {id(one): one.clone() for one in module.buffers()}
    try:
        for weight, data in weights:
            weight.data = change(data) if is_floating_tensor(data) else data
        for each, held in buffers:
            for name, one in held.items():
                if one is not None:
                    each._buffers[name] = change(one).clone() if is_floating_tensor(one) else one.clone()
        yield
    finally:
        for weight, data in weights:
            weight.data = data
        for each, held in buffers:
            for one in held.values():
                if one is not None:
                    one.data.copy_(copies[id(one)])
            each._buffers.update(held)


class RecordedModuleCall:
    """What a module was given in the step: inputs, generators, autocast, and the gradients of its outputs."""

    def __init__(self, name: str, number: int, args: Any, kwargs: Any, needs: List[bool]) -> None:
        self.name = name
        self.number = number
        self.args = args
        self.kwargs = kwargs
        self.needs = needs
        self.generators = torch_generator_states()
        self.autocast = autocast_types_by_device()
        self.gradients: List[Optional[Tensor]] = []
        self.output: Any = None
        self.training = True
        # Under an arm: whether it is cast by other means than autocast, and the types that its inputs arrive in.
        self.is_cast = False
        self.types: Optional[List[torch.dtype]] = None

    def as_plain_data(self) -> Dict[str, Any]:
        """Return it as plain data."""
        return {
            name: value for name, value in vars(self).items() if name not in ("autocast", "is_cast", "types")
        }


def _nudged_tensor(tensor: Tensor, part: float, noise: torch.Generator) -> Tensor:
    """Change each number by a part of it, up or down."""
    if not part or tensor.dtype != torch.float64:
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=noise).to(tensor) * 2 - 1
    return tensor * (1 + part * signs)


def outputs_and_gradients_of_call(
    module: nn.Module, call: Dict[str, Any], autocast: Dict[str, Any], *, in_fp64: bool = False,
    relative_nudge: float = 0.0, called_instead: Optional[Callable[..., Any]] = None,
    drawn_masks: Optional[List[Any]] = None, masks_to_replay: Optional[List[Any]] = None,
    input_types: Optional[List[torch.dtype]] = None, scale: float = 1.0, operations: Optional[List[Any]] = None,
) -> Dict[str, Named]:  # fmt: skip
    """Call a module by itself, and return its outputs, gradients of inputs and weights, and buffers behind the call.

    Args:
        call: its inputs, output gradients and generators.
        in_fp64: computes in fp64.
        relative_nudge: changes each input, gradient and weight, and what each module inside returns, by that part of
            it, up or down, as roundings would. It shows also where a gradient is a sum of large terms that cancel out.
        called_instead: what is called in its place, such as its compiled form.
        drawn_masks: gets the masks of dropout; `masks_to_replay` are those to use.
        input_types: of its inputs, to which these are rounded.
        scale: of the output gradients, by which the gradients are divided.
        operations: gets those of the forward pass, as `OwnOperationsRecorder` has them.
    """
    device = next((one.device for one in module.parameters()), None)
    noise = torch.Generator().manual_seed(0)

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.detach() if device is None else tensor.detach().to(device)
        if in_fp64 and is_floating_tensor(tensor):
            tensor = _nudged_tensor(tensor.double(), relative_nudge, noise)
        return tensor

    inputs = _InputLeaves(call["needs"], change, () if in_fp64 else input_types or ())
    with contextlib.ExitStack() as stack:
        stack.enter_context(weights_and_buffers_changed_in(module, change))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(autocast_restored(autocast))
        args = with_tensors_changed(inputs.next_input, call["args"])
        kwargs = with_tensors_changed(inputs.next_input, call["kwargs"])
        restore_torch_generators(call["generators"])
        if relative_nudge:
            stack.enter_context(
                _inner_module_outputs_changed(module, lambda one: _nudged_tensor(one, relative_nudge, noise))
            )
        noted = [] if drawn_masks is None else drawn_masks
        stack.enter_context(
            _fp64_and_dropout_replay(
                _dropout_type_by_first_input(call), noted, masks_to_replay or [], in_fp64=in_fp64
            )
        )
        with _own_operations_recorded(module, operations):
            outputs = tensors_in((module if called_instead is None else called_instead)(*args, **kwargs))
        weights = {name: one for name, one in module.named_parameters() if one.requires_grad}
        into_outputs = [
            (change(gradient) * scale).to(output.dtype)
            if gradient is not None and output.requires_grad
            else None
            for output, gradient in zip(outputs, call["gradients"])
        ]
        found = _gradients_of_inputs(outputs, into_outputs, inputs.leaves + list(weights.values()))
        buffers = {
            name: one.detach().clone() for name, one in module.named_buffers() if is_floating_tensor(one)
        }
    found = [None if one is None else _unscaled_gradient(one.detach(), scale) for one in found]
    of_inputs = {str(number): one for number, one in enumerate(found[: len(inputs.leaves)])}
    of_weights = dict(zip(weights, found[len(inputs.leaves) :]))
    return {
        "fwd": {str(number): one.detach() for number, one in enumerate(outputs) if is_floating_tensor(one)},
        "dgrad": {name: one for name, one in of_inputs.items() if one is not None},
        "wgrad": {name: one for name, one in of_weights.items() if one is not None},
        "state": buffers,
    }


class _InputLeaves:
    """Makes the inputs of a call again, tensor by tensor in their order.

    Args:
        needs: which of them had a gradient in the training.
        change: moves a tensor to the device, and into the type that is computed in.
        types: to which floating ones are rounded; () leaves them as they are.

    Attributes:
        leaves: those with a gradient.
    """

    def __init__(
        self, needs: List[bool], change: Callable[[Tensor], Tensor], types: Sequence[torch.dtype]
    ) -> None:
        self._needs, self._change, self._types = iter(needs), change, iter(types)
        self.leaves: List[Tensor] = []

    def next_input(self, tensor: Tensor) -> Tensor:
        """Return the next one, which the module may change in place."""
        leaf, kind = self._change(tensor), next(self._types, None)
        if kind in FLOATS and is_floating_tensor(leaf):
            leaf = leaf.to(kind)
        if next(self._needs) and is_floating_tensor(leaf):
            leaf = leaf.clone().requires_grad_(True)
            self.leaves.append(leaf)
        return leaf.clone()


def _dropout_type_by_first_input(call: Dict[str, Any]) -> torch.dtype:
    """Return the type in which dropout draws its masks in a call: that of the first floating input."""
    inputs = tensors_in((call["args"], call["kwargs"]))
    return next((one.dtype for one in inputs if is_floating_tensor(one)), torch.float32)


@contextlib.contextmanager
def _fp64_and_dropout_replay(
    drawn_type: torch.dtype, drawn_masks: List[Any], masks_to_replay: List[Any], *, in_fp64: bool
) -> Iterator[None]:
    """Compute in fp64, if `in_fp64`; note the masks of dropout, drawn in a type, or take those that are given."""
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        if in_fp64:
            stack.callback(torch.set_default_dtype, default)
            torch.set_default_dtype(torch.float64)
        if (in_fp64 or masks_to_replay) and TorchFunctionMode is not object:
            stack.enter_context(
                Fp64AndDropoutReplayMode(drawn_type, drawn_masks, masks_to_replay, double=in_fp64)
            )
        yield


@contextlib.contextmanager
def _own_operations_recorded(module: nn.Module, into: Optional[List[Any]]) -> Iterator[None]:
    """Note the operations of a module in a list, if one is given and this torch has such modes."""
    if into is None or TorchFunctionMode is object:
        yield
        return
    mode = OwnOperationsRecorder(module)
    try:
        with mode:
            yield
    finally:
        mode.remove_hooks()
        into.extend(mode.noted)


def _context_keeping_fp64() -> Any:
    """Return a context in which fp64 stays fp64 where a narrower type is asked for, if this torch has such modes."""
    if TorchFunctionMode is object:
        return contextlib.nullcontext()
    return Fp64AndDropoutReplayMode(torch.float32, [], [], double=True)


@contextlib.contextmanager
def _inner_module_outputs_changed(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the tensors that each module inside of another one returns."""
    hooks = [
        inner.register_forward_hook(lambda _, given, output: with_tensors_changed(change, output))
        for inner in module.modules()
        if inner is not module
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _gradients_of_inputs(
    outputs: List[Tensor], output_gradients: List[Optional[Tensor]], inputs: List[Tensor]
) -> List[Optional[Tensor]]:
    """Return the gradient of each input from those of outputs; None for an output or an input that has none."""
    pairs = [
        (output, gradient) for output, gradient in zip(outputs, output_gradients) if gradient is not None
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    # In the place of `torch.autograd.grad`, in which no mode acts on what a backward pass is written in.
    engine: Any = torch.autograd.Variable._execution_engine
    of_outputs, into_outputs = zip(*pairs)
    return list(
        engine.run_backward(
            of_outputs,
            into_outputs,
            False,
            False,
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    )


def _unscaled_gradient(gradient: Tensor, scale: float) -> Tensor:
    return gradient if scale == 1.0 else gradient.float() / scale


def relative_distance(one: Tensor, other: Tensor) -> float:
    """Return how far a tensor is from another one, in lengths of that; infinities at equal places do not count."""
    if one.shape != other.shape:
        return math.inf
    one, other = one.detach().cpu().double(), other.detach().cpu().double()
    finite = torch.isfinite(other)
    if not bool(finite.all()):
        if not bool((torch.isfinite(one) == finite).all()):
            return math.inf
        one, other = one[finite], other[finite]
    apart, size = float((one - other).norm()), float(other.norm())
    return 0.0 if apart == 0 else apart / size if size > 0 and math.isfinite(apart) else math.inf


Entry = Dict[str, Any]


def errors_by_part_and_tensor(
    own_results: Dict[str, Named],
    fp64_results: Dict[str, Named],
    nudged_fp64_results: Dict[str, Named],
    known_fp64_results: Optional[Dict[str, Named]],
) -> Dict[str, Dict[str, Entry]]:
    """Return of each tensor of each part its error, its conditioning, and how far the fp64 answer is from a known one.

    `nudged_fp64_results` are what a change of all inputs by half a unit in the last place makes of the fp64 answer.
    """
    parts: Dict[str, Dict[str, Entry]] = {}
    for part, tensors in fp64_results.items():
        for name, one in tensors.items():
            if name not in own_results[part]:
                continue
            entry: Entry = {
                "error": relative_distance(own_results[part][name], one),
                "moved": relative_distance(nudged_fp64_results[part].get(name, one), one),
                "unit": torch.finfo(own_results[part][name].dtype).eps / 2,
            }
            if known_fp64_results is not None:
                there = known_fp64_results.get(part, {}).get(name)
                entry["same"] = math.inf if there is None else relative_distance(one, there)
            parts.setdefault(part, {})[name] = entry
        for name in (known_fp64_results or {}).get(part, {}):
            if name not in tensors:  # such as the gradient of a branch that is detached now
                parts.setdefault(part, {})[name] = {
                    "error": 0.0,
                    "moved": 0.0,
                    "unit": 2.0**-24,
                    "same": math.inf,
                }
    return parts


# The optimizer.


def updates_and_states_of_step(
    optimizer: Any, step: Callable[[], Any], gradients: List[Optional[Tensor]], names: List[str],
    *, in_fp64: bool = False, relative_nudge: float = 0.0,
) -> Dict[str, Named]:  # fmt: skip
    """Take a step of an optimizer from given gradients, return updates and state, and restore everything."""
    params = [one for group in optimizer.param_groups for one in group["params"]]
    noise = torch.Generator().manual_seed(0)

    def widen(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        if not in_fp64 or not is_floating_tensor(tensor):
            return tensor
        return _nudged_tensor(tensor.double(), relative_nudge, noise)

    updates: Named = {}
    state: Named = {}
    with _optimizer_restored(optimizer, params):
        for param, gradient in zip(params, gradients):
            data = param.data
            param.grad = None
            param.data = widen(data)
            param.grad = None if gradient is None else widen(gradient.to(data.device))
            if param in optimizer.state:
                entry = optimizer.state[param] = dict(optimizer.state[param])
                for key, one in entry.items():
                    if isinstance(one, Tensor):
                        entry[key] = widen(one) if _is_moment_of(param, one) else one.clone()
        before = [param.data.clone() for param in params]
        with _context_keeping_fp64() if in_fp64 else contextlib.nullcontext():
            step()
        for name, param, first in zip(names, params, before):
            updates[name] = param.data.double() - first.double()
            for key, one in optimizer.state.get(param, {}).items():
                if _is_moment_of(param, one):
                    state["%s of %s" % (key, name)] = one.detach().clone()
    return {"update": updates, "state": state}


def _is_moment_of(param: Tensor, value: Any) -> bool:
    """Return whether a value in the state of an optimizer has a number for each of the parameter."""
    return isinstance(value, Tensor) and bool(value.dim()) and value.shape == param.shape


@contextlib.contextmanager
def _optimizer_restored(optimizer: Any, params: List[Any]) -> Iterator[None]:
    """Restore weights, gradients, state and options of an optimizer behind a block."""
    held = [
        (one, one.data, one.grad, dict(optimizer.state[one]) if one in optimizer.state else None)
        for one in params
    ]
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        for param, data, gradient, kept in held:
            param.grad = None
            param.data = data
            param.grad = gradient
            optimizer.state.pop(param, None)
            if kept is not None:
                optimizer.state[param] = kept
        for group, options in zip(optimizer.param_groups, groups):
            group.update(options)


# Watching a script.


class StepFollower:
    """Follows the steps of the script of this process; `install` until `stop_following`.

    A step begins at the first call of a module that is trained, and ends where an optimizer steps.
    """

    def __init__(self, step: int) -> None:
        self.target, self.step = step, 0
        self.is_inside = self.is_started = self.is_over = self.has_trained = self.is_stepping = False
        self.depth = self.passes = 0  # calls and backward passes that are running
        self.tops: List[nn.Module] = []
        self.optimizers: List[Any] = []
        self.batches: List[Any] = []
        self.names: Dict[int, str] = {}
        self.top_names: Dict[str, str] = {}  # of the module that the script calls, by the name of one in it
        self._undo: List[Tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Watch from now on."""
        self._wrap_function(nn.Module, "__call__", self._call_module)
        self._wrap_function(torch.optim.Optimizer, "__init__", self._follow_new_optimizer)
        loader = torch.utils.data.dataloader._BaseDataLoaderIter
        self._wrap_function(loader, "__next__", self._get_next_batch)
        self._wrap_function(torch.autograd, "backward", self._backward)

    def stop_following(self) -> None:
        """Watch no longer."""
        while self._undo:
            owner, name, inner = self._undo.pop()
            setattr(owner, name, inner)

    def _wrap_function(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)
        self._undo.append((owner, name, inner))

        @functools.wraps(inner)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs)

        setattr(owner, name, replacement)

    def _follow_new_optimizer(self, inner: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        kind = type(optimizer)
        # Before it is made: an arm keeps the step that it finds then, and calls that.
        if not vars(kind).get("_watched_step") and callable(getattr(optimizer, "step", None)):
            kind._watched_step = True
            self._undo.append((kind, "_watched_step", False))
            self._wrap_function(kind, "step", self._step)
        inner(optimizer, *args, **kwargs)
        self.optimizers.append(optimizer)
        self.see_new_optimizer(optimizer)

    def _step(self, inner: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_over or self.is_stepping:
            return inner(optimizer, *args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (), {"closure": lambda: loss}
        self.is_stepping = True
        try:
            if self.is_started:
                self.end_step(optimizer, functools.partial(inner, optimizer, *args, **kwargs))
            return inner(optimizer, *args, **kwargs)
        finally:
            self.is_stepping = False
            self.step += 1
            self.batches = []

    def _get_next_batch(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        return self.keep_or_replace_batch(inner(*args, **kwargs))

    def _is_training_call(self, module: nn.Module) -> bool:
        if not torch.is_grad_enabled():
            return False
        if module.training:
            self.has_trained = True
        return module.training or not self.has_trained

    def _call_module(self, inner: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", bool)
        if self.is_over and not is_compiling():
            self.before_call_after_step()
        if (
            self.is_inside
            or self.is_over
            or self.step < self.target
            or is_compiling()
            or not torch.is_grad_enabled()
        ):
            return inner(module, *args, **kwargs)
        if self.depth == 0:
            if not self._is_training_call(module) or (
                not self.is_started and next(module.parameters(), None) is None
            ):
                return inner(module, *args, **kwargs)
            args, kwargs = self._enter_top_module(module, args, kwargs)
        self.depth += 1
        try:
            return self.call_named_module(inner, module, args, kwargs)
        finally:
            self.depth -= 1

    def _enter_top_module(self, module: nn.Module, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        self.is_inside = True
        try:
            with torch.no_grad():
                if not self.is_started:
                    self.is_started = True
                    self.start_step()
                if not any(module is one for one in self.tops):
                    self._name_modules(module)
                    self.tops.append(module)
                    self.before_first_call_of_model(module, len(self.tops) - 1)
                return self.keep_or_replace_model_inputs(module, args, kwargs)
        finally:
            self.is_inside = False

    def _name_modules(self, top: nn.Module) -> None:
        """Name the modules of one that the script calls: the first one's as in its state, others' behind its class."""
        kind = type(top).__name__
        same = sum(type(one).__name__ == kind for one in self.tops)
        own = kind if not same else "%s %d" % (kind, same + 1)
        for name, module in top.named_modules():
            inner = name if not self.tops else "%s.%s" % (own, name)
            self.names.setdefault(id(module), inner if name else own)
            self.top_names.setdefault(self.names[id(module)], own)

    def _backward(self, inner: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_started and not self.is_over:
            self.see_loss(tensors if isinstance(tensors, Tensor) else next(iter(tensors)))
        if self.is_over and not self.passes:
            self.before_next_backward()
        self.passes += 1
        try:
            return inner(tensors, *args, **kwargs)
        finally:
            self.passes -= 1

    def names_of_parameters(self, optimizer: Any) -> List[str]:
        """Return the names of what an optimizer trains."""
        known: Dict[int, str] = {}
        for number, top in enumerate(self.tops):
            for name, one in top.named_parameters():
                known.setdefault(id(one), name if not number else "%s.%s" % (self.names[id(top)], name))
        params = [one for group in optimizer.param_groups for one in group["params"]]
        return [known.get(id(one), "parameter %d" % (number + 1)) for number, one in enumerate(params)]

    # What a kind of watch does.

    def keep_or_replace_batch(self, batch: Any) -> Any:
        """Return the batch that the script gets from its loader: here the loader's own."""
        return batch

    def see_new_optimizer(self, optimizer: Any) -> None: ...

    def start_step(self) -> None: ...

    def before_first_call_of_model(self, module: nn.Module, number: int) -> None: ...

    def keep_or_replace_model_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Return the inputs (args, kwargs) that a call of a model gets: here the script's own."""
        return args, kwargs

    def call_named_module(self, inner: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return inner(module, *args, **kwargs)

    def see_loss(self, loss: Tensor) -> None: ...

    def end_step(self, optimizer: Any, step: Callable[[], Any]) -> None: ...

    def before_call_after_step(self) -> None: ...

    def before_next_backward(self) -> None: ...


class StepKeeper(StepFollower):
    """Keeps a step in a file.

    Attributes:
        fault: why there is none; "" if there is.
    """

    def __init__(self, path: str, step: int, facts: Optional[Dict[str, Any]] = None) -> None:
        super().__init__(step)
        self.path = path
        self.fault = "the script made no step %d" % step
        self.size = 0
        self.capsule: Dict[str, Any] = {"format": FORMAT, "schema": SCHEMA, "step": step, **(facts or {})}

    def keep_or_replace_batch(self, batch: Any) -> Any:
        """Return the loader's batch, and keep it for the capsule."""
        if not self.is_over and is_storable(batch):
            self.batches.append(with_tensors_changed(copy_to_cpu, batch))
        return batch

    def start_step(self) -> None:
        self.capsule.update(
            torch=str(torch.__version__), models=[], calls=[], generators=all_generator_states(),
            optimizers=[_optimizer_as_plain_data(one) for one in self.optimizers],
        )  # fmt: skip

    def before_first_call_of_model(self, module: nn.Module, number: int) -> None:
        self.capsule["models"].append({
            "kind": type(module).__name__,
            "weights": {name: copy_to_cpu(one) for name, one in module.named_parameters()},
            "buffers": {name: copy_to_cpu(one) for name, one in module.named_buffers()},
        })  # fmt: skip

    def keep_or_replace_model_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Return the script's inputs, and keep copies of them for the capsule."""
        number = next(number for number, one in enumerate(self.tops) if one is module)
        given = [
            with_tensors_changed(copy_to_cpu, one) if is_storable(one) else None for one in (args, kwargs)
        ]
        derived = any(one.requires_grad for one in tensors_in((args, kwargs)))  # of other modules
        self.capsule["calls"].append({"model": number, "args": None if derived else given[0],
                                      "kwargs": None if derived else given[1]})  # fmt: skip
        return args, kwargs

    def end_step(self, optimizer: Any, step: Callable[[], Any]) -> None:
        self.is_over = True
        self.capsule["batches"] = self.batches
        size = sum(one.numel() * one.element_size() for one in tensors_in(self.capsule))
        if size > MAX_BYTES:
            self.fault = "step %d needs %.0f MB of weights, optimizer state and batch, more than %.0f MB" % (
                self.target, size / 1e6, MAX_BYTES / 1e6,
            )  # fmt: skip
            return
        part = "%s.part" % self.path
        torch.save(self.capsule, part)
        os.replace(part, self.path)
        self.fault, self.size = "", size


def _optimizer_as_plain_data(optimizer: Any) -> Dict[str, Any]:
    params = [one for group in optimizer.param_groups for one in group["params"]]
    return {
        "kind": type(optimizer).__name__,
        "groups": [{key: one for key, one in group.items() if key != "params" and is_storable(one)}
                   for group in optimizer.param_groups],
        "state": [{key: with_tensors_changed(copy_to_cpu, one) for key, one in optimizer.state.get(param, {}).items()
                   if is_storable(one)} for param in params],
    }  # fmt: skip


class StepPrecision:
    """What computes in the place of the script's own precision; a subclass knows how.

    Attributes:
        half: the 16-bit type that it computes in; None if there is none.
    """

    half: Optional[torch.dtype] = None

    def why_not_judged(self) -> str:
        """Return why the step of this script cannot be judged under it; "" if it can."""
        return ""

    def casts_without_autocast_now(self) -> bool:
        """Return whether it casts at present, in another way than by autocast."""
        return False

    def block_with_casts(self, on: bool) -> Any:
        """Return a context in which it casts so, or does not."""
        return contextlib.nullcontext()


class StepReplay(StepFollower):
    """Repeats the step of a capsule.

    Args:
        answers: of `base`, which judges first and makes them; None there.
        compiled: the backend of torch.compile for the models that the script calls; None for none.
        arm: what computes in the place of the script's own precision; None for that.
        goes_on: whether the script goes on to the next backward pass, where gradients of the step may be left. It may
            write files until then.
    """

    def __init__(
        self, capsule: Dict[str, Any], answers: Optional[Dict[str, Any]], compiled: Optional[str] = None,
        arm: Optional[StepPrecision] = None, *, goes_on: bool = False,
    ) -> None:  # fmt: skip
        # With the batches of a loader the first step of the script is as good as any other.
        super().__init__(0 if capsule["batches"] else capsule["step"])
        self.capsule = capsule
        self.known = answers
        self.compiled = compiled
        self.arm = arm
        self.goes_on = goes_on
        self.params: List[Tensor] = []  # of the optimizer whose step was judged
        self.scale, self.is_skipped = 1.0, False  # of the loss, by the arm; whether it has skipped the step
        self.calls: Dict[Tuple[str, int], RecordedModuleCall] = {}
        self.modules: Dict[str, nn.Module] = {}
        self.counts: Dict[str, int] = {}
        self.entered = self.loaded = 0
        # Of each call of a model, whether the script gives it the inputs of the capsule.
        self.fits: List[bool] = []
        self.losses: List[float] = []  # of the backward passes, without those inside of one
        self.loss_gradients: Dict[str, Tensor] = {}
        self.groups: List[Any] = []
        self.rows: Rows = []
        self.answers: Dict[str, Any] = {}
        self.notes: List[str] = []
        self.is_judged = self.draws_otherwise = False

    def keep_or_replace_batch(self, batch: Any) -> Any:
        """Return the batch of the capsule in the place of the loader's, if it has one of the same shapes."""
        kept = self.capsule["batches"]
        if self.is_over or not kept:
            return batch
        number = min(self.loaded, len(kept) - 1)
        self.loaded += 1
        if type(batch) is not type(kept[number]) or not have_equal_shapes_and_types(batch, kept[number]):
            return batch
        return with_tensors_changed(lambda one: one.clone(), kept[number])

    def _refuse_unfit_arm(self) -> None:
        why = self.arm.why_not_judged() if self.arm is not None else ""
        if why:
            raise StepRefused(why)

    def start_step(self) -> None:
        self._refuse_unfit_arm()
        restore_all_generators(self.capsule["generators"])
        kept = self.capsule["optimizers"]
        self.groups = [_optimizer_as_plain_data(one)["groups"] for one in self.optimizers]
        before = self.groups if self.known is None else self.known["groups"]
        for number, (optimizer, state) in enumerate(zip(self.optimizers, kept)):
            params = [one for group in optimizer.param_groups for one in group["params"]]
            for param, held in zip(params, state["state"]):
                if held:  # what the capsule does not have, as of another optimizer, stays the script's own
                    entry = optimizer.state.setdefault(param, {})
                    for key, one in held.items():
                        if isinstance(one, Tensor):  # a count of steps stays where it was
                            one = one.clone().to(param.device) if one.dim() else one.clone()
                            if key == "step" and VERSION < (1, 12):  # whose optimizers count by a number
                                one = int(one)
                        entry[key] = one
            # What a schedule has changed up to the step; what another script sets otherwise stays so.
            for place, (group, values) in enumerate(zip(optimizer.param_groups, state["groups"])):
                first = before[number][place] if number < len(before) and place < len(before[number]) else {}
                for key, value in values.items():
                    if key in group and key in first and group[key] == first[key]:
                        group[key] = value

    def before_first_call_of_model(self, module: nn.Module, number: int) -> None:
        for _, each in module.named_modules():
            self.modules.setdefault(self.names[id(each)], each)
        if number >= len(self.capsule["models"]):
            return
        kept = self.capsule["models"][number]
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        names = {**kept["weights"], **kept["buffers"]}
        alone = sorted(set(own) - set(names))
        if alone:
            self.notes.append("the capsule has no %s, as where weights are no longer tied: the script's own stay" % (
                ", ".join(alone[:8]),))  # fmt: skip
        for name, one in names.items():
            if name not in own:
                raise StepRefused(
                    "the capsule has %s, and the %s of the script has not" % (name, type(module).__name__)
                )
            if own[name].shape != one.shape:
                raise StepRefused("%s is %s in the capsule, and %s in the script" % (
                    name, list(one.shape), list(own[name].shape)))  # fmt: skip
            own[name].data.copy_(one)

    def keep_or_replace_model_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Return the inputs that the capsule has for this call, in the place of the script's; refuse other shapes."""
        calls = self.capsule["calls"]
        if self.entered < len(calls):
            kept = calls[self.entered]
            device = next((one.device for one in module.parameters()), torch.device("cpu"))
            for now, then in ((args, kept["args"]), (kwargs, kept["kwargs"])):
                if then is not None and not have_equal_shapes_and_types(now, then):
                    shapes = [[list(one.shape) for one in tensors_in(side)] for side in (now, then)]
                    raise StepRefused(
                        "the script gives its model other inputs than in the capsule: %s, not %s"
                        % tuple(shapes)
                    )
            self._judge_inputs((args, kwargs), (kept["args"], kept["kwargs"]))
            if kept["args"] is not None:
                args = with_tensors_changed(lambda one: one.clone().to(device), kept["args"])
            if kept["kwargs"] is not None:
                kwargs = with_tensors_changed(lambda one: one.clone().to(device), kept["kwargs"])
        self.entered += 1
        return args, kwargs

    def _judge_inputs(self, given: Any, kept: Any) -> None:
        """Judge what the script gives a model, where it gives that of the capsule as it is; else it has no seed."""
        pairs = [
            pair
            for now, then in zip(given, kept)
            if then is not None
            for pair in zip(tensors_in(now), tensors_in(then))
        ]
        if self.known is None:
            self.fits.append(all(torch.equal(now.cpu(), then) for now, then in pairs))
            if not self.fits[-1] and not self.capsule["batches"]:
                self.notes.append(
                    "the script has another batch at this step; seed it, so that targets fit too"
                )
        elif self.entered < len(self.known["fits"]) and self.known["fits"][self.entered]:
            entries = {
                "input %d" % number: {"error": _distance_of_inputs(*pair), "moved": 0.0, "unit": 2.0**-24}
                for number, pair in enumerate(pairs, 1)
            }
            self.rows.append({"module": BATCH, "kind": "", "call": self.entered, "parts": {"fwd": entries}})

    def call_named_module(self, inner: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self.names.get(id(module))
        if name is None:  # made in a forward pass
            return inner(module, *args, **kwargs)
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        if not (is_storable(args) and is_storable(kwargs)):
            if self.known is None:
                self.notes.append("%s is not judged: its inputs are no tensors" % name)
            return inner(module, *args, **kwargs)
        is_base = self.known is None
        given = (args, kwargs) if not is_base else with_tensors_changed(copy_to_cpu, (args, kwargs))
        needs = [one.requires_grad for one in tensors_in((args, kwargs))]
        call = self.calls[name, number] = RecordedModuleCall(name, number, given[0], given[1], needs)
        call.training = module.training
        with self._call_noted_inside_arm(module, call):
            result = inner(module, *args, **kwargs)
        outputs = tensors_in(result)
        is_top = self.depth == 1 and next(module.parameters(), None) is not None
        if not is_base:
            call.args = call.kwargs = None
            known = self.known["calls"].get("%s#%d" % (name, number)) if self.known is not None else None
            if is_top and known is not None and have_equal_shapes_and_types(result, known["output"]):
                given_out = iter(tensors_in(known["output"]))
                result = with_tensors_changed(
                    lambda one: _with_value_replaced(one, next(given_out).to(one.device)), result
                )
                outputs = tensors_in(result)
        elif is_top:
            call.output = [copy_to_cpu(one) for one in outputs]
        call.gradients = [None] * len(outputs)
        for place, output in enumerate(outputs):
            if output.requires_grad and (is_base or is_top):
                output.register_hook(functools.partial(self._keep_output_gradient, call, place, is_top))
        return result

    @contextlib.contextmanager
    def _call_noted_inside_arm(self, module: nn.Module, call: RecordedModuleCall) -> Iterator[None]:
        """Note how a module computes, and in which types it gets its inputs, inside of what an arm does around it."""
        if self.arm is None:
            yield
            return
        arm = self.arm

        def note(_: Any, args: Any, kwargs: Any) -> None:
            call.autocast, call.is_cast = autocast_types_by_device(), arm.casts_without_autocast_now()
            call.types = [one.dtype for one in tensors_in((args, kwargs))]

        hook = module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def see_new_optimizer(self, optimizer: Any) -> None:
        if self.arm is None:
            return
        step = optimizer.step

        @functools.wraps(step)
        def step_or_skip(_: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.step
            result = step(*args, **kwargs)
            if self.step == before and not self.is_over:  # it did not come to the step itself
                if self.is_started:
                    self.is_skipped = True
                    self.end_step(optimizer, functools.partial(type(optimizer).step, optimizer))
                self.step, self.batches = self.step + 1, []
            return result

        optimizer.step = types.MethodType(step_or_skip, optimizer)

    def _keep_output_gradient(
        self, call: RecordedModuleCall, place: int, is_top: bool, gradient: Tensor
    ) -> None:
        if not self.is_inside:
            call.gradients[place] = copy_to_cpu(gradient)
            if is_top:
                self.loss_gradients["%s#%d.%d" % (call.name, call.number, place)] = copy_to_cpu(gradient)

    def see_loss(self, loss: Tensor) -> None:
        if not self.passes and loss.numel() == 1:
            self.losses.append(float(loss.detach()))
        if self.arm is not None and loss.numel() == 1 and loss.grad_fn is not None:
            loss.grad_fn.register_hook(self._note_loss_scale)

    def _note_loss_scale(self, _: Any, gradients: Any) -> None:
        self.scale = float(gradients[0])

    def end_step(self, optimizer: Any, step: Callable[[], Any]) -> None:
        self.is_over = self.is_inside = True
        self._refuse_unfit_arm()
        if getattr(optimizer, "grad_scale", None) is not None:
            self._unscale_for_fused_step(optimizer)
        if self.is_skipped:
            self.notes.append("the step is skipped: at the loss scale %g gradients overflow" % self.scale)
        params = [one for group in optimizer.param_groups for one in group["params"]]
        gradients = [None if one.grad is None else copy_to_cpu(one.grad) for one in params]
        for number, top in enumerate(self.tops[: len(self.capsule["models"])]):
            own = dict(top.named_buffers())
            for name, one in self.capsule["models"][number]["buffers"].items():
                own[name].data.copy_(one)
        own_gradients = [param.grad for param in params]
        for param in params:
            param.grad = None
        self._judge_modules()
        self._judge_optimizer_update(optimizer, step, gradients)
        self._judge_loss_and_gradients(optimizer, gradients)
        if self.known is None:
            self.answers.update(
                fits=self.fits, groups=self.groups, losses=self.losses, loss_gradients=self.loss_gradients,
                gradients=gradients, optimizer=type(optimizer).__name__,
            )  # fmt: skip
        self.is_judged = True
        if not self.goes_on:
            raise StepJudged
        self.params = params
        for param, gradient in zip(params, own_gradients):
            param.grad = gradient

    def before_call_after_step(self) -> None:
        if self.is_judged and not torch.is_grad_enabled():  # an evaluation, which may take long
            raise StepJudged

    def before_next_backward(self) -> None:
        """Judge whether gradients of the step are left, to which those of the next one are added."""
        if not self.is_judged:
            return
        left = any(one.grad is not None and bool((one.grad != 0).any()) for one in self.params)
        if self.known is None:
            self.answers["left"] = left
        elif "left" in self.known:
            apart = math.inf if left != self.known["left"] else 0.0
            entry = {"error": apart, "moved": 0.0, "unit": 2.0**-24}
            self.rows.append({"module": GRADIENTS, "kind": "", "call": 1, "parts": {"wgrad": {LEFT: entry}}})
        raise StepJudged

    def _unscale_for_fused_step(self, optimizer: Any) -> None:
        """Do what a fused optimizer would do in its step, to which a scaler leaves it."""
        self.is_skipped = bool(getattr(optimizer, "found_inf", None))
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = param.grad / float(optimizer.grad_scale)
        optimizer.grad_scale = optimizer.found_inf = None

    def _judge_modules(self) -> None:
        calls = (
            {"%s#%d" % key: call.as_plain_data() for key, call in self.calls.items()}
            if self.known is None
            else {}
        )
        tops = {id(one) for one in self.tops}
        gets_masks = self._replays_base_dropout()
        if self.known is None:
            self.answers.update(calls=calls, exact={}, masks={})
        for key, call in (calls if self.known is None else self.known["calls"]).items():
            module = self.modules.get(call["name"])
            if module is None:
                self.notes.append("the script has no module %s" % call["name"])
            elif self.compiled is None or id(module) in tops:
                row: Dict[str, Any] = {
                    "module": call["name"],
                    "kind": type(module).__name__,
                    "call": call["number"],
                    "top": self.top_names[call["name"]],
                }
                row.update(self._judge_module(module, key, call, gets_masks=gets_masks))
                self.rows.append(row)
        if self.known is None:
            self.answers["drawn"] = seeded_dropout_mask()

    def _judge_module(
        self, module: nn.Module, key: str, call: Dict[str, Any], *, gets_masks: bool
    ) -> Dict[str, Any]:
        """Return the errors of a call of a module and of its operations, or "why" there are none.

        The base keeps its answers in fp64, and the masks of dropout that it drew.
        """
        run = None if self.compiled is None else torch.compile(module, backend=self.compiled)
        known = None if self.known is None else self.known["exact"].get(key)
        drawn_by_base = [] if self.known is None else self.known["masks"].get(key) or []
        masks = drawn_by_base if gets_masks and self.known is not None else None
        if drawn_by_base and TorchFunctionMode is object:
            return {"why": "it has dropout, which replay repeats from torch 1.13 on"}
        try:
            native, exact, nudged, drawn, operations = self._own_fp64_and_nudged_results(
                module, call, run, masks
            )
            parts = errors_by_part_and_tensor(native, exact, nudged, known)
        except Exception as error:
            first_line = str(error).splitlines()[0] if str(error) else ""
            return {"why": "%s: %s" % (type(error).__name__, first_line)}
        if self.known is None:
            self.answers["exact"][key] = with_tensors_changed(copy_to_cpu, exact)
            self.answers["masks"][key] = drawn
        return {"parts": parts, "operations": operations}

    def _replays_base_dropout(self) -> bool:
        """Note whether other dropout is drawn here than for the base, and return whether modules get that of the base.

        Under an arm in 16 bits they do in any case: its masks are drawn in that type.
        """
        self.draws_otherwise = False
        if self.known is None:
            return False
        others = self.draws_otherwise = not torch.equal(seeded_dropout_mask(), self.known["drawn"])
        if others:
            self.notes.append(
                "this torch draws other dropout from the same generator; it gets that of the base"
            )
        if self.arm is None or self.arm.half is None:
            return others
        self.draws_otherwise = others or not torch.equal(
            seeded_dropout_mask(self.arm.half), self.known["drawn"]
        )
        return True

    def _own_fp64_and_nudged_results(
        self,
        module: nn.Module,
        call: Dict[str, Any],
        run: Optional[Callable[..., Any]],
        masks: Optional[List[Any]],
    ) -> Tuple[Dict[str, Named], Dict[str, Named], Dict[str, Named], List[Any], List[Dict[str, Any]]]:
        """Return the answers of a module as it computes, in fp64, and in fp64 from inputs that are off by a rounding.

        Behind them are the masks of dropout in fp64, and the rows of its operations.

        Args:
            module: is called by itself.
            call: what it was given in the step of the base.
            run: its compiled form; None for the module.
            masks: of dropout, which it gets; None to draw them.
        """
        own = self.calls.get((call["name"], call["number"]))
        autocast: Dict[str, Any] = {} if own is None else own.autocast
        kinds = None if own is None else own.types
        drawn: List[Any] = []
        operations: List[Any] = []
        exact_operations: List[Any] = []
        # What is compiled calls none that could be seen.
        noted = (operations, exact_operations) if run is None else (None, None)
        with self._modules_called_without_arm(own):
            native = outputs_and_gradients_of_call(
                module,
                call,
                autocast,
                called_instead=run,
                masks_to_replay=masks,
                input_types=kinds,
                scale=self.scale,
                operations=noted[0],
            )
        with self._modules_called_without_arm():
            exact = outputs_and_gradients_of_call(
                module, call, {}, in_fp64=True, drawn_masks=drawn, masks_to_replay=masks, operations=noted[1]
            )
            # A unit of what the module computes in, which its inputs may have more bits than.
            unit = max([torch.finfo(one.dtype).eps / 2 for one in native["fwd"].values()] or [2.0**-24])
            nudged = outputs_and_gradients_of_call(
                module, call, {}, in_fp64=True, relative_nudge=unit, masks_to_replay=masks
            )
        return native, exact, nudged, drawn, operation_error_rows(operations, exact_operations)

    @contextlib.contextmanager
    def _modules_called_without_arm(self, own: Optional[RecordedModuleCall] = None) -> Iterator[None]:
        """Call modules without what an arm does around them, and cast as it did in a call of the step."""
        if self.arm is None:
            yield
            return
        # the latter before torch 2.1
        plain: Any = getattr(nn.Module, "_wrapped_call_impl", nn.Module._call_impl)
        self._wrap_function(nn.Module, "__call__", lambda inner, *args, **kwargs: plain(*args, **kwargs))
        try:
            with self.arm.block_with_casts(own is not None and own.is_cast):
                yield
        finally:
            owner, name, inner = self._undo.pop()
            setattr(owner, name, inner)

    def _judge_optimizer_update(
        self, optimizer: Any, step: Callable[[], Any], gradients: List[Optional[Tensor]]
    ) -> None:
        kind = type(optimizer).__name__
        row: Dict[str, Any] = {"module": "(%s)" % kind, "kind": kind, "call": 0}
        known = None if self.known is None else self.known.get("update")
        names = self.names_of_parameters(optimizer)
        if self.known is not None:
            gradients = self.known["gradients"]
        params = [one for group in optimizer.param_groups for one in group["params"]]
        if self.known is not None and len(gradients) != len(params):
            row["why"] = "it has %d parameters, not %d" % (len(params), len(gradients))
            self.rows.append(row)
            return
        try:
            native = updates_and_states_of_step(optimizer, step, gradients, names)
            exact = updates_and_states_of_step(optimizer, step, gradients, names, in_fp64=True)
            nudged = updates_and_states_of_step(
                optimizer, step, gradients, names, in_fp64=True, relative_nudge=2.0**-24
            )
            row["parts"] = errors_by_part_and_tensor(native, exact, nudged, known)
            for name, param in zip(names, params):
                entry = row["parts"].get("update", {}).get(name)
                if entry is not None and name in exact["update"]:
                    entry["unit"] = torch.finfo(param.dtype).eps / 2
                    update = float(exact["update"][name].norm())
                    # A weight holds its update as a difference of numbers of the weight's size.
                    entry["rounding"] = (
                        entry["unit"] * float(param.detach().double().norm()) / update if update else 0
                    )
        except Exception as error:
            # a moment that the capsule's does not keep
            if isinstance(error, KeyError) and self.known is not None:
                entry = {"error": 0.0, "moved": 0.0, "unit": 2.0**-24, "same": math.inf}
                row["parts"] = {"update": {str(error): entry}}
            else:
                row["why"] = "%s: %s" % (
                    type(error).__name__,
                    str(error).splitlines()[0] if str(error) else "",
                )
        else:
            if self.known is None:
                self.answers["update"] = with_tensors_changed(copy_to_cpu, exact)
        self.rows.append(row)

    def _judge_loss_and_gradients(self, optimizer: Any, gradients: List[Optional[Tensor]]) -> None:
        """Judge what is in no module: the loss as a function of equal outputs, and what becomes of gradients."""
        if self.known is None:
            return
        unit = 2.0**-24
        parts: Dict[str, Dict[str, Entry]] = {"fwd": {}, "dgrad": {}}
        if self.losses and self.known["losses"]:
            apart = _relative_distance_of_losses(self.losses, self.known["losses"])
            parts["fwd"]["loss"] = {"error": apart, "moved": 0.0, "unit": unit}
        for name, one in self.known["loss_gradients"].items():
            now = self.loss_gradients.get(name)
            apart = math.inf if now is None else relative_distance(now, one)
            parts["dgrad"][name] = {"error": apart, "moved": 0.0, "unit": torch.finfo(one.dtype).eps / 2}
        self.rows.append({"module": LOSS, "kind": "", "call": 0, "parts": parts})
        one = [(a, b) for a, b in zip(gradients, self.known["gradients"]) if a is not None and b is not None]
        # With other dropout the gradients of the whole step are others.
        if (
            one
            and not (self.draws_otherwise or self.is_skipped)
            and len(gradients) == len(self.known["gradients"])
        ):
            now, then = (torch.cat([pair[side].double().flatten() for pair in one]) for side in (0, 1))
            missing = any((a is None) != (b is None) for a, b in zip(gradients, self.known["gradients"]))
            apart = math.inf if missing else relative_distance(now, then)
            self.rows.append({"module": GRADIENTS, "kind": "", "call": 0,
                              "parts": {"wgrad": {"all": {"error": apart, "moved": 0.0, "unit": unit}}}})  # fmt: skip


def _distance_of_inputs(one: Tensor, other: Tensor) -> float:
    """Return how far two inputs are apart; whole numbers and masks are equal, or any distance is too large."""
    if is_floating_tensor(other):
        return relative_distance(one, other)
    return 0.0 if torch.equal(one.cpu(), other) else math.inf


def _relative_distance_of_losses(one: List[float], other: List[float]) -> float:
    """Return how far the losses of a step are apart; of other backward passes their sums, by the size of all losses."""
    if len(one) == len(other):
        return relative_distance(torch.tensor(one), torch.tensor(other))
    apart, size = abs(sum(one) - sum(other)), sum(map(abs, other))
    if size > 0 and math.isfinite(apart):
        return apart / size
    return relative_distance(torch.tensor([sum(one)]), torch.tensor([sum(other)]))


def _with_value_replaced(tensor: Tensor, value: Tensor) -> Tensor:
    replaced: Any = _ValueReplaced
    return replaced.apply(tensor, value)  # type: ignore[no-any-return]


class _ValueReplaced(torch.autograd.Function):
    """Gives a tensor another value, and passes its gradient on."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


# Settings that a replay changes.


def change_setting(name: str, value: str) -> None:
    """Change a setting of this process.

    Args:
        name: one of `threads`, `onednn`, `deterministic`, `denormals`, `tf32`, `sdpa`, `compile`.
        value: as `replay --change NAME=VALUE` has it.

    Raises:
        StepRefused: there is no such setting, or it does nothing here.
    """
    if name == "threads":
        torch.set_num_threads(int(value))
    elif name == "onednn":
        torch._C._set_mkldnn_enabled(value == "on")
    elif name == "deterministic":
        torch.use_deterministic_algorithms(value == "on", warn_only=True)
    elif name == "denormals":
        if not torch.set_flush_denormal(value == "flushed"):
            raise StepRefused("this processor cannot flush denormals")
    elif name == "tf32":
        if not torch.cuda.is_available():
            raise StepRefused("TF32 needs a GPU, and there is none: nothing would change")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = value == "on"
    elif name == "sdpa":
        kinds = {"flash": "flash", "efficient": "mem_efficient", "math": "math", "cudnn": "cudnn"}
        for key, one in kinds.items():
            switch = getattr(torch.backends.cuda, "enable_%s_sdp" % one, None)
            if switch is not None:
                switch(key == value)
            elif key == value:
                raise StepRefused("torch %s has no attention backend %s" % (torch.__version__, value))
    elif name == "compile":
        if value == "inductor":
            # Else its kernels draw dropout by themselves, and every module with one is another.
            config = importlib.import_module("torch._inductor.config")
            config.fallback_random = True  # type: ignore[attr-defined]
    else:
        raise StepRefused("there is no setting %s" % name)


def run_script(words: List[str], is_module: bool) -> None:
    """Run a script as the interpreter would."""
    sys.argv = list(words)
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0])))
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = words[0]
    with open(words[0], "rb") as file:
        exec(compile(file.read(), words[0], "exec"), vars(main))


def read_capsule(path: str) -> Dict[str, Any]:
    """Read a capsule.

    Raises:
        StepRefused: the file is none.
    """
    try:
        # Older ones cannot read all plain data so; `ampcompare replay` has read the file before them.
        options = {"weights_only": True} if hasattr(torch, "get_autocast_dtype") else {}
        capsule: Dict[str, Any] = torch.load(path, map_location="cpu", **options)
        if capsule["format"] != FORMAT or capsule["schema"] != SCHEMA:
            raise StepRefused("%s is no capsule of this version" % path)
        return capsule
    except StepRefused:
        raise
    except Exception as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise StepRefused("cannot read the capsule %s: %s" % (path, text)) from None


def repeat_step(
    mode: str, capsule: str, answers: str, rows: str, changes: Dict[str, str], script: Callable[[], None],
    prepare: Callable[[], Optional[StepPrecision]] = lambda: None, goes_on: bool = False,
) -> None:  # fmt: skip
    """Repeat the step of a capsule and write rows, or why there are none; `prepare` makes the process ready first."""
    found: Dict[str, Any] = {"torch": str(torch.__version__), "python": "%d.%d.%d" % sys.version_info[:3]}
    watch = None
    try:
        arm = prepare()
        for name, value in changes.items():
            change_setting(name, value)
        known = torch.load(answers, map_location="cpu", **_torch_load_options()) if mode == "change" else None
        kept = read_capsule(capsule)
        seed_all_generators(kept.get("seed"))
        watch = StepReplay(kept, known, changes.get("compile"), arm, goes_on=goes_on)
        watch.install()
        script()
        found["fault"] = "the script ended before step %d" % watch.target
    except StepJudged:
        pass
    except StepRefused as error:
        found["fault"] = str(error)
    except SystemExit as error:
        found["fault"] = "the script ended before the step: exit code %s" % error.code
    except BaseException as error:
        found["fault"] = "%s: %s" % (type(error).__name__, error)
    finally:
        if watch is not None:
            watch.stop_following()
    if watch is not None and watch.is_judged:
        found.pop("fault", None)
        found.update(rows=watch.rows, notes=sorted(set(watch.notes)), losses=watch.losses)
        if mode == "base":
            torch.save(watch.answers, answers)
    with open(rows, "w") as file:
        json.dump(found, file)


def _torch_load_options() -> Dict[str, Any]:
    """Return the options of `torch.load` for a file that this program has written itself."""
    return {"weights_only": False} if "weights_only" in (torch.load.__doc__ or "") else {}


def main(
    words: List[str], prepare: Callable[[], Optional[StepPrecision]] = lambda: None, *, goes_on: bool = False
) -> int:
    """Do what the words say, in a process that `prepare` makes ready, and in which a script may go on behind a step."""
    mode, capsule, *rest = words
    count = 1 if mode == "keep" else 2
    own, rest = rest[:count], rest[count:]
    changes: Dict[str, str] = {}
    while mode == "change" and rest and "=" in rest[0] and not os.path.exists(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        changes[name] = value
    is_module, rest = rest[:1] == ["-m"], rest[rest[:1] == ["-m"] :]
    if mode != "keep":
        repeat_step(
            mode, capsule, own[0], own[1], changes, lambda: run_script(rest, is_module), prepare, goes_on
        )
        return 0
    keeper = StepKeeper(
        capsule, int(own[0]), {"script": rest[0], "arguments": rest[1:], "is_module": is_module}
    )
    keeper.install()
    try:
        run_script(rest, is_module)
    finally:
        if keeper.fault:
            sys.stderr.write("no capsule: %s\n" % keeper.fault)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
