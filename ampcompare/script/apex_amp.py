"""The `apex.amp` of a script under an arm that is not Apex's: its calls lead to the `Precision` of ampcompare's loop.

| the script calls | the precision does |
|---|---|
| `initialize` | `prepare`; from here on casts are on, where O1's would be: forward, loss and evaluation |
| `scale_loss` | `scale_loss`, without casts |
| `master_params`, or a first look at a gradient | `unscale` |
| `optimizer.step` | `step`, without casts |
| `state_dict`, `load_state_dict` | the same |

What the script asks of Apex (opt level, loss scale, batch norm in fp32) is the arm's to decide.

`half_function` and its like cast arguments only, as O1's wrappers do: what the function calls is cast as everywhere
else. An arm without casts of functions leaves them alone, as O0, O2 and O3 do.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.errors import PreparationError, ScalingError
from ampcompare.guards.events import GRADIENT_READS
from ampcompare.guards.location import here
from ampcompare.script.legacy.record.recorder import Rows, value_of
from ampcompare.script.shown_gradients import ShownGradients
from ampcompare.training.precision.base import Precision, StepOutcome, owned_params

__all__ = ["Given", "ScriptAmp", "nodes_of"]

Parameters = Mapping[int, Mapping[int, Tensor]]
ONE_SCALE = (
    "the script has one loss scale for each loss (num_losses), and all losses share one here, as with one GradScaler"
)
Given = Callable[[list[Any], list[Any]], None]
FUNCTIONS = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict", "disable_casts", "init")
_KINDS = ("half", "float", "promote")
Choose = Callable[[], "torch.dtype | None"]


class _Stage(enum.Enum):
    """Of an optimizer's gradients, since its last step."""

    NONE = "no loss has reached them"
    DELAYED = "scaled, by a block with delay_unscale"
    SCALED = "scaled, to be unscaled at their first reader"
    UNSCALED = "true gradients"


def _parameters_by_id(optimizers: Sequence[Any]) -> Parameters:
    """Return the parameters of each optimizer, by the id of the optimizer and their own."""
    return {id(one): {id(param): param for param in owned_params(one)} for one in optimizers}


def nodes_of(losses: Sequence[Tensor]) -> set[Any]:
    """Return the nodes of the graph that a backward pass of `losses` runs through."""
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return seen


def _leaves_of(losses: Sequence[Tensor]) -> frozenset[int]:
    """Return the ids of the tensors whose gradients a backward pass of `losses` adds to."""
    leaves = {id(loss) for loss in losses if loss.grad_fn is None}
    return frozenset(leaves | {id(node.variable) for node in nodes_of(losses) if hasattr(node, "variable")})


