"""What one `amp.initialize` of a script has prepared, and where each optimizer is between two of its steps."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ampcompare.base.errors import ScalingError
from ampcompare.guards.events import GRADIENT_READS
from ampcompare.guards.location import Location, user_frames
from ampcompare.training.precision.base import Precision, StepOutcome, owned_params

__all__ = ["Parameters", "Session", "here", "leaves_of", "parameters_by_id"]

Parameters = Mapping[int, Mapping[int, Tensor]]


class _Stage(enum.Enum):
    """Of an optimizer's gradients, since its last step."""

    NONE = "no loss has reached them"
    DELAYED = "scaled, by a block with delay_unscale"
    SCALED = "scaled, to be unscaled at their first reader"
    UNSCALED = "true gradients"


def parameters_by_id(optimizers: Sequence[Any]) -> Parameters:
    """Return the parameters of each optimizer, by the id of the optimizer and their own."""
    return {id(one): {id(param): param for param in owned_params(one)} for one in optimizers}


def leaves_of(losses: Sequence[Tensor]) -> frozenset[int]:
    """Return the ids of the tensors whose gradients a backward pass of `losses` adds to."""
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    seen: set[Any] = set()
    leaves = {id(loss) for loss in losses if loss.grad_fn is None}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    return frozenset(leaves)


def here(problem: str) -> str:
    """Return a message that begins with the line of the script that is running."""
    frames = [Location(code.co_filename, line) for code, line in user_frames()]
    # Decorators of installed packages stand between the script and torch.
    own = [place for place in frames if "-packages" not in place.file]
    return f"{next(iter([*own, *frames]), 'the script')}: {problem}"


class Session:
    """Optimizers of one `initialize` with the precision that prepared them.

    An arm that neither scales nor keeps master weights has no stages: each call goes straight to the precision.

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

    @property
    def _staged(self) -> bool:
        return self._scales or self._has_masters

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
        reached = leaves_of(losses) if waiting else frozenset()
        for optimizer in waiting:
            if reached.isdisjoint(self._own[id(optimizer)]):
                continue
            if self._has_masters or self._stages[id(optimizer)] is _Stage.DELAYED:
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
        if self._has_masters:
            raise ScalingError(
                here(
                    f"optimizer.step without a scale_loss block since the last step; under {self._name} the gradients "
                    "reach the master weights through one. Put backward into `with amp.scale_loss(...)`"
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
        if self._has_masters:
            for param in self._own[id(optimizer)].values():
                param.grad = None
        if self._stages[id(optimizer)] in (_Stage.SCALED, _Stage.DELAYED):
            self._stages[id(optimizer)] = _Stage.NONE
            self._watch()
