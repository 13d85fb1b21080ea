"""Hugging Face Accelerate: its `Accelerator` casts the forward pass, scales the loss and steps the optimizer.

All `Accelerator` objects of a process share one state, whose precision cannot be changed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.backends.accelerate import LIBRARY
from ampcompare.base.errors import BackendUnavailable
from ampcompare.base.tensors.cuda_casts import cast_as_on_cuda
from ampcompare.training.precision.base import Prepared
from ampcompare.training.precision.library_precision import LibraryPrecision


class Accelerate(LibraryPrecision):
    """What a script with `accelerator.prepare` and `accelerator.backward` does, except wrapping and moving models."""

    def __init__(self, *, device: str = "cpu", mixed_precision: str = "no") -> None:
        module, library, version = LIBRARY.load("accelerate")
        try:
            self.accelerator: Any = module.Accelerator(
                mixed_precision=mixed_precision,
                cpu=torch.device(device).type == "cpu",
                device_placement=False,
            )
        except (ValueError, ImportError) as error:
            first = str(error).strip().partition("\n")[0]
            raise BackendUnavailable(
                f"accelerate {version} refuses mixed_precision={mixed_precision}: {first}"
            ) from error
        self.device_type = torch.device(device).type
        super().__init__(f"accelerate:{mixed_precision}", {library: version}, scaler=self.accelerator.scaler)

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        self._refuse_several_optimizers(optimizers)
        # In evaluation mode Accelerate does not wrap models for several processes; `Parallel` does that.
        prepared = [self.accelerator.prepare_model(model, evaluation_mode=True) for model in models]
        return prepared, [self.accelerator.prepare_optimizer(optimizer) for optimizer in optimizers]

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        with cast_as_on_cuda(self.device_type, self.autocast_lists):  # what it computes again is cast alike
            self.accelerator.backward(loss)

    def _let_library_unscale(self, optimizer: Optimizer) -> None:
        self.accelerator.unscale_gradients(optimizer)