class _Session:
    """Optimizers of one `initialize` with the precision that prepared them.

    An arm that neither scales nor steps copies of weights has no stages: each call goes straight to the precision.

    Attributes:
        scale: the present loss scale, or what returns it, which may wait for the device; None if none.

    Args:
        name: of the arm, for messages.
        precision: has prepared the optimizers.
        own: parameters of each optimizer before it was prepared, by id of optimizer and of parameter.
    """

    def __init__(self, name: str, precision: Precision, optimizers: Sequence[Any], own: Parameters) -> None:
        self.precision = precision
        self.optimizers = list(optimizers)
        self._name = name
        self._own = own
        self._has_masters = any(id(one) not in own[id(owner)] for owner in optimizers for one in owned_params(owner))
        scales = precision.loss_scales()
        self._scales = bool(scales)
        self.scale: float | Callable[[], float] | None = scales[0] if scales else None
        self._stages = {id(optimizer): _Stage.NONE for optimizer in optimizers}
        self._readers: dict[int, int] = {}  # optimizers by the id of a parameter, once one of them is asked for
        self._plain: set[int] = set()  # optimizers that a plain backward pass may have reached since their last step
        self._stepped: list[Any] = []  # while others wait, and the scale has not moved
        self._shown = ShownGradients()

    @property
    def _staged(self) -> bool:
        return self._scales or self.precision.steps_copies

    def begin(self, optimizers: Sequence[Any]) -> None:
        """Note that a `scale_loss` block begins.

        Raises:
            ScalingError: it would add scaled gradients to true ones.
        """
        if not self._staged:
            return
        for optimizer in optimizers:
            stage = self._stages[id(optimizer)]
            if stage is _Stage.NONE and id(optimizer) in self._plain and self._has_gradients(optimizer):
                raise ScalingError(
                    here(
                        "this scale_loss block adds to the gradients of a loss.backward() without one, which "
                        f"{self._name} cannot tell apart: put that loss into a scale_loss block too"
                    )
                )
            if stage is _Stage.UNSCALED:
                if self._has_gradients(optimizer):
                    raise ScalingError(
                        here(
                            "this scale_loss block adds to gradients that were read (clipped, say) after an earlier "
                            f"one and before optimizer.step; {self._name} unscales gradients once per step. Read them "
                            "once, right before the step"
                        )
                    )
                self._discard(optimizer)

    def _has_gradients(self, optimizer: Any) -> bool:
        """Return whether any gradient of the script's parameters or of their master weights is not zero."""
        params = [*self._own[id(optimizer)].values(), *owned_params(optimizer)]
        return any(param.grad is not None and bool(param.grad.any()) for param in params)

    def before_plain_backward(self, losses: Sequence[Tensor]) -> None:
        """Unscale the gradients that a backward pass without `scale_loss` is about to add to, as Apex has done.

        Raises:
            ScalingError: they stay scaled until a later block, or go to master weights through one.
        """
        if not self._staged:
            return
        waiting = [one for one in self.optimizers if self._stages[id(one)] in (_Stage.SCALED, _Stage.DELAYED)]
        reached = _leaves_of(losses) if waiting else frozenset()
        for optimizer in waiting:
            if reached.isdisjoint(self._own[id(optimizer)]):
                continue
            if self.precision.steps_copies or self._stages[id(optimizer)] is _Stage.DELAYED:
                raise ScalingError(
                    here(
                        "loss.backward() without scale_loss adds to scaled gradients of an earlier block: put this "
                        "loss into `with amp.scale_loss(...)` too"
                    )
                )
            self.params(optimizer)
        self._plain.update(id(one) for one in self.optimizers if self._stages[id(one)] is _Stage.NONE)

    def end(self, optimizers: Sequence[Any], *, delay_unscale: bool) -> None:
        """Note that a block has ended without an error."""
        if not self._staged:
            return
        for optimizer in optimizers:
            self._stages[id(optimizer)] = _Stage.DELAYED if delay_unscale else _Stage.SCALED
        self._watch()

    def _watch(self) -> None:
        """Watch for readers of gradients if any optimizer's are still scaled."""
        self._readers.clear()
        GRADIENT_READS.want(self.unscale_for, _Stage.SCALED in self._stages.values())

    def end_watch(self) -> None:
        """Let reads of gradients be torch's own."""
        GRADIENT_READS.want(self.unscale_for, False)
        self._shown.end()

    def unscale_for(self, param: Tensor) -> None:
        """Unscale the gradients of the optimizer that owns `param`, if they are still scaled."""
        if not self._readers:
            for optimizer in self.optimizers:
                if self._stages[id(optimizer)] is _Stage.SCALED:
                    self._readers.update({id(one): id(optimizer) for one in owned_params(optimizer)})
        owner = self._readers.get(id(param))
        if owner is not None:
            self.params(next(one for one in self.optimizers if id(one) == owner))

    def params(self, optimizer: Any) -> list[Tensor]:
        """Return what `optimizer.step` updates, with true gradients wherever Apex has true ones."""
        if self._stages[id(optimizer)] is not _Stage.SCALED:
            return owned_params(optimizer)
        with GRADIENT_READS.paused():
            params = self.precision.unscale(optimizer)
            if not self._has_masters:  # but copies, if any, in which the weights that the script reads have gradients
                self._shown.show(self.precision.masters(optimizer))
        self._stages[id(optimizer)] = _Stage.UNSCALED
        self._watch()
        return params

    def step(self, optimizer: Any, plain: Callable[[], Any]) -> StepOutcome | None:
        """Step an optimizer, or skip it.

        Args:
            plain: the optimizer's own step.

        Returns:
            The outcome; None if no loss has reached the optimizer since its last step.

        Raises:
            ScalingError: its gradients cannot be told apart from scaled ones.
        """
        self._plain.discard(id(optimizer))
        if not self._staged:
            return self.precision.step(optimizer)
        with GRADIENT_READS.paused():
            if self._stages[id(optimizer)] is _Stage.NONE:
                self._step_unscaled(optimizer, plain)
                return None
            return self._step_staged(optimizer)

    def _step_unscaled(self, optimizer: Any, plain: Callable[[], Any]) -> None:
        if self.precision.steps_copies:
            raise ScalingError(
                here(
                    f"optimizer.step without a scale_loss block since the last step; under {self._name} the gradients "
                    "reach the fp32 copies of weights through one. Put backward into `with amp.scale_loss(...)`"
                )
            )
        plain()

    def _step_staged(self, optimizer: Any) -> StepOutcome:
        waiting = [
            other for other in self.optimizers if other is not optimizer and self._stages[id(other)] is not _Stage.NONE
        ]
        if any(one is optimizer for one in self._stepped):
            raise ScalingError(
                here(
                    f"the second step of this optimizer while another one still holds gradients that were not stepped; "
                    f"{self._name} has one loss scale for all, which moves when all are stepped. Step both, or clear "
                    "the gradients of the other"
                )
            )
        outcome = self.precision.step_apart(optimizer, waiting) if waiting else self.precision.step(optimizer)
        self._stages[id(optimizer)] = _Stage.NONE
        self.scale = (lambda: outcome.loss_scales[0]) if self._scales else None
        self._stepped = [*self._stepped, optimizer] if waiting else []
        self._watch()
        if self._has_masters:  # as Apex does: a script may clear the gradients of the model only
            for param in owned_params(optimizer):
                if id(param) not in self._own[id(optimizer)]:
                    param.grad = None
        return outcome

    def _discard(self, optimizer: Any) -> None:
        """End the step of an optimizer whose true gradients were cleared: the scaler moves, the weights stay."""
        step = optimizer.step
        optimizer.step = lambda: None
        try:
            self._step_staged(optimizer)
        finally:
            optimizer.step = step

    def cleared(self, optimizer: Any) -> None:
        """Note that the gradients of an optimizer were cleared, and clear those of the model under master weights."""
        self._plain.discard(id(optimizer))
        self._shown.hide(self._own[id(optimizer)].values())
        if self._has_masters:
            for param in self._own[id(optimizer)].values():
                param.grad = None
        if self._stages[id(optimizer)] in (_Stage.SCALED, _Stage.DELAYED):
            self._stages[id(optimizer)] = _Stage.NONE
            self._watch()


