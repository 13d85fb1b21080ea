"""The `apex.amp` of a script under an arm that is not Apex's: what is left of it is a script without a scaled loss.

Its calls become those that `PlainScriptFollower` follows:

| the script calls | what happens |
|---|---|
| `initialize` | models are prepared; from here on casts are on, where O1's would be: forward, loss and evaluation |
| `scale_loss` | the loss as it is, and no casts: a backward pass scales what it begins with |
| `master_params`, `optimizer.step` | what the optimizer steps; its own step, without casts |
| `state_dict`, `load_state_dict` | those of the GradScaler that is made on behalf of the script |
| `_amp_state.loss_scalers` | the arm's loss scale, to read |

What the script asks of Apex (opt level, loss scale, batch norm in fp32) is the arm's to decide.

`half_function` and its like cast arguments only, as O1's wrappers do: what the function calls is cast as everywhere
else. An arm without casts of functions leaves them alone, as O0, O2 and O3 do.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ampcompare.apex.amp._amp_state import _amp_state
from ampcompare.apex.amp.scaler import LossScaler
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import PreparationError, ScalingError
from ampcompare.base.location import message_with_script_line
from ampcompare.base.tensors.tree import cast_floating_tensors, tensors_in_value
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.torch_amp.autocast_and_scaler import trains_script_with_amp_off
from ampcompare.script.torch_amp.gradient_stages import ScriptLossScaling
from ampcompare.script.torch_amp.plain_script import PlainScriptFollower
from ampcompare.training.precision.base import owned_params

ONE_SCALE = (
    "the script has one loss scale for each loss (num_losses), and all losses share one "
    "here, as with one GradScaler"
)
FUNCTIONS = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict", "disable_casts")
_KINDS = ("half", "float", "promote")
Choose = Callable[[], "torch.dtype | None"]


class _ArmLossScaleView(LossScaler):
    """Show a script the loss scale of the arm, 1 without one; what it writes there, the arm's decision replaces."""

    def __init__(self, stages: ScriptLossScaling) -> None:
        super().__init__(1.0)
        self._stages = stages

    @property
    def _loss_scale(self) -> float:
        return float(self._stages.state_dict().get("scale", 1.0))

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        pass


