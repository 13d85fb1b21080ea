"""Loops that train a small model until they are stopped."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Loop = Callable[[Any], None]


def sgd(params: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def loop_of(
    make: Callable[[], nn.Module],
    loss_of: Callable[[Any, int], Tensor],
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    after_backward: Callable[[Tensor, int], Any] = lambda loss, step: None,
    steps: int | None = None,
) -> Loop:
    """Return a loop over some steps, or over as many as are asked for.

    Args:
        loss_of: returns a loss from the model and the number of the step.
        after_backward: called with the loss and the number of the step.
    """

    def loop(precision: Any) -> None:
        model = make()
        (model,), (stepped,) = precision.prepare([model], [optimizer(model.parameters())])
        for step in itertools.count() if steps is None else range(steps):
            with precision.autocast():
                loss = loss_of(model, step)
            precision.backward(loss, [stepped])
            after_backward(loss, step)
            precision.step(stepped)
            stepped.zero_grad()

    return loop