class ScriptAmp:
    """The functions of `apex.amp`, on an arm.

    Args:
        name: of the arm, for messages.
        make: builds its precision for a device.
        rows: records losses and steps.
        given: called with models and optimizers before they are prepared.
    """

    def __init__(
        self, name: str, make: Callable[[str], Precision], rows: Rows | None = None, given: Given | None = None
    ) -> None:
        self._name = name
        self._make = make
        self._rows = rows
        self._given = given
        self._casting = _Casting()
        self._sessions: list[_Session] = []
        self._stepping = False
        self._blocks = 0
        self._device_type = "cpu"
        self._registered: list[tuple[Any, str, str]] = []

    @property
    def precisions(self) -> list[Precision]:
        """Those of all calls of `initialize`, in order."""
        return [session.precision for session in self._sessions]

    def initialize(
        self, models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1", **options: Any
    ) -> Any:
        """Prepare models and optimizers for the arm, in place; the arguments and the result are those of Apex.

        Raises:
            PreparationError: `enabled=False`, which no arm can follow, or models that cannot be prepared.
        """
        some_models = models if isinstance(models, list) else [models]
        some_optimizers = [] if optimizers is None else optimizers if isinstance(optimizers, list) else [optimizers]
        if self._given is not None:
            self._given(some_models, some_optimizers)
        device = _device_of(some_models, some_optimizers)
        self._device_type = torch.device(device).type
        precision = self._make(device)
        if not enabled and precision.half_dtype is not None:
            raise PreparationError(
                here(
                    f"amp.initialize has enabled=False, so {self._name} has no effect; run the script with amp enabled"
                )
            )
        own = _parameters_by_id(some_optimizers)
        try:
            new_models, new_optimizers = precision.prepare(some_models, some_optimizers)
        except PreparationError as error:
            raise PreparationError(here(str(error))) from None
        session = _Session(self._name, precision, new_optimizers, own)
        self._sessions.append(session)
        for optimizer in new_optimizers:
            self._replace_methods(session, optimizer)
        self._apply_registered(precision)
        self._casting.start(precision.autocast)
        if self._rows is not None:
            numbers = [self._rows.number(optimizer)[0] for optimizer in new_optimizers]
            names = {number: type(one).__name__ for number, one in zip(numbers, new_optimizers, strict=True)}
            scales = precision.loss_scales()
            self._rows.add_initialize(self._name, names, list(scales), [True] * len(scales))
            self._rows.has_amp = self._rows.has_initialized = True
            if scales and options.get("num_losses", 1) > 1:
                self._rows.add_note(ONE_SCALE)
        given = new_models if isinstance(models, list) else new_models[0]
        if optimizers is None:
            return given
        return given, new_optimizers if isinstance(optimizers, list) else new_optimizers[0]

    def _replace_methods(self, session: _Session, optimizer: Any) -> None:
        step, zero_grad = optimizer.step, optimizer.zero_grad

        # Bound methods, which LR schedulers need.
        @functools.wraps(step)
        def stepped(_self: Any, closure: Any = None, **kwargs: Any) -> Any:
            if self._stepping:  # the precision's own call
                return step(**kwargs)
            if closure is not None:
                result, outcome = self._step_with_closure(session, step, closure), None
            else:
                result, outcome = None, self._step(session, optimizer, step)
            if self._rows is not None:
                self._rows.add_step(self._rows.number(optimizer)[0], _applied(outcome))
            return result

        @functools.wraps(zero_grad)
        def cleared(_self: Any, *args: Any, **kwargs: Any) -> Any:
            session.cleared(optimizer)
            return zero_grad(*args, **kwargs)

        optimizer.step = types.MethodType(stepped, optimizer)
        optimizer.zero_grad = types.MethodType(cleared, optimizer)

    def _step(self, session: _Session, optimizer: Any, plain: Callable[..., Any]) -> StepOutcome | None:
        self._stepping = True
        try:
            with self._casting.off():
                return session.step(optimizer, plain)
        finally:
            self._stepping = False

    def _step_with_closure(self, session: _Session, step: Callable[..., Any], closure: Any) -> Any:
        if session.precision.half_dtype is not None:
            raise ScalingError(
                here(
                    f"optimizer.step is called with a closure, which {self._name} does not support, since a step may "
                    f"have to be skipped; call step() without one"
                )
            )
        return step(closure)

    def scale_loss(
        self,
        loss: Any,
        optimizers: Any,
        loss_id: int = 0,
        model: Any = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> AbstractContextManager[Any]:
        """Yield the scaled loss, to call `backward` on; the arguments are those of Apex.

        Raises:
            ScalingError: before `initialize`, or an optimizer that it did not prepare.
        """
        some = [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)
        return self._block(self._session_of(some), loss, some, loss_id, delay_unscale)

    def _session_of(self, optimizers: Sequence[Any]) -> _Session:
        for session in reversed(self._sessions):
            if all(any(one is other for other in session.optimizers) for one in optimizers):
                return session
        if not self._sessions:
            raise ScalingError(here("amp.scale_loss before amp.initialize; call that first"))
        raise ScalingError(
            here(
                "amp.scale_loss is called with an optimizer that no amp.initialize has prepared, or with those of "
                "two calls; pass it"
            )
        )

    @contextmanager
    def _block(
        self, session: _Session, loss: Any, optimizers: Sequence[Any], loss_id: int, delay_unscale: bool
    ) -> Iterator[Any]:
        session.begin(optimizers)
        if self._rows is not None:
            numbers = [self._rows.number(optimizer)[0] for optimizer in optimizers]
            self._rows.add_backward(value_of(loss), loss_id, (session.scale, session.scale), None, numbers, [])
        with (
            self._casting.off(),
            GRADIENT_READS.paused(),
            self._inside(),
            session.precision.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale) as scaled,
        ):
            yield scaled
        session.end(optimizers, delay_unscale=delay_unscale)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Run a block whose backward passes are of scaled losses."""
        self._blocks += 1
        if self._rows is not None:
            self._rows.blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if self._rows is not None:
                self._rows.blocks -= 1

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Prepare the gradients that are there for a backward pass.

        Raises:
            ScalingError: it would add true gradients to scaled ones.
        """
        if not self._blocks:
            for session in self._sessions:
                session.before_plain_backward(losses)

    def master_params(self, optimizer: Any) -> Iterator[Tensor]:
        """Yield the tensors that `optimizer.step` updates, with true gradients after a `scale_loss` block."""
        for session in self._sessions:
            if any(one is optimizer for one in session.optimizers):
                return iter(session.params(optimizer))
        return iter([param for group in optimizer.param_groups for param in group["params"]])

    def state_dict(self, destination: Any = None) -> Any:
        """Return the state of the precision.

        Args:
            destination: a mapping to fill and return.

        Raises:
            ScalingError: before `initialize`, or after several.
        """
        state = self._only_session("state_dict").precision.state_dict()
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of the same arm returned.

        Raises:
            ScalingError: before `initialize`, after several, or the state of another arm.
        """
        precision = self._only_session("load_state_dict").precision
        lacking = set(precision.state_dict()) - set(state_dict)
        if lacking:
            of_apex, to_apex = "loss_scaler0" in state_dict, "loss_scaler0" in lacking
            converts = (of_apex and "scale" in lacking) or (to_apex and "scale" in state_dict)
            remedy = (
                f"run `ampcompare convert CHECKPOINT NEW --to {'apex' if to_apex else 'native'}` and load NEW"
                if converts
                else "start from scratch"
            )
            raise ScalingError(
                here(
                    f"amp.load_state_dict gets {', '.join(map(repr, state_dict)) or 'nothing'}, and {self._name} needs "
                    f"{', '.join(map(repr, sorted(lacking)))}: the checkpoint is another arm's; {remedy}"
                )
            )
        precision.load_state_dict(state_dict)

    def _only_session(self, function: str) -> _Session:
        if len(self._sessions) == 1:
            return self._sessions[0]
        when = "after several calls of amp.initialize" if self._sessions else "before amp.initialize"
        raise ScalingError(here(f"amp.{function} {when}; initialize all models and optimizers in one call, before it"))

    def disable_casts(self) -> AbstractContextManager[None]:
        """Run a block without the arm's casts."""
        return self._casting.off()

    def end_casts(self) -> None:
        """Switch casts off until the next `initialize`."""
        self._casting.end()

    def end(self) -> None:
        """Switch casts off, and drop the precisions: the next `initialize` starts from scratch."""
        self._casting.end()
        for session in self._sessions:
            session.end_watch()
        self._sessions.clear()

    def _half_now(self) -> torch.dtype | None:
        """Return the type that functions are cast to; None where casts are off, or the arm casts no functions."""
        if not self._casting.active or not torch.is_autocast_enabled(self._device_type):
            return None
        return self._sessions[-1].precision.half_dtype

    def decorator(self, kind: str) -> Callable[[Any], Any]:
        """Return `half_function`, `float_function` or `promote_function`.

        Args:
            kind: one of `KINDS`.
        """
        return lambda fn: _cast_arguments(fn, kind, self._half_now)

    def registrar(self, kind: str) -> Callable[[Any, str], None]:
        """Return `register_half_function`, `register_float_function` or `register_promote_function`."""

        def register(module: Any, name: str) -> None:
            if not hasattr(module, name):
                raise ValueError(f"No function named {name} in module {module}.")
            self._registered.append((module, name, kind))

        return register

    def _apply_registered(self, precision: Precision) -> None:
        registered, self._registered = self._registered, []
        for module, name, kind in registered:
            setattr(module, name, _cast_arguments(getattr(module, name), kind, self._half_now))

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse the form of the API that came before `initialize`.

        Raises:
            PreparationError: always.
        """
        raise PreparationError(
            here(f"amp.init has no models and optimizers, so {self._name} has no effect; call amp.initialize instead")
        )

    def functions(self) -> dict[str, Any]:
        """Return the public functions of `apex.amp` by name."""
        named = {name: getattr(self, name) for name in FUNCTIONS}
        for kind in _KINDS:
            named[f"{kind}_function"] = self.decorator(kind)
            named[f"register_{kind}_function"] = self.registrar(kind)
        return named


def _applied(outcome: StepOutcome | None) -> Callable[[], bool] | bool:
    return True if outcome is None else lambda: outcome.applied[0]


def _device_of(models: Sequence[Any], optimizers: Sequence[Any]) -> str:
    """Return the device of the first parameter."""
    for model in models:
        for param in model.parameters():
            return str(param.device)
    for optimizer in optimizers:
        return str(optimizer.param_groups[0]["params"][0].device)
    return "cpu"


class _Casting:
    """One context of `Precision.autocast` that stays open, and the blocks without it.

    The context is left and made again, not nested: only at the outermost exit does torch drop the casts of weights
    that it has cached.
    """

    def __init__(self) -> None:
        self._make: Callable[[], AbstractContextManager[None]] | None = None
        self._open: AbstractContextManager[None] | None = None
        self._blocks = 0

    @property
    def active(self) -> bool:
        """Whether casts are on now."""
        return self._open is not None

    def start(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        """Switch casts on, instead of those of an earlier call.

        Args:
            make: returns a new context of the arm's casts.
        """
        self._close()
        self._make = make
        if not self._blocks:
            self._enter()

    def end(self) -> None:
        """Switch casts off until the next `start`."""
        self._close()
        self._make = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run a block without casts; blocks nest. Cached casts of weights are dropped."""
        self._close()
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._enter()

    def forget(self) -> None:
        """Drop cached casts: weights were written."""
        torch.clear_autocast_cache()

    def _enter(self) -> None:
        if self._make is not None:
            self._open = self._make()
            self._open.__enter__()

    def _close(self) -> None:
        if self._open is not None:
            context, self._open = self._open, None
            context.__exit__(None, None, None)
            torch.clear_autocast_cache()  # an autocast block of the script may still be open around this one


def _cast_arguments(function: Callable[..., Any], kind: str, half: Choose) -> Callable[..., Any]:
    """Return `function` with its floating-point arguments cast while casts are on.

    Args:
        kind: "half", "float", or "promote": to float32 if 16-bit and fp32 arguments meet.
        half: returns the 16-bit type; None while casts are off.
    """

    @functools.wraps(function)
    def casted(*args: Any, **kwargs: Any) -> Any:
        half_dtype = half()
        if half_dtype is None:
            return function(*args, **kwargs)
        dtype = half_dtype if kind == "half" else torch.float32
        if kind == "promote" and len(_dtypes([args, kwargs])) < 2:
            return function(*args, **kwargs)
        return function(*_cast(args, dtype), **_cast(kwargs, dtype))

    return casted


def _dtypes(value: Any) -> set[torch.dtype]:
    if isinstance(value, Tensor):
        return {value.dtype} if value.is_floating_point() else set()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return set().union(*map(_dtypes, items))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
