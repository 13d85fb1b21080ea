"""Horovod's `DistributedOptimizer`: fp32 weights, gradients averaged over processes in fp32 or, compressed, in fp16.

For a loop of one's own under `horovodrun`. Where Horovod runs one process it exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.adapters import load
from ampcompare.errors import UnsupportedCombination
from ampcompare.precision.base import Precision, StepOutcome, all_applied, owned_params, refuse_wrapped
from ampcompare.record import Effective

__all__ = ["Horovod"]


class Horovod(Precision):
    """Gradients are exchanged by Horovod while the backward pass runs, and awaited where they are read.

    Args:
        compression: "none" or "fp16", of what is sent.
        passes: backward passes before each step, which Horovod must know beforehand.

    Raises:
        BackendUnavailable: Horovod is not installed, or was not built for this torch.
    """

    key = "precision"
    half_dtype = None

    def __init__(self, *, device: str = "cpu", compression: str = "none", passes: int = 1) -> None:
        self.hvd, library, version = load("horovod")
        self.hvd.init()
        self.compression = getattr(self.hvd.Compression, compression)
        self.passes = passes
        self.effective = Effective(arm="fp32", library=library, version=version)
        self._null: AbstractContextManager[None] = nullcontext()
        self._awaited: set[int] = set()

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        refuse_wrapped(models)
        names = {
            id(param): f"{place}.{name}"
            for place, model in enumerate(models)
            for name, param in model.named_parameters()
        }
        for model in models:
            self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        wrapped = []
        for optimizer in optimizers:
            self.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            wrapped.append(
                self.hvd.DistributedOptimizer(
                    optimizer,
                    named_parameters=[(names[id(param)], param) for param in owned_params(optimizer)],
                    compression=self.compression,
                    backward_passes_per_step=self.passes,
                )
            )
        return list(models), wrapped

    def autocast(self) -> AbstractContextManager[None]:
        return self._null

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        if delay_unscale and self.passes == 1:
            raise UnsupportedCombination(
                "Horovod must know beforehand how many backward passes a step has: write horovod:passes=N for N "
                "micro-batches"
            )
        return nullcontext(loss)

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        if id(optimizer) not in self._awaited:
            optimizer.synchronize()  # type: ignore[attr-defined]
            self._awaited.add(id(optimizer))
        return owned_params(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        for optimizer in optimizers:
            if id(optimizer) in self._awaited:
                with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                    optimizer.step()
            else:
                optimizer.step()
        self._awaited.clear()
        return all_applied(len(optimizers))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
