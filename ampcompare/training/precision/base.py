"""The contract of a backend: the methods through which one training loop supports every number format."""

import abc
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import require_unique_backend
from ampcompare.backends.options import DTYPES
from ampcompare.base.errors import BackendUnavailable, ConfigError, PreparationError
from ampcompare.results.records.run import EngineInfo

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
NO_CONTEXT: AbstractContextManager[None] = nullcontext()  # one for all: entering it keeps no state
MAX_PENDING = 1024
Prepared = tuple[list[nn.Module], list[Optimizer]]
"""Models and optimizers, ready to be trained."""
Outcome = tuple[tuple[bool, ...], tuple[float, ...]]
"""`applied` and `loss_scales` of a step."""


class StepOutcome(abc.ABC):
    """The outcome of one update. Creating it is nearly free; reading a field may wait for the device."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def applied(self) -> tuple[bool, ...]:
        """Per optimizer, in the order passed to `step`: False means overflow, step skipped."""

    @property
    @abc.abstractmethod
    def loss_scales(self) -> tuple[float, ...]:
        """Per loss scaler, the scale after its update; empty if nothing is scaled."""


@dataclass(slots=True, eq=False)
class FixedOutcome(StepOutcome):
    """An outcome that is known on the host when the step returns."""

    applied: tuple[bool, ...]
    loss_scales: tuple[float, ...]


@functools.lru_cache(maxsize=64)
def applied_outcome(count: int, loss_scales: tuple[float, ...] = ()) -> StepOutcome:
    """Return the outcome of an update that is never skipped; equal updates share one object.

    Args:
        count: how many optimizers it stepped.
        loss_scales: one for each loss scaler; none without one.
    """
    return FixedOutcome((True,) * count, loss_scales)


class Precision:
    """How numbers are stored and how gradients are kept finite. The defaults are fp32: nothing is cast or scaled.

    Per update: `autocast` and `backward` (or `scale_loss`) for each micro-batch and loss, `unscale` where gradients are
    read, then one `step` with all optimizers of the update. Models and optimizers are passed and returned as lists. A
    subclass overrides only what differs; its `prepare` work belongs in `_prepare`.
    """

    key: ClassVar[str] = "precision"
    """Where the state lives in a checkpoint: "amp" (Apex), "scaler" (torch.amp), "precision" (little or no state)."""

    half_dtype: torch.dtype | None = None
    """The 16-bit type that this arm computes in; None if it computes in fp32 throughout."""

    engine: EngineInfo | None = None
    """Which implementation of `apex.amp` runs; None for the other backends."""

    packages: Mapping[str, str] = MappingProxyType({})
    """Versions of the libraries that train in the place of ampcompare, by distribution."""

    kept_fp32: tuple[str, ...] = ()
    """Names of the modules that `keep_fp32` keeps in fp32, known once the models are prepared."""

    state_dtype: torch.dtype | None = None
    """The dtype of the optimizers' state between steps; None if it is that of the tensors they step."""

    added_state: tuple[str, ...] = ()
    """What is kept in the state of each 16-bit parameter besides the optimizer's own: tensors of its shape and type."""

    steps_copies: bool = False
    """Whether optimizers step other tensors than the model's parameters: master weights, or copies made for a step."""

    emulated: str = ""
    """A format that the device lacks, so this arm computes in a wider one and rounds; "" if there is none."""

    autocast_lists: str = "cuda"
    """Whose casts `torch.autocast` makes on a CPU: those of "cuda", or the "cpu"'s own."""

    device_type: str = ""
    """The type of the device that `torch.autocast` is for; "" for arms without it."""

    notes: tuple[str, ...] = ()
    """Notes on this arm and model for readers of the record; complete after `prepare`."""

    _outcome: StepOutcome = applied_outcome(0)

    def expect_losses(self, count: int) -> None:
        """Receive the number of losses of an update; called before `prepare`. The default has one scaler for all."""

    @final
    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        """Cast weights, make master weights, install hooks; call it once, on the device, before wrapping for DDP.

        Args:
            models: on their device, not wrapped.
            optimizers: with the parameters of these models.

        Raises:
            PreparationError: a model is already wrapped, or models and optimizers cannot be prepared as they are.
        """
        # Checked here for all backends: DDP records dtypes, and casts after wrapping corrupt gradients.
        refuse_wrapped(models)
        return self._prepare(models, optimizers)

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        """Do the work of `prepare` on models that are not wrapped."""
        return list(models), list(optimizers)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for the forward pass and the loss; never for the backward pass."""
        return NO_CONTEXT

    def without_patches(self) -> AbstractContextManager[None]:
        """Return a context in which other models compute as in plain torch, even if `prepare` patched the process."""
        return NO_CONTEXT

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        """Yield the loss to call `backward` on.

        Args:
            loss: the loss, of one element.
            optimizers: those whose parameters receive gradients from it.
            loss_id: which loss scaler, for several losses.
            delay_unscale: True on all but the last micro-batch of an accumulation.
        """
        return nullcontext(loss)

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        """Back-propagate a loss.

        Args:
            loss: the loss, of one element.
            optimizers: those whose parameters receive gradients from it.
            loss_id: which loss scaler, for several losses.
            delay_unscale: True on all but the last micro-batch of an accumulation.
        """
        with self.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale) as scaled_loss:
            scaled_loss.backward()

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        """Divide the gradients of `optimizer` by the loss scale, once per step.

        Returns:
            The tensors that `step` will update: fp32 master params under O2, else the model's own parameters. Each
            gradient has its parameter's shape and dtype, or is `None` if no loss reached it.
        """
        return owned_params(optimizer)

    def masters(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        """Return each weight of the model in whose place `optimizer` has another tensor at present, with that.

        Both have one shape.
        """
        return []

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        """Update the weights with all optimizers of this update at once, or skip those whose gradients overflowed."""
        for optimizer in optimizers:
            optimizer.step()
        self._outcome = applied_outcome(len(optimizers), self.loss_scales())
        return self._outcome

    def state_dict(self) -> dict[str, Any]:
        """Return loss scales and counters: plain values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after `prepare`."""

    def loss_scales(self) -> tuple[float, ...]:
        """Return the present scale of each loss scaler; empty if nothing is scaled. May wait for the device."""
        return ()

    def weights_replaced(self) -> None:
        """Drop cached copies of the weights, after they were written from outside or an evaluation ended."""

    def why_no_cuda_graph(self, optimizers: Sequence[Optimizer]) -> str | None:
        """Return why a step with these optimizers cannot be recorded as a CUDA graph; None if it can."""
        # A backend opts in: a host read that a subclass adds to a step would fail while a graph is captured.
        return "this arm does not support CUDA graphs"

    def capturing(self) -> AbstractContextManager[None]:
        """Return the context in which a step is recorded: `step` launches work, and its outcome must not be used."""
        return NO_CONTEXT

    def replayed_outcome(self) -> StepOutcome:
        """Return the outcome of a replay, just launched, of the step that was recorded last.

        The default is the outcome of the recorded step, which is right if no step is ever skipped.
        """
        return self._outcome


def refuse_wrapped(models: Sequence[nn.Module]) -> None:
    """Refuse models that are already wrapped for several processes or devices.

    Raises:
        PreparationError: one is.
    """
    for model in models:
        if isinstance(model, WRAPPERS):
            raise PreparationError(
                f"a model is already wrapped in {type(model).__name__}, which records dtypes; "
                "call prepare first and wrap what it returns"
            )


def owned_params(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of `optimizer`, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def learning_rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group; 1 for an optimizer that has none, such as a line search."""
    return float(group.get("lr", 1.0))


