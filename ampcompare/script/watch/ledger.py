"""The ledger of a script: in which types its training runs, and which of its lines set them."""

import functools
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ampcompare.base.location import Location, user_location
from ampcompare.base.patches import Layer, PatchPoints, Subscriptions, calling_frame
from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.base.tensors.tree import tensors_in_value
from ampcompare.base.tensors.type_names import HALF_NAMES
from ampcompare.results.records.ledger import Ledger
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.remarks.rounded_weights import RoundedWeightsWatch
from ampcompare.training.ledger import MAX_SHARE, StepTypeRecorder

DETAILED = 2  # steps that were applied, of each optimizer
MAX_DETAILED = 12  # rows of steps, skipped ones too
EVERY = 20  # later rows
MAX_SETTERS = 3  # that are named of one part
CASTS = ("to", "half", "bfloat16", "type")  # methods of a module that models of libraries override


class ScriptLedgerWatch:
    """Looks at some steps of this process; when the record ends it adds the row `{"kind": "ledger", ...}`.

    Args:
        rows: say where a step ends.
        arm: its text, which sets what no line of the script does; "" for a script as it is written.
        emulated: type whose products this device computes in a wider one; "" if there is none.
        masters: returns the weights of models in whose place the arm has given an optimizer others, with those.
    """

    def __init__(
        self,
        rows: RecordedSteps,
        arm: str,
        emulated: str = "",
        masters: Callable[[Any], Sequence[tuple[Tensor, Tensor]]] = lambda optimizer: (),
    ) -> None:
        self._rows = rows
        self._arm = arm
        self._emulated = emulated
        self._look = StepTypeRecorder(self._parameters_of_models, masters)
        self._events = Subscriptions(Layer.WATCH)
        self._setters = Subscriptions(Layer.WATCH)  # until the first steps are over
        self._passes_of_step = Subscriptions(Layer.WATCH)  # while a step is looked at
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._by: dict[str, str] = {}
        self._set_by: Any = WeakIdKeyDictionary()  # of 16-bit weights
        self._made_at: Any = WeakIdKeyDictionary()  # of optimizers
        self._default_at: Location | None = None  # that sets a 16-bit default type
        self._references: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}  # by the id of a module
        self._count = self._applied = self._passes = self._depth = 0
        self._scale: Any = None
        # a program that was called in the steps, or in this one
        self._has_compiled = self._is_pass_compiled = False
        self._follows = False
        self._begins = False
        self._is_stepped = False
        self._is_first = True
        self._spent = self._begun_at = self._stepped_at = self._since = 0.0

    def install(self) -> None:
        """Look from now on."""
        self._events.wrap(*PatchPoints.MAKE_OPTIMIZER, self._note_optimizer_made)
        self._setters.wrap(nn.Module, "_apply", self._note_line_that_cast_weights)
        self._setters.wrap(nn.Module, "register_parameter", self._note_line_that_made_half_weight)
        self._setters.wrap(torch, "set_default_dtype", self._note_default_type_set)
        self._setters.wrap(*PatchPoints.MAKE_AUTOCAST, self._note_autocast_made)
        self._setters.wrap(*PatchPoints.MAKE_SCALER, self._note_scaler_made)
        self._events.wrap(torch, "compile", self._compile)
        self._follow_passes()
        self._events.call_at_end(register_optimizer_step_post_hook(self._reset_pass_count).remove)
        self._rows.recorder.call_after_each_row(self._end_watched_step_at_row)
        self._rows.recorder.call_before_close(self._end_with_row)

    def end(self) -> None:
        """Look no longer."""
        if self._begins:
            if not self._is_stepped:
                self._look.note_types_held_after_step(self._live_optimizers())
            self._finish_watched_step()
        for subscriptions in (self._passes_of_step, self._setters, self._events):
            subscriptions.end()

    def _follow_passes(self) -> None:
        self._follows = True
        self._passes_of_step = Subscriptions(Layer.WATCH)
        self._passes_of_step.wrap(*PatchPoints.FORWARD, self._forward)
        self._passes_of_step.wrap(*PatchPoints.BACKWARD, self._backward)

    # Who sets what.

    def _note_optimizer_made(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.append(weakref.ref(optimizer))
        self._references.clear()
        line = user_location()
        self._made_at[optimizer] = f"{type(optimizer).__name__}, {line}"
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.dtype in HALF_DTYPES and param not in self._set_by:  # by assigning its data, say
                self._set_by[param] = f"before {line}"

    def _note_line_that_cast_weights(
        self, original: Any, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """Note who casts parameters of a module to 16 bits: the arm, or the line of a script or library."""
        before = {name: param.dtype for name, param in module._parameters.items() if param is not None}
        result = original(module, *args, **kwargs)
        setter = ""
        for name, dtype in before.items():
            param = module._parameters[name]
            if param is None or param.dtype is dtype:
                continue
            self._set_by.pop(param, None)
            if param.dtype in HALF_DTYPES:
                setter = setter or self._text_on_who_sets_types(
                    "cast", is_arms=bool(self._arm) and _is_called_for_arm()
                )
                self._set_by[param] = setter
        return result

    def _note_line_that_made_half_weight(
        self, original: Any, module: nn.Module, name: str, param: Any
    ) -> None:
        """Note the script's line at which a module registers a 16-bit parameter."""
        original(module, name, param)
        if param is not None and param.dtype in HALF_DTYPES and param not in self._set_by:
            self._set_by[param] = (
                f"{user_location(_frame_making_module_or_none())}, {self._way_to_half_weight(param)}"
            )

    def _way_to_half_weight(self, param: Tensor) -> str:
        """Return how a line has given a module a 16-bit weight."""
        if _is_loading_state():  # with `assign=True`, which takes the tensors of a checkpoint as they are
            return "loaded so"
        if param.dtype is torch.get_default_dtype() and self._default_at is not None:
            return f"made so by set_default_dtype, {self._default_at}"
        return "made so"

    def _note_default_type_set(self, original: Any, dtype: Any) -> None:
        original(dtype)
        where = user_location()
        # a library sets it for the models that it makes, at the line that makes one
        is_own = where.caller is None
        self._default_at = where if is_own and torch.get_default_dtype() in HALF_DTYPES else None

    def _note_autocast_made(self, original: Any, block: Any, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        if block._enabled and "products" not in self._by:
            self._by["products"] = self._text_on_who_sets_types("autocast", is_arms=bool(self._arm))

    def _note_scaler_made(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler._enabled and "loss scale" not in self._by:
            self._by["loss scale"] = self._text_on_who_sets_types(
                type(scaler).__name__, is_arms=bool(self._arm)
            )

    def _text_on_who_sets_types(self, what: str, *, is_arms: bool) -> str:
        """Return who calls: the arm, or the script's or a library's line."""
        where = user_location()
        return f"{what}, arm {self._arm}" if is_arms or where == Location("?", 0) else f"{what}, {where}"

    def _compile(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        program = original(*args, **kwargs)
        if isinstance(program, nn.Module | type) or not hasattr(program, "_torchdynamo_orig_callable"):
            return program  # a module, whose calls are seen, or a decorator, which comes here again

        @functools.wraps(program)
        def compiled_program(*values: Any, **named: Any) -> Any:
            return self._note_and_run_compiled_program(program, *values, **named)

        return compiled_program

    def _note_and_run_compiled_program(self, program: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a compiled program, whose operations torch does not dispatch."""
        if not self._depth or torch.compiler.is_compiling():
            return program(*args, **kwargs)
        self._has_compiled = self._is_pass_compiled = True
        with self._look.operations_unseen_in_block():
            return program(*args, **kwargs)

    # The steps that are looked at.

    def _parameters_of_models(self) -> list[Tensor]:
        models = [model for reference in self._models if (model := reference()) is not None]
        return list({id(p): p for model in models for p in model.parameters()}.values())

    def _live_optimizers(self) -> list[Any]:
        return [one for reference in self._optimizers if (one := reference()) is not None]

    def _is_frozen_model(self, module: nn.Module) -> bool:
        """Return whether a module has weights, and none that an optimizer updates, as a teacher has."""
        known = self._references.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        weights = list(module.parameters())
        held = {
            id(param)
            for one in self._live_optimizers()
            for group in one.param_groups
            for param in group["params"]
        }
        held |= {id(weight) for one in self._live_optimizers() for weight, _ in self._look.masters(one)}
        found = bool(held and weights) and not any(
            id(one) in held or self._look.is_trained_weight(one) for one in weights
        )
        self._references[id(module)] = weakref.ref(module), found
        return found

    def _forward(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._depth:
            if type(module).__name__ == "OptimizedModule":
                return self._note_and_run_compiled_program(original, module, *args, **kwargs)
            return original(module, *args, **kwargs)
        if not torch.is_grad_enabled() and not self._is_frozen_model(module):
            return original(module, *args, **kwargs)
        is_new = all(module is not reference() for reference in self._models)
        if is_new and next(module.parameters(), None) is not None:
            self._models.append(weakref.ref(module))
        if self._is_stepped:
            self._finish_watched_step()
        if not self._follows:
            return original(module, *args, **kwargs)
        self._begin_watched_step()
        return self._watch_inside_call(original, module, *args, **kwargs)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._depth:
            return original(*args, **kwargs)
        if self._passes:
            for tensor in tensors_in_value(args[0] if args else kwargs.get("tensors")):
                if tensor.requires_grad:  # where the pass begins, an arm has collected what was there
                    tensor.register_hook(lambda _: self._look.note_accumulated_gradients())
        self._passes += 1
        if self._is_pass_compiled:  # so is its backward pass, of which no part is known apart
            return original(*args, **kwargs)
        return self._watch_inside_call(original, *args, **kwargs)

    def _watch_inside_call(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            if isinstance(args[0], nn.Module) and type(args[0]).__name__ == "OptimizedModule":
                return self._note_and_run_compiled_program(original, *args, **kwargs)
            with self._look.operations_observed_in_block():
                return original(*args, **kwargs)
        finally:
            self._depth -= 1

    def _begin_watched_step(self) -> None:
        if not self._begins:
            self._begins, self._is_pass_compiled = True, False
            self._begun_at = time.perf_counter()
            self._look.begin(self._count, self._live_optimizers(), detailed=True)

    def _reset_pass_count(self, *_: Any) -> None:
        # where an arm knows only later whether it was applied, the row comes after the next pass
        self._passes = 0

    def _end_watched_step_at_row(self, row: dict[str, Any]) -> None:
        """Count the step of a row, end the look at it, and begin the next where one is due."""
        if row["kind"] == "backward" and row["scale_before"] is not None:
            self._scale = row["scale_before"]
        if row["kind"] != "step":
            return
        self._count += 1
        self._passes = 0
        if self._begins:
            applied = row["applied"]
            self._look.note_outcome(applied if callable(applied) else lambda: bool(applied))
        self._applied += bool(row["applied"])  # one that is not known yet counts as applied
        if self._begins:  # until the next forward pass, as another optimizer may step
            self._look.note_types_held_after_step(self._live_optimizers())
            self._is_stepped, self._stepped_at = True, time.perf_counter()
        elif self._count % EVERY == 0 and self._spent <= MAX_SHARE * (time.perf_counter() - self._since):
            self._follow_passes()

    def _finish_watched_step(self) -> None:
        self._begins = self._is_stepped = False
        self._look.close()
        count = max(1, len(self._rows.optimizers))
        if self._is_first and self._applied < DETAILED * count and self._count < MAX_DETAILED * count:
            return
        if self._is_first:
            self._is_first, self._since = False, self._stepped_at
            self._setters.end()
        else:
            self._spent += self._stepped_at - self._begun_at
        self._follows = False
        self._passes_of_step.end()

    def end_and_find_ledger(self) -> Ledger | None:
        """Look no longer, and return what was seen; None if no step was looked at."""
        self.end()
        if not self._look.steps:
            return None
        scale = self._scale() if callable(self._scale) else self._scale
        ledger = self._look.read_ledger_from_device(
            loss_scale=None if scale is None else float(scale),
            emulated=self._emulated,
            unseen="torch.compile" if self._has_compiled else "",
        )
        weights, frozen = (self._look.trained_or_frozen_weights(trained=trained) for trained in (True, False))
        by = dict(self._by)
        if self._arm and set(HALF_NAMES) & ledger.types_of_groups("weights").keys():
            by["weights"] = f"cast, arm {self._arm}"  # one that casts none lifts those of the script
        elif setters := self._text_on_who_set_types_of_weights(weights):
            data = "" if self._default_at is None else ", its data is not"
            by["weights"] = f"{setters}, lifted by arm {self._arm}{data}" if self._arm else setters
        if setters := self._text_on_who_set_types_of_weights(
            one for one in frozen if one.dtype in HALF_DTYPES
        ):
            by["frozen"] = setters
        made = [
            self._made_at[one]
            for one in self._look.optimizers_with_gradients() or self._live_optimizers()
            if one in self._made_at
        ]
        if made:
            by["state"] = _texts_on_setters_joined(made)
        return ledger.model_copy(update={"by": by})

    def _text_on_who_set_types_of_weights(self, weights: Iterable[Tensor]) -> str:
        """Return who set the types of weights, the setter of most elements first; "" if nothing is known."""
        counts: Counter[str] = Counter()
        for weight in weights:
            if (self._arm or weight.dtype in HALF_DTYPES) and (
                setter := self._set_by.get(weight)
            ) is not None:
                counts[setter] += weight.numel()
        return _texts_on_setters_joined([setter for setter, _ in counts.most_common()])

    def _end_with_row(self) -> None:
        if (ledger := self.end_and_find_ledger()) is not None:
            self._rows.recorder.add_row({"kind": "ledger", **ledger.model_dump()})


def _is_called_for_arm() -> bool:
    """Return whether ampcompare, on behalf of the arm, calls the method that is watched, through those of a model."""
    frame: FrameType | None = calling_frame()
    between = (
        __name__,
        Subscriptions.__module__,
        RoundedWeightsWatch.__module__,
    )  # as modules cast those inside of them
    while frame is not None and (
        _module_name_of_frame(frame).startswith("torch.")
        or _module_name_of_frame(frame) in between
        or frame.f_code.co_name in CASTS
    ):
        frame = frame.f_back
    return frame is not None and _module_name_of_frame(frame).startswith("ampcompare.")


def _frame_making_module_or_none() -> FrameType | None:
    """Return the frame that makes a module in whose constructor this is called, outside of all constructors.

    It is that of a line that makes a whole model, not one of its layers; None outside of any constructor.
    """
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and isinstance(frame.f_locals.get(code.co_varnames[0]), nn.Module):
            found = frame.f_back
        frame = frame.f_back
    return found


def _is_loading_state() -> bool:
    """Return whether torch's `load_state_dict` of a module is what calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module.load_state_dict.__code__:
        frame = frame.f_back
    return frame is not None


def _texts_on_setters_joined(setters: Sequence[str]) -> str:
    names = list(dict.fromkeys(setters))
    more = len(names) - MAX_SETTERS
    return "; ".join(names[:MAX_SETTERS]) + (f"; and {more} more" if more > 0 else "")


def _module_name_of_frame(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