class ScriptAmp:
    """The functions of `apex.amp`, on an arm."""

    def __init__(self, arm: Arm, plain: PlainScriptFollower, rows: RecordedSteps | None = None) -> None:
        self._arm = arm
        self._plain = plain
        self._rows = rows
        self._casting = plain.casting
        self._is_initialized = False
        self._registered: list[tuple[Any, str, str]] = []

    def initialize(
        self, models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1", **options: Any
    ) -> Any:
        """Prepare models and optimizers for the arm, in place; the arguments and the result are those of Apex."""
        if not enabled and not trains_script_with_amp_off(self._arm):
            raise PreparationError(
                message_with_script_line(
                    f"amp.initialize has enabled=False, so {self._arm} has no effect; run the script with amp enabled"
                )
            )
        given = optimizers if isinstance(optimizers, list) else [optimizers]
        self._plain.initialize(
            models if isinstance(models, list) else [models], [] if optimizers is None else given
        )
        self._is_initialized = True
        _amp_state.loss_scalers = [
            _ArmLossScaleView(self._plain.stages) for _ in range(options.get("num_losses", 1))
        ]
        registered, self._registered = self._registered, []
        for module, name, kind in registered:
            setattr(
                module,
                name,
                _with_arguments_cast(getattr(module, name), kind, self._casting.type_cast_to_now),
            )
        if self._rows is not None:
            self._rows.has_initialized = True
            if self._plain.stages.needs_scaler and options.get("num_losses", 1) > 1:
                self._rows.add_arm_departure_note(ONE_SCALE)
        return models if optimizers is None else (models, optimizers)

    @contextmanager
    def scale_loss(self, loss: Any, optimizers: Any, *_arguments: Any, **_options: Any) -> Iterator[Any]:
        """Yield the loss, to call `backward` on; the arguments are those of Apex."""
        self._require_initialized("scale_loss")
        rows = self._rows
        if rows is not None:
            rows.blocks += 1
        try:
            with self._casting.block_without_casts():
                yield loss
        finally:
            if rows is not None:
                rows.blocks -= 1

    def _require_initialized(self, function: str) -> None:
        if not self._is_initialized:
            raise ScalingError(
                message_with_script_line(f"amp.{function} before amp.initialize; call that first")
            )

    def master_params(self, optimizer: Any) -> Iterator[Tensor]:
        """Yield the tensors that `optimizer.step` updates; their gradients are true once they are read."""
        return iter(owned_params(optimizer))

    def state_dict(self, destination: Any = None) -> Any:
        """Return the state of the loss scale, or fill and return a mapping."""
        self._require_initialized("state_dict")
        state = self._plain.stages.state_dict()
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of the same arm returned."""
        self._require_initialized("load_state_dict")
        lacking = set(self._plain.stages.state_dict()) - set(state_dict)
        if lacking:
            remedy = "start from scratch"
            if "loss_scaler0" in state_dict:
                remedy = "run `ampcompare convert CHECKPOINT NEW --to native` and load NEW"
            raise ScalingError(
                message_with_script_line(
                    f"amp.load_state_dict gets {', '.join(map(repr, state_dict)) or 'nothing'}, and {self._arm} needs "
                    f"{', '.join(map(repr, sorted(lacking)))}: the checkpoint is another arm's; {remedy}"
                )
            )
        self._plain.stages.load_state_dict(state_dict)

    def disable_casts(self) -> AbstractContextManager[None]:
        """Run a block without the arm's casts."""
        return self._casting.block_without_casts()

    def decorator_of_kind(self, kind: str) -> Callable[[Any], Any]:
        """Return `half_function`, `float_function` or `promote_function`."""
        return lambda fn: _with_arguments_cast(fn, kind, self._casting.type_cast_to_now)

    def make_registrar(self, kind: str) -> Callable[[Any, str], None]:
        """Return `register_half_function`, `register_float_function` or `register_promote_function`."""

        def register(module: Any, name: str) -> None:
            if not hasattr(module, name):
                raise ValueError(f"No function named {name} in module {module}.")
            self._registered.append((module, name, kind))

        return register

    def functions_by_name(self) -> dict[str, Any]:
        """Return the public functions of `apex.amp` by name."""
        named = {name: getattr(self, name) for name in FUNCTIONS}
        named["init"] = functools.partial(refuse_init_of_old_amp, self._arm)
        for kind in _KINDS:
            named[f"{kind}_function"] = self.decorator_of_kind(kind)
            named[f"register_{kind}_function"] = self.make_registrar(kind)
        return named


def refuse_init_of_old_amp(arm: Arm, *_arguments: Any, **_options: Any) -> Any:
    """Refuse the form of the API that came before `initialize`."""
    raise PreparationError(
        message_with_script_line(
            f"amp.init has no models and optimizers, so {arm} has no effect; call amp.initialize instead"
        )
    )


def _with_arguments_cast(function: Callable[..., Any], kind: str, half: Choose) -> Callable[..., Any]:
    """Return `function` with its floating-point arguments cast while casts are on.

    Args:
        kind: "half", "float", or "promote": to float32 if 16-bit and fp32 arguments meet.
        half: returns the 16-bit type; None while casts are off.
    """

    @functools.wraps(function)
    def cast_call(*args: Any, **kwargs: Any) -> Any:
        half_dtype = half()
        if half_dtype is None:
            return function(*args, **kwargs)
        dtype = half_dtype if kind == "half" else torch.float32
        types = {tensor.dtype for tensor in tensors_in_value([args, kwargs]) if tensor.is_floating_point()}
        if kind == "promote" and len(types) < 2:
            return function(*args, **kwargs)
        return function(*cast_floating_tensors(args, dtype), **cast_floating_tensors(kwargs, dtype))

    return cast_call
