"""Lightning Fabric: `Fabric.setup_module` casts inputs, forward pass and outputs; its strategy scales and steps."""

import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.backends.fabric import LIBRARY
from ampcompare.base.errors import BackendUnavailable
from ampcompare.base.tensors.cuda_casts import cast_as_on_cuda
from ampcompare.training.precision.base import Prepared
from ampcompare.training.precision.library_precision import LibraryPrecision


class Fabric(LibraryPrecision):
    """What a script with `fabric.setup` and `fabric.backward` does on one device."""

    def __init__(self, *, device: str = "cpu", precision: str = "32-true") -> None:
        module, library, version = LIBRARY.load("fabric")
        self.wrappers: Any = importlib.import_module(f"{module.__name__}.wrappers")
        environments = importlib.import_module(f"{module.__name__}.plugins.environments")
        torch_device = torch.device(device)
        self.device_type = torch_device.type
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the ledger shows if it chose another precision
                self.fabric: Any = module.Fabric(
                    accelerator=torch_device.type,
                    devices=1 if torch_device.type == "cpu" else [torch_device.index or 0],
                    precision=precision,
                    # The caller starts processes: Fabric must not detect Slurm or torchrun.
                    plugins=environments.LightningEnvironment(),
                )
        except (ValueError, RuntimeError) as error:
            first = str(error).strip().partition("\n")[0]
            raise BackendUnavailable(f"{library} {version} refuses precision={precision}: {first}") from error
        self.plugin: Any = self.fabric.strategy.precision
        super().__init__(f"fabric:{precision}", {library: version}, getattr(self.plugin, "scaler", None))

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        self._refuse_several_optimizers(optimizers)
        prepared = [self.fabric.setup_module(model, move_to_device=False) for model in models]
        return prepared, [self.fabric.setup_optimizers(optimizer) for optimizer in optimizers]

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        # A module that Fabric has set up raises on a backward pass outside of fabric.backward unless this flag is set.
        self.wrappers._in_fabric_backward = True
        try:
            yield loss if self.scaler is None else self.scaler.scale(loss)
        finally:
            self.wrappers._in_fabric_backward = False

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        with cast_as_on_cuda(self.device_type, self.autocast_lists):  # what it computes again is cast alike
            self.fabric.backward(loss)

    def _let_library_unscale(self, optimizer: Optimizer) -> None:
        self.plugin.unscale_gradients(optimizer.optimizer)  # type: ignore[attr-defined]
