"""Lightning's `Trainer` under an arm, by a precision plugin.

    from ampcompare.integrations.lightning import AmpComparePrecision

    Trainer(plugins=[AmpComparePrecision("O2")], ...)

It works with `lightning` and with `pytorch_lightning`: the one that the program has imported, `lightning` by default.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ampcompare import guards as guard_rules
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import (
    BackendUnavailable,
    CheckpointError,
    UnsupportedCombination,
    require_one_of,
)
from ampcompare.base.guard_modes import GUARD_OPTIONS, GuardMode
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.recording.recorder import RecordedSteps, Recorder, record_header
from ampcompare.script.trainers.lightning import TRAINER
from ampcompare.training.precision.base import Precision, make_precision


def _import_lightning() -> Any:
    """Import Lightning by the name that the program uses."""
    names = [name for name in TRAINER if name in sys.modules] or [
        name for name in TRAINER if importlib.util.find_spec(name.partition(".")[0]) is not None
    ]
    if not names:
        raise BackendUnavailable("Lightning is not installed: pip install lightning")
    return importlib.import_module(names[0])


_lightning = _import_lightning()
_PrecisionPlugin: Any = importlib.import_module(f"{_lightning.__name__}.plugins.precision").Precision


class StepCounter:
    """Counts steps, and writes them to a file that `ampcompare report` reads.

    Args:
        record: the file; None writes none.

    Attributes:
        total: of all optimizers, skipped ones too.
        skipped: those of `total` that an overflow skipped.
        loss_scales: after the last step; empty if nothing is scaled.
    """

    def __init__(self, record: str | Path | None = None) -> None:
        self.total = self.skipped = 0
        self.loss_scales: tuple[float, ...] = ()
        self._recorder: Recorder | None = None
        self._rows: RecordedSteps | None = None
        if record is not None:
            self._recorder = Recorder(
                str(record), record_header(ExecSettings(record=str(record), name=sys.argv[0]))
            )
            self._rows = RecordedSteps(self._recorder)

    def add_step(
        self, optimizer: Any, *, applied: bool, loss_scales: tuple[float, ...], loss: Any = None
    ) -> None:
        """Add a step.

        Args:
            loss_scales: after it.
            loss: a number or a tensor of one element, if it is known.
        """
        self.total += 1
        self.skipped += not applied
        before, self.loss_scales = next(iter(self.loss_scales or loss_scales), None), loss_scales
        if self._rows is not None:
            number, _ = self._rows.optimizer_number_and_is_new(optimizer)
            after = next(iter(loss_scales), None)
            value = None if loss is None else float(loss)
            self._rows.add_backward(
                value, number, (before, after), not applied, [number], [] if applied else [number]
            )
            self._rows.add_step(number, applied)

    def close(self) -> None:
        """End the record."""
        if self._recorder is not None:
            self._recorder.close(0, None)
            self._recorder = self._rows = None


class AmpComparePrecision(_PrecisionPlugin):  # type: ignore[misc]
    """Trains under an arm of ampcompare, as its own loop does: casts, loss scale, master weights, skipped steps.

    Clipping and accumulation of the `Trainer`, manual optimization, evaluation and checkpoints work. Batches get the
    type of the weights where the arm casts those.

    Args:
        arm: such as "native:fp16", "native:bf16", "O1", "O2" or "half:bn_fp32".
        guards: "warn" reports mistakes in the use of mixed precision, "strict" raises at them, "off" does not look.
        record: a file for each step, which `ampcompare report` reads.

    Attributes:
        steps: those so far, with loss scales and skipped steps.

    Raises:
        ConfigError: there is no such arm, or mode of the guards.
        UnsupportedCombination: an arm of Fabric, or LBFGS, whose closure runs several times in a step.
        PreparationError: the arm cannot prepare the model or its optimizers, such as a model that DDP has wrapped.
    """

    precision = "32-true"  # of weights that Lightning itself makes; the arm casts them

    def __init__(
        self, arm: str = "native:fp16", *, guards: GuardMode = "off", record: str | Path | None = None
    ) -> None:
        require_one_of(GUARD_OPTIONS, "guards", guards)
        self.arm = Arm.parse(arm)
        if loop := self.arm.spec.loop:
            raise UnsupportedCombination(
                f"{arm} sets a model up for a loop of {loop}, and a Trainer has its own; use {self.arm.underlying_arm}"
            )
        self.steps = StepCounter()
        self._mode, self._record = guards, record
        self._guards: Any = None
        self._arm_precision: Precision | None = None
        self._last_state: dict[str, Any] = {}
        self._half_dtype: torch.dtype | None = None
        self._optimizers: list[Optimizer] = []
        self._loss: Tensor | None = None

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepare the model, on its device, and the optimizers."""
        self.teardown()
        device = next((param.device for param in model.parameters()), torch.device("cpu"))
        precision = make_precision(self.arm, device=str(device))
        self._half_dtype = precision.half_dtype
        if optimizers and all(any(one is known for known in self._optimizers) for one in optimizers):
            # An evaluation after a training passes its optimizers again; weights that the arm has cast are cast.
            if not self._casts_weights() or not any(
                param.dtype is self._half_dtype for param in model.parameters()
            ):
                (model,), _ = precision.prepare([model], [])
                self._arm_precision = precision
            return model, optimizers, lr_schedulers
        self._guards = guard_rules.install_in_mode(self._mode)
        self.steps = StepCounter(self._record)
        self._arm_precision = precision
        models, self._optimizers = precision.prepare([model], optimizers)
        return models[0], self._optimizers, lr_schedulers

    def convert_input(self, data: Any) -> Any:
        """Cast the floating-point tensors of a batch to the type of the weights."""
        dtype = self._half_dtype if self._casts_weights() else None
        if dtype is None:
            return data
        move = importlib.import_module("lightning_utilities.core.apply_func").apply_to_collection
        return move(data, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def _casts_weights(self) -> bool:
        return self.arm.roles is not None and self.arm.roles.weights != "fp32"

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Cast in a step of training, validation, test or prediction."""
        if self._arm_precision is None:
            yield
            return
        with self._arm_precision.autocast():
            yield

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Back-propagate the scaled loss."""
        assert self._arm_precision is not None
        self._loss = tensor.detach()
        stepped = self._optimizers if optimizer is None else [getattr(optimizer, "optimizer", optimizer)]
        waits = model.automatic_optimization and model.trainer.fit_loop._should_accumulate()
        with self._arm_precision.scale_loss(tensor, stepped, delay_unscale=waits) as scaled:
            model.backward(scaled, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, let callbacks and clipping see the gradients, and step or skip."""
        assert self._arm_precision is not None
        if isinstance(optimizer, LBFGS):
            raise UnsupportedCombination(
                f"LBFGS runs its closure several times in one step, which {self.arm} does not support; take "
                'precision="32-true" or "bf16-mixed" of Lightning'
            )
        result = closure()
        if result is None and model.automatic_optimization:  # the module skipped this batch
            return result
        self._arm_precision.unscale(optimizer)
        self._after_closure(model, optimizer)
        outcome = self._arm_precision.step(optimizer)
        self.steps.add_step(
            optimizer, applied=all(outcome.applied), loss_scales=tuple(outcome.loss_scales), loss=self._loss
        )
        return result

    def main_params(self, optimizer: Optimizer) -> Sequence[Tensor]:
        """Return what is stepped, master weights if the arm has them, with true gradients."""
        assert self._arm_precision is not None
        return self._arm_precision.unscale(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return arm and loss scales, also after the training has ended."""
        state = self._last_state if self._arm_precision is None else self._arm_precision.state_dict()
        return {"arm": str(self.arm), "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore loss scales.

        Raises:
            CheckpointError: they are of another arm.
        """
        if state_dict.get("arm") != str(self.arm):
            raise CheckpointError(
                f"the checkpoint is of {state_dict.get('arm')}, and this training of {self.arm}"
            )
        if self._arm_precision is not None:
            self._arm_precision.load_state_dict(state_dict["state"])

    def teardown(self) -> None:
        """End the record, the guards, and O1's patches of torch."""
        self.steps.close()
        if self._arm_precision is not None and self.steps.total:
            self._last_state = self._arm_precision.state_dict()
        if self._arm_precision is not None and self.arm.spec.calls_apex:
            importlib.import_module("ampcompare.apex.amp")._amp_state.close()
        self._arm_precision = None
        if self._guards is not None:
            self._guards.remove()
            self._guards = None
