"""Lightning Fabric: `Fabric.setup_module` casts inputs, forward pass and outputs; its strategy scales and steps."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.adapters import load, twin_of
from ampcompare.errors import BackendUnavailable
from ampcompare.precision.base import refuse_wrapped
from ampcompare.precision.library import ByLibrary

__all__ = ["Fabric"]


class Fabric(ByLibrary):
    """What a script with `fabric.setup` and `fabric.backward` does on one device.

    Args:
        precision: as `Fabric` takes it; `effective` says what became of it.

    Raises:
        BackendUnavailable: Fabric is not installed, or refuses the precision on this device.
    """

    def __init__(self, *, device: str = "cpu", precision: str = "32-true") -> None:
        module, library, version = load("fabric")
        self.wrappers: Any = importlib.import_module(f"{module.__name__}.wrappers")
        environments = importlib.import_module(f"{module.__name__}.plugins.environments")
        place = torch.device(device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it takes another precision is in `effective`
                self.fabric: Any = module.Fabric(
                    accelerator=place.type,
                    devices=1 if place.type == "cpu" else [place.index or 0],
                    precision=precision,
                    # Processes are the caller's: Fabric is not to look for Slurm or torchrun.
                    plugins=environments.LightningEnvironment(),
                )
        except (ValueError, RuntimeError) as error:
            first = str(error).strip().partition("\n")[0]
            raise BackendUnavailable(f"{library} {version} refuses precision={precision}: {first}") from error
        self.plugin: Any = self.fabric.strategy.precision
        super().__init__(
            "fabric",
            precision,
            twin_of("fabric", str(self.plugin.precision)),
            library=library,
            version=version,
            scaler=getattr(self.plugin, "scaler", None),
        )

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        refuse_wrapped(models)
        if self.scaler is not None:
            self._refuse_several(optimizers)
        prepared = [self.fabric.setup_module(model, move_to_device=False) for model in models]
        return prepared, [self.fabric.setup_optimizers(optimizer) for optimizer in optimizers]

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        # A module that was set up refuses a backward pass outside of fabric.backward, which it tells by this flag.
        self.wrappers._in_fabric_backward = True
        try:
            yield loss if self.scaler is None else self.scaler.scale(loss)
        finally:
            self.wrappers._in_fabric_backward = False

    def backward(self, loss: Tensor, optimizers: Sequence[Optimizer], **options: Any) -> None:
        self.fabric.backward(loss)

    def _unscale_once(self, optimizer: Optimizer) -> None:
        self.plugin.unscale_gradients(optimizer.optimizer)  # type: ignore[attr-defined]

    def _step(self, optimizer: Optimizer) -> None:
        optimizer.step()
