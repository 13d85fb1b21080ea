"""mmengine's optimizer wrappers, as mmcls trains with them: `OptimWrapper`, and `AmpOptimWrapper` for 16 bits."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.backends.mmengine import LIBRARY
from ampcompare.base.errors import BackendUnavailable
from ampcompare.training.precision.base import NO_CONTEXT, Prepared
from ampcompare.training.precision.library_precision import LibraryPrecision


class MMEngine(LibraryPrecision):
    """The wrapper around each optimizer does the work; the loop keeps the bare optimizer.

    float32 is `OptimWrapper`; float16 and bfloat16 are `AmpOptimWrapper`, which scales the loss with both, on GPUs
    only.
    """

    def __init__(self, *, device: str = "cpu", dtype: str = "float32") -> None:
        self.module, library, version = LIBRARY.load("mmengine")
        self.dtype = dtype
        super().__init__(f"mmengine:{dtype}", {library: version})
        if self.half_dtype is not None and torch.device(device).type == "cpu":
            raise BackendUnavailable(
                "AmpOptimWrapper of mmengine runs on a GPU only; take mmengine:fp32 or native:bf16 on a CPU"
            )
        self._models: list[nn.Module] = []
        self._wrappers: dict[int, Any] = {}

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        self._models = list(models)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch.cuda.amp.GradScaler, which it makes
            self._wrappers = {
                id(optimizer): self._make_optimizer_wrapper(optimizer) for optimizer in optimizers
            }
        if self.half_dtype is not None:
            self._follow_loss_scaler(self._wrappers[id(optimizers[0])].loss_scaler)
            self._refuse_several_optimizers(optimizers)
        return list(models), list(optimizers)

    def _make_optimizer_wrapper(self, optimizer: Optimizer) -> Any:
        if self.half_dtype is None:
            return self.module.OptimWrapper(optimizer=optimizer)
        return self.module.AmpOptimWrapper(loss_scale="dynamic", dtype=self.dtype, optimizer=optimizer)

    def autocast(self) -> AbstractContextManager[None]:
        if self.half_dtype is None:
            return NO_CONTEXT
        context: AbstractContextManager[None] = next(iter(self._wrappers.values())).optim_context(
            self._models[0]
        )
        return context

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        self._wrappers[id(optimizers[0])].backward(loss)

    def _let_library_unscale(self, optimizer: Optimizer) -> None:
        assert self.scaler is not None
        self.scaler.unscale_(optimizer)

    def _let_library_step(self, optimizer: Optimizer) -> None:
        self._wrappers[id(optimizer)].step()
