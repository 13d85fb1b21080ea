"""The contract of a backend: seven methods that make one training loop serve every number format."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.errors import PreparationError
from ampcompare.record import Effective, EngineInfo

__all__ = ["FixedOutcome", "Precision", "StepOutcome", "all_applied", "owned_params", "refuse_wrapped"]

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class StepOutcome(abc.ABC):
    """What one update did. Holding it costs next to nothing; reading a field may wait for the device."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def applied(self) -> tuple[bool, ...]:
        """Per optimizer, in the order passed to `step`: False means overflow, step skipped."""

    @property
    @abc.abstractmethod
    def loss_scales(self) -> tuple[float, ...]:
        """Per loss scaler, the scale after its update; empty where nothing is scaled."""


class FixedOutcome(StepOutcome):
    """An outcome that is known on the host when the step returns."""

    __slots__ = ("_applied", "_loss_scales")

    def __init__(self, applied: tuple[bool, ...], loss_scales: tuple[float, ...]) -> None:
        self._applied = applied
        self._loss_scales = loss_scales

    @property
    def applied(self) -> tuple[bool, ...]:
        return self._applied

    @property
    def loss_scales(self) -> tuple[float, ...]:
        return self._loss_scales


@functools.lru_cache(maxsize=64)
def all_applied(count: int, loss_scales: tuple[float, ...] = ()) -> StepOutcome:
    """Return the outcome of an update that no overflow can skip: one object for all steps alike."""
    return FixedOutcome((True,) * count, loss_scales)


class Precision(abc.ABC):
    """How numbers are stored and gradients kept finite.

    Per update: `autocast` and `backward` (or `scale_loss`) for each micro-batch and loss, `unscale` where gradients are
    read, then one `step` with all optimizers of the update. Models and optimizers go in as lists and come out as lists.
    """

    key: ClassVar[str]
    """Where the state lives in a checkpoint: "amp" (Apex), "scaler" (torch.amp), "precision" (no state to speak of)."""

    half_dtype: torch.dtype | None
    """The 16-bit type that this arm computes in; None where it computes in fp32 throughout."""

    engine: EngineInfo | None = None
    """Which implementation of `apex.amp` runs; None for the other backends."""

    effective: Effective | None = None
    """What really runs where another library decides it; None for the backends that run what they are asked."""

    @abc.abstractmethod
    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """Cast weights, make master weights, install hooks; call it once, on the device, before wrapping for DDP.

        Raises:
            PreparationError: a model is already wrapped, or models and optimizers cannot be prepared as they are.
        """

    @abc.abstractmethod
    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for the forward pass and the loss; never for the backward pass."""

    @abc.abstractmethod
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

    @abc.abstractmethod
    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        """Divide the gradients of `optimizer` by the loss scale, once per step.

        Returns:
            The tensors that `step` will update: fp32 master params under O2, else the model's own parameters. Each
            gradient has its parameter's shape and dtype, or is `None` where no loss reached it.
        """

    @abc.abstractmethod
    def step(self, *optimizers: Optimizer) -> StepOutcome:
        """Update the weights with all optimizers of this update at once, or skip those whose gradients overflowed."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return loss scales and counters: plain values only."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after `prepare`."""

    def loss_scales(self) -> tuple[float, ...]:
        """Return the present scale of each loss scaler; empty where nothing is scaled. May wait for the device."""
        return ()

    def weights_replaced(self) -> None:  # noqa: B027  most backends remember nothing
        """Forget what is remembered of the weights: they were written from outside, or an evaluation has ended."""

    def backward(self, loss: Tensor, optimizers: Sequence[Optimizer], **options: Any) -> None:
        """Back-propagate `loss`; takes the options of `scale_loss`."""
        with self.scale_loss(loss, optimizers, **options) as scaled_loss:
            scaled_loss.backward()


def refuse_wrapped(models: Sequence[nn.Module]) -> None:
    """Raise where a model is already wrapped for several processes or devices.

    Raises:
        PreparationError: naming the wrapper.
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
