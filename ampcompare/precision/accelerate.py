"""Hugging Face Accelerate: its `Accelerator` casts the forward pass, scales the loss and steps the optimizer.

An `Accelerator` is one per process: its state is shared by all of them, and cannot change its precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.adapters import load
from ampcompare.errors import BackendUnavailable
from ampcompare.precision.base import refuse_wrapped
from ampcompare.precision.library import ByLibrary

__all__ = ["Accelerate"]


class Accelerate(ByLibrary):
    """What a script with `accelerator.prepare` and `accelerator.backward` does, but for wrapping and placing models.

    Args:
        mixed_precision: "no", "fp16" or "bf16", as `Accelerator` takes it; `effective` says what became of it.

    Raises:
        BackendUnavailable: Accelerate is not installed, or holds another precision in this process already.
    """

    def __init__(self, *, device: str = "cpu", mixed_precision: str = "no") -> None:
        module, library, version = load("accelerate")
        try:
            self.accelerator: Any = module.Accelerator(
                mixed_precision=mixed_precision, cpu=torch.device(device).type == "cpu", device_placement=False
            )
        except (ValueError, ImportError) as error:
            first = str(error).strip().partition("\n")[0]
            raise BackendUnavailable(
                f"accelerate {version} refuses mixed_precision={mixed_precision}: {first}"
            ) from error
        found = "native:bf16" if self.accelerator.mixed_precision == "bf16" else "native:fp16"
        super().__init__(
            "accelerate",
            mixed_precision,
            found if self.accelerator.native_amp else "fp32",
            library=library,
            version=version,
            scaler=self.accelerator.scaler,
        )

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        refuse_wrapped(models)
        if self.scaler is not None:
            self._refuse_several(optimizers)
        # In evaluation mode Accelerate leaves the wrapping for several processes to the caller.
        prepared = [self.accelerator.prepare_model(model, evaluation_mode=True) for model in models]
        return prepared, [self.accelerator.prepare_optimizer(optimizer) for optimizer in optimizers]

    def backward(self, loss: Tensor, optimizers: Sequence[Optimizer], **options: Any) -> None:
        self.accelerator.backward(loss)

    def _unscale_once(self, optimizer: Optimizer) -> None:
        self.accelerator.unscale_gradients(optimizer)

    def _step(self, optimizer: Optimizer) -> None:
        optimizer.step()
