"""The ledger of a script: in which types its training runs, and which of its lines set them."""

import time
import weakref
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ampcompare.base.patches import Layer, Points, Subscriptions, calling_frame
from ampcompare.base.tensors.tree import tensors_in
from ampcompare.guards.location import Location, user_location
from ampcompare.results.records.ledger import Ledger
from ampcompare.script.lifted_weights import HALF
from ampcompare.script.recording.recorder import Rows
from ampcompare.training.ledger import StepLook

DETAILED = 2  # steps that were applied, of each optimizer
MAX_DETAILED = 12  # rows of steps, skipped ones too
EVERY = 20  # later rows
MAX_SHARE = 0.01  # of the time, for all later looks
CASTS = ("to", "half", "bfloat16", "type")  # methods of a module that models of libraries override


class ScriptLedger:
    """Looks at some steps of this process; when the record ends it adds the row `{"kind": "ledger", ...}`.

    Args:
        rows: say where a step ends.
        arm: its text, which sets what no line of the script does; "" for a script as it is written.
        emulated: type whose products this device computes in a wider one; "" if there is none.
    """

    def __init__(self, rows: Rows, arm: str, emulated: str = "") -> None:
        self._rows = rows
        self._arm = arm
        self._emulated = emulated
        self._look = StepLook(self._parameters)
        self._events = Subscriptions(Layer.WATCH)
        self._setters = Subscriptions(Layer.WATCH)  # until the first steps are over
        self._passes_of_step = Subscriptions(Layer.WATCH)  # while a step is looked at
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._by: dict[str, str] = {}
        self._count = self._applied = self._passes = self._depth = 0
        self._scale: Any = None
        self._compiles = False
        self._follows, self._begins, self._is_stepped, self._is_first = False, False, False, True
        self._spent = self._begun_at = self._stepped_at = self._since = 0.0

    def install(self) -> None:
        """Look from now on."""
        self._events.wrap(*Points.MAKE_OPTIMIZER, self._note_optimizer)
        self._setters.wrap(nn.Module, "_apply", self._cast)
        self._setters.wrap(*Points.MAKE_AUTOCAST, self._make_autocast)
        self._setters.wrap(*Points.MAKE_SCALER, self._make_scaler)
        self._events.wrap(torch, "compile", self._compile)
        self._follow_passes()
        self._events.at_end(register_optimizer_step_post_hook(self._reset_passes).remove)
        self._rows.recorder.after_row(self._row)
        self._rows.recorder.before_close(self._end)

    def end(self) -> None:
        """Look no longer."""
        if self._begins:
            if not self._is_stepped:
                self._look.note(self._live())
            self._finish_look()
        for subscriptions in (self._passes_of_step, self._setters, self._events):
            subscriptions.end()

    def _follow_passes(self) -> None:
        self._follows = True
        self._passes_of_step = Subscriptions(Layer.WATCH)
        self._passes_of_step.wrap(*Points.FORWARD, self._forward)
        self._passes_of_step.wrap(*Points.BACKWARD, self._backward)

    # Who sets what.

    def _note_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.append(weakref.ref(optimizer))
        if "weights" not in self._by and any(p.dtype in HALF for g in optimizer.param_groups for p in g["params"]):
            self._by["weights"] = f"{user_location()}, made so"
        self._by.setdefault("state", f"{type(optimizer).__name__}, {user_location()}")

    def _cast(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = next(module.parameters(), None)
        before = None if first is None else first.dtype
        result = original(module, *args, **kwargs)
        if first is not None and (after := next(module.parameters()).dtype) is not before and after in HALF:
            is_arms = bool(self._arm) and _is_by_arm()
            self._by["weights" if first.requires_grad else "frozen"] = self._setter("cast", is_arms=is_arms)
        return result

    def _make_autocast(self, original: Any, block: Any, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        if block._enabled and "products" not in self._by:
            self._by["products"] = self._setter("autocast", is_arms=bool(self._arm))

    def _make_scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler._enabled and "loss scale" not in self._by:
            self._by["loss scale"] = self._setter(type(scaler).__name__, is_arms=bool(self._arm))

    def _setter(self, what: str, *, is_arms: bool) -> str:
        """Return who calls: the arm, or the script's or a library's line."""
        where = user_location()
        return f"{what}, arm {self._arm}" if is_arms or where == Location("?", 0) else f"{what}, {where}"

    def _compile(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._compiles = True
        return original(*args, **kwargs)

    # The steps that are looked at.

    def _parameters(self) -> list[Tensor]:
        models = [model for reference in self._models if (model := reference()) is not None]
        return list({id(p): p for model in models for p in model.parameters()}.values())

    def _live(self) -> list[Any]:
        return [one for reference in self._optimizers if (one := reference()) is not None]

    def _forward(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._depth or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        if all(module is not reference() for reference in self._models) and next(module.parameters(), None) is not None:
            self._models.append(weakref.ref(module))
        if self._is_stepped:
            self._finish_look()
        if not self._follows:
            return original(module, *args, **kwargs)
        self._begin()
        return self._see(original, module, *args, **kwargs)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._depth:
            return original(*args, **kwargs)
        if self._passes:
            for tensor in tensors_in(args[0] if args else kwargs.get("tensors")):
                if tensor.requires_grad:  # where the pass begins, an arm has collected what was there
                    tensor.register_hook(lambda _: self._look.accumulates())
        self._passes += 1
        return self._see(original, *args, **kwargs)

    def _see(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            if self._compiles:  # torch dispatches no operations of a compiled program
                return original(*args, **kwargs)
            with self._look.sees():
                return original(*args, **kwargs)
        finally:
            self._depth -= 1

    def _begin(self) -> None:
        if not self._begins:
            self._begins = True
            self._begun_at = time.perf_counter()
            self._look.begin(self._count, self._live(), detailed=True)

    def _reset_passes(self, *_: Any) -> None:
        self._passes = 0  # where an arm knows only later whether it was applied, the row comes after the next pass

    def _row(self, row: dict[str, Any]) -> None:
        if row["kind"] == "backward" and row["scale_before"] is not None:
            self._scale = row["scale_before"]
        if row["kind"] != "step":
            return
        self._count += 1
        self._passes = 0
        self._applied += bool(row["applied"])  # one that is not known yet counts as applied
        if self._begins:  # until the next forward pass, as another optimizer may step
            self._look.note(self._live())
            self._is_stepped, self._stepped_at = True, time.perf_counter()
        elif self._count % EVERY == 0 and self._spent <= MAX_SHARE * (time.perf_counter() - self._since):
            self._follow_passes()

    def _finish_look(self) -> None:
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

    def result(self) -> Ledger | None:
        """Look no longer, and return what was seen; None if no step was looked at."""
        self.end()
        if not self._look.steps:
            return None
        scale = self._scale() if callable(self._scale) else self._scale
        ledger = self._look.result(loss_scale=None if scale is None else float(scale), emulated=self._emulated)
        by = dict(self._by)
        if self._arm and {"fp16", "bf16"} & ledger.of_groups("weights").keys():
            by["weights"] = f"cast, arm {self._arm}"  # one that casts none lifts those of the script
        elif self._arm and "weights" in by:
            by["weights"] += f", lifted by arm {self._arm}"
        return ledger.model_copy(update={"by": by})

    def _end(self) -> None:
        if (ledger := self.result()) is not None:
            self._rows.recorder.add({"kind": "ledger", **ledger.model_dump()})


def _is_by_arm() -> bool:
    """Return whether ampcompare, on behalf of the arm, calls the method that is watched, through those of a model."""
    frame: FrameType | None = calling_frame()
    while frame is not None and (_module(frame).startswith("torch.") or frame.f_code.co_name in CASTS):
        frame = frame.f_back
    return frame is not None and _module(frame).startswith("ampcompare.")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