class PrecisionWrapper(Precision):
    """Passes every call of an update to the precision inside, prepared or not; a subclass overrides what it varies.

    CUDA graphs are not passed on: a wrapper that supports them overrides `why_no_cuda_graph`, `capturing` and
    `replayed_outcome`.
    """

    def __init__(self, inner: Precision) -> None:
        self.inner = inner
        # with its key: checkpoints hold the state of the inner precision
        for name in Precision.__annotations__:
            if name != "_outcome":
                setattr(self, name, getattr(inner, name))

    def expect_losses(self, count: int) -> None:
        self.inner.expect_losses(count)

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        prepared = self.inner.prepare(models, optimizers)
        self.kept_fp32 = self.inner.kept_fp32
        self.notes = self.inner.notes
        return prepared

    def autocast(self) -> AbstractContextManager[None]:
        return self.inner.autocast()

    def without_patches(self) -> AbstractContextManager[None]:
        return self.inner.without_patches()

    def see_loss(self, loss: Tensor, loss_id: int) -> None:
        """Look at a loss, before its backward pass begins; a subclass that watches overrides it.

        Args:
            loss: unscaled, of one element.
            loss_id: which loss scaler, for several losses.
        """

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        self.see_loss(loss, loss_id)
        return self.inner.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        self.see_loss(loss, loss_id)
        self.inner.backward(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        return self.inner.unscale(optimizer)

    def masters(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        return self.inner.masters(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        return self.inner.step(*optimizers)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def loss_scales(self) -> tuple[float, ...]:
        return self.inner.loss_scales()

    def weights_replaced(self) -> None:
        self.inner.weights_replaced()


class UnscaleOnce(Precision, abc.ABC):
    """A precision whose `unscale` changes gradients: the first call of a step does, the others return the parameters.

    `step` of a subclass ends with `_note_optimizers_were_stepped`.
    """

    def __init__(self) -> None:
        self._unscaled: set[int] = set()

    @abc.abstractmethod
    def _unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients of `optimizer` to their true size."""

    def _note_optimizers_were_stepped(self, optimizers: Sequence[Optimizer]) -> None:
        """Note that these optimizers were stepped: their next gradients are not unscaled."""
        self._unscaled.difference_update(map(id, optimizers))

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        if id(optimizer) not in self._unscaled:
            self._unscale(optimizer)
            self._unscaled.add(id(optimizer))
        return owned_params(optimizer)


class LateStepOutcomes:
    """Keeps the device scalars of steps, and resolves the steps in order when one of them is read."""

    def __init__(self) -> None:
        self._pending: list[_LateOutcome] = []

    def outcome_of_step(
        self, scalars: Sequence[Tensor], resolve: Callable[[list[float]], Outcome]
    ) -> StepOutcome:
        """Return the outcome of a step, which `resolve` makes from the values of its scalars, after all earlier steps.

        The scalars have the shape () and one device and dtype; nothing may write to them afterwards.
        """
        outcome = _LateOutcome(self, scalars, resolve)
        self._pending.append(outcome)
        if len(self._pending) > MAX_PENDING:  # a loop that never reads its outcomes must not keep them all
            self.read_pending_outcomes()
        return outcome

    def read_pending_outcomes(self) -> None:
        """Read all pending scalars in one transfer, and resolve their steps."""
        scalars = [scalar for outcome in self._pending for scalar in outcome.scalars]
        values = torch.stack(scalars).tolist() if scalars else []
        start = 0
        for outcome in self._pending:
            end = start + len(outcome.scalars)
            outcome.resolve(values[start:end])
            start = end
        self._pending.clear()


class _LateOutcome(StepOutcome):
    __slots__ = ("_outcomes", "_resolve", "_resolved", "scalars")

    def __init__(
        self, outcomes: LateStepOutcomes, scalars: Sequence[Tensor], resolve: Callable[[list[float]], Outcome]
    ) -> None:
        self._outcomes = outcomes
        self._resolve = resolve
        self._resolved: Outcome | None = None
        self.scalars = scalars

    def resolve(self, values: list[float]) -> None:
        self._resolved = self._resolve(values)
        del self._resolve, self._outcomes
        self.scalars = ()

    def _read_outcome(self) -> Outcome:
        if self._resolved is None:
            self._outcomes.read_pending_outcomes()
            assert self._resolved is not None
        return self._resolved

    @property
    def applied(self) -> tuple[bool, ...]:
        return self._read_outcome()[0]

    @property
    def loss_scales(self) -> tuple[float, ...]:
        return self._read_outcome()[1]


def half_dtype_of(arm: Arm) -> torch.dtype | None:
    """Return the 16-bit type that an arm declares to compute in, as torch has it; None if it declares none."""
    dtype: torch.dtype | None = getattr(torch, DTYPES[arm.half]) if arm.half else None
    return dtype


def make_precision(
    arm: str | Arm, *, device: str = "cpu", autocast_lists: str = "cuda", **options: Any
) -> Precision:
    """Build the precision of an arm.

    Args:
        arm: an arm's text such as `apex:O2,loss_scale=128`, an `Arm`, or a backend's name with its options as keywords.
        device: where the models are; Apex and autocast depend on it.
        autocast_lists: what `torch.autocast` casts on a CPU: what it casts on "cuda", or the "cpu"'s own lists.
        options: further options of the backend.

    Raises:
        ConfigError: unknown backend or option.
        BackendUnavailable: the backend cannot work here.
    """
    arm = Arm.parse(arm) if isinstance(arm, str) else arm
    if options:
        arm = arm.with_options(**options)
    factory = _import_implementation(arm)
    if autocast_lists not in ("cuda", "cpu"):
        raise ConfigError(f"autocast_lists is {autocast_lists!r}; it is cuda or cpu")
    try:
        precision = factory(device=device, **arm.options)
    except TypeError as error:
        raise ConfigError(f"arm {arm} does not fit its backend: {error}") from error
    part: Any = precision
    while part is not None:
        part.autocast_lists = autocast_lists
        part = getattr(part, "inner", None)
    return precision


def _import_implementation(arm: Arm) -> Callable[..., Precision]:
    """Import the class or function that builds the arm."""
    require_unique_backend(arm.backend)
    module, _, attribute = arm.spec.implementation.partition(":")
    try:
        implementation: Callable[..., Precision] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            f"{arm.backend!r} is registered as {arm.spec.implementation} and cannot be imported: {error}"
        ) from error
    return implementation
