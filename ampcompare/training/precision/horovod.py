"""Horovod's `DistributedOptimizer`: fp32 weights, gradients averaged over processes in fp32 or, compressed, in fp16.

For your own loop under `horovodrun`. With one process Horovod exchanges nothing.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.backends.horovod import LIBRARY
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.training.precision.base import (
    Prepared,
    StepOutcome,
    UnscaleOnce,
    applied_outcome,
    owned_params,
)


class Horovod(UnscaleOnce):
    """Horovod exchanges gradients, compressed or not, during the backward pass; reading them waits for it.

    It must know in advance how many backward passes are before each step.
    """

    def __init__(self, *, device: str = "cpu", compression: str = "none", passes: int = 1) -> None:
        super().__init__()
        self.hvd, library, version = LIBRARY.load("horovod")
        self.hvd.init()
        self.compression = getattr(self.hvd.Compression, compression)
        self.passes = passes
        self.packages = {library: version}

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        names = {
            id(param): f"{index}.{name}"
            for index, model in enumerate(models)
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

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        if delay_unscale and self.passes == 1:
            raise UnsupportedCombination(
                "Horovod must know in advance how many backward passes a step has: write horovod:passes=N for N "
                "micro-batches"
            )
        return nullcontext(loss)

    def _unscale(self, optimizer: Optimizer) -> None:
        optimizer.synchronize()  # type: ignore[attr-defined]  # waits for the gradients of the other processes

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        for optimizer in optimizers:
            if id(optimizer) in self._unscaled:
                with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                    optimizer.step()
            else:
                optimizer.step()
        self._note_optimizers_were_stepped(optimizers)
        return applied_outcome(len(optimizers))
