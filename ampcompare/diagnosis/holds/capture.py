"""A precision around an arm's own that keeps the figures of the first update that is applied, and can add rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from ampcompare.diagnosis.observed import Enough
from ampcompare.diagnosis.step_watch import MAX_SKIPPED
from ampcompare.precision.base import Precision, StepOutcome
from ampcompare.precision.wrapper import PrecisionWrapper

__all__ = ["Capture", "Rounding"]


class Rounding:
    """Changes weights, inputs and the result of each module by one unit of rounding, up or down at random.

    What a step then deviates from itself is what rounding explains: the error of a perfect implementation of each
    module in a type of this precision and of any range.

    Args:
        unit: largest relative error of one rounding.
        seed: of the directions; torch's own random numbers are not used.
    """

    def __init__(self, unit: float, seed: int) -> None:
        self._unit = unit
        self._draws = torch.Generator().manual_seed(seed)

    def apply(self, value: Any) -> Any:
        """Return a value with its floating tensors changed."""
        return tree_map(self._changed, value)

    def _changed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        up = torch.randint(2, value.shape, generator=self._draws).to(value.device) * 2 - 1
        return value * (1 + self._unit * up).to(value.dtype)

    def install(self, models: Sequence[nn.Module]) -> None:
        """Change the weights of models, and from now on their inputs and the results of their innermost modules."""
        with torch.no_grad():
            for model in models:
                for param in model.parameters():
                    if param.is_floating_point():
                        param.copy_(self._changed(param))
                model.register_forward_pre_hook(lambda _, args, kwargs: self.apply((args, kwargs)), with_kwargs=True)
                for module in model.modules():
                    if not any(module.children()):
                        module.register_forward_hook(lambda _, args, output: self.apply(output))


class Capture(PrecisionWrapper):
    """Keeps loss, outputs and gradients of the first applied update, and raises `Enough` after the last one.

    Args:
        inner: the arm.
        steps: updates to make; up to 20 skipped ones are added.
        rounding: that is added to the models.

    Attributes:
        figures: fp32 tensors on the CPU, by name; empty until an update is applied.
        dtypes: that they had.
        modules: names of the modules that are running, the innermost last; where a step raised, those it was in.
    """

    def __init__(self, inner: Precision, steps: int, rounding: Rounding | None = None) -> None:
        super().__init__(inner)
        self.figures: dict[str, Tensor] = {}
        self.dtypes: dict[str, str] = {}
        self.modules: list[str] = []
        self.skipped = 0
        self._steps = steps
        self._rounding = rounding
        self._made = 0
        self._found: dict[str, Tensor] = {}  # of the present step
        self._names: dict[int, str] = {}
        self._params: list[list[str]] = []
        self._optimizers: list[Optimizer] = []

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        prefixes = ["" if len(models) == 1 else f"{type(model).__name__}:" for model in models]
        for prefix, model in zip(prefixes, models, strict=True):
            self._names |= {id(param): f"{prefix}{name}" for name, param in model.named_parameters()}
        for number, optimizer in enumerate(optimizers):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._params.append(
                [self._names.get(id(one), f"parameter {at} of optimizer {number}") for at, one in enumerate(params)]
            )
        if self._rounding is not None:
            self._rounding.install(models)
        prepared, stepped = super()._prepare(models, optimizers)
        for prefix, model in zip(prefixes, prepared, strict=True):
            self._follow(prefix, model)
        self._optimizers = list(stepped)
        return prepared, stepped

    def _follow(self, prefix: str, model: nn.Module) -> None:
        def entered(name: str) -> Any:
            return lambda module, args: self.modules.append(name)

        def left(module: nn.Module, args: Any, output: Any) -> None:
            self.modules.pop()

        def returned(module: nn.Module, args: Any, output: Any) -> None:
            for path, value in tree_flatten_with_path(output)[0]:
                if isinstance(value, Tensor) and value.is_floating_point():
                    self._found[f"{prefix}output{keystr(path)}"] = value.detach()

        for name, module in model.named_modules():
            module.register_forward_pre_hook(entered(f"{prefix}{name}"), prepend=True)
            module.register_forward_hook(left)
        model.register_forward_hook(returned)

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        self._keep_loss(loss, loss_id)
        inner = self.inner.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)
        with inner as scaled:
            yield scaled

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        self._keep_loss(loss, loss_id)
        self.inner.backward(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def _keep_loss(self, loss: Tensor, loss_id: int) -> None:
        self._found[f"loss {loss_id}" if loss_id else "loss"] = loss.detach()

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        if not self.figures:
            for optimizer in optimizers:
                self._keep_gradients(optimizer)
        outcome = self.inner.step(*optimizers)
        applied = all(outcome.applied)
        if applied and not self.figures:
            self.dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in self._found.items()}
            self.figures = {name: value.float().cpu() for name, value in self._found.items()}
        self._found = {}
        self._made += applied
        self.skipped += not applied
        if self._made >= self._steps or self.skipped > MAX_SKIPPED:
            raise Enough
        return outcome

    def _keep_gradients(self, optimizer: Optimizer) -> None:
        """Keep the gradients that an optimizer is about to use, divided by the loss scale."""
        place = next(at for at, one in enumerate(self._optimizers) if one is optimizer)
        params = self.inner.unscale(optimizer)
        for name, param in zip(self._params[place], params, strict=True):
            if param.grad is not None:
                grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                self._found[f"gradient of {name}"] = grad.detach().clone()
