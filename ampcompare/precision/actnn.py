"""Saved activations in few bits: what autograd keeps for the backward pass is packed, and unpacked when it is used.

The forward pass, the weights, the loss and the optimizer are those of the arm underneath; gradients carry the noise of
the rounding. Only memory is gained: packing costs time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from ampcompare.arm import Arm
from ampcompare.precision.base import Precision, StepOutcome
from ampcompare.precision.factory import make_precision
from ampcompare.precision.quantized import Quantized, quantize
from ampcompare.record import Effective
from ampcompare.version import __version__

__all__ = ["ActNN", "Packer"]

SMALLEST = 1024  # elements; statistics of norms and the like gain nothing
Saved = Tensor | Quantized


class Packer:
    """Packs what autograd saves of a forward pass; parameters, small tensors and those not of floating point stay.

    Args:
        bits, group: as for `quantize`.
        params: of the models.
        seed: of the rounding.
    """

    def __init__(self, bits: int, group: int, params: Sequence[Tensor], seed: int) -> None:
        self.bits = bits
        self.group = group
        self.params = params
        self.seed = seed
        self.forwards = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._known: dict[int, tuple[StorageWeakRef, tuple[Any, ...], Quantized]] = {}
        self._weights: set[int] = set()
        self._shapes: set[tuple[int, ...]] = set()

    def begin(self) -> None:
        """Begin a forward pass: its rounding follows from the seed and from how many there were before."""
        self.forwards += 1
        for generator in self._generators.values():
            generator.manual_seed(self._draw)
        self._known.clear()
        self._weights = {param.untyped_storage().data_ptr() for param in self.params}
        self._shapes = {tuple(sorted(param.shape)) for param in self.params if param.dim() > 1}

    def pack(self, tensor: Tensor) -> Saved:
        """Return what is kept of a tensor; several operations that save the same one share it."""
        if not self._worth(tensor):
            return tensor
        storage = tensor.untyped_storage()
        view = (tensor._version, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        known = self._known.get(storage.data_ptr())
        if known is not None and not known[0].expired() and known[1] == view:
            return known[2]
        packed = quantize(tensor, self.bits, self.group, self._generator(tensor.device))
        self._known[storage.data_ptr()] = (StorageWeakRef(storage), view, packed)
        return packed

    @staticmethod
    def unpack(saved: Saved) -> Tensor:
        """Return the tensor."""
        return saved.restore() if isinstance(saved, Quantized) else saved

    @property
    def _draw(self) -> int:
        return self.seed * 2**32 + self.forwards

    def _worth(self, tensor: Tensor) -> bool:
        if not tensor.is_floating_point() or tensor.numel() < SMALLEST:
            return False
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._weights or storage.nbytes() < tensor.nbytes:
            return False
        # Autocast's copy of a weight has its shape, or that of its transpose. Another tensor of a weight's shape
        # stays as it is too.
        return tensor.dtype is torch.float32 or tuple(sorted(tensor.shape)) not in self._shapes

    def _generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device; its own, so that dropout draws what it draws without."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._draw)
        return self._generators[device]


class ActNN(Precision):
    """Another arm, whose saved activations are packed.

    Args:
        bits: 2, 4 or 8 for each value.
        group: values that share a minimum and a step.
        over: the arm underneath, its options joined by `+`.
    """

    def __init__(self, *, device: str = "cpu", bits: int = 2, group: int = 256, over: str = "fp32") -> None:
        arm = Arm.parse(over.replace("+", ","))
        self.inner = make_precision(arm, device=device)
        self.bits = bits
        self.group = group
        self.key = self.inner.key  # type: ignore[misc] # of the arm underneath: its state is kept as without
        self.half_dtype = self.inner.half_dtype
        self.engine = self.inner.engine
        self.effective = self.inner.effective or Effective(arm=str(arm), library="ampcompare", version=__version__)
        self.packer: Packer | None = None
        self._contexts: list[saved_tensors_hooks] = []
        self._forwards = 0

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        prepared, stepped = self.inner.prepare(models, optimizers)
        params = [param for model in prepared for param in model.parameters()]
        self.packer = Packer(self.bits, self.group, params, torch.initial_seed() % 2**31)
        self.packer.forwards = self._forwards
        for model in prepared:
            model.register_forward_pre_hook(self._enter)
            model.register_forward_hook(self._leave, always_call=True)
        return prepared, stepped

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            assert self.packer is not None
            self.packer.begin()
            context = saved_tensors_hooks(self.packer.pack, self.packer.unpack)
            context.__enter__()
            self._contexts.append(context)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._contexts:
            self._contexts.pop().__exit__()

    def autocast(self) -> AbstractContextManager[None]:
        return self.inner.autocast()

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return self.inner.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def backward(self, loss: Tensor, optimizers: Sequence[Optimizer], **options: Any) -> None:
        self.inner.backward(loss, optimizers, **options)

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        return self.inner.unscale(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        return self.inner.step(*optimizers)

    def loss_scales(self) -> tuple[float, ...]:
        return self.inner.loss_scales()

    def weights_replaced(self) -> None:
        self.inner.weights_replaced()

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "actnn_forwards": self.packer.forwards if self.packer else 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rest = dict(state)
        self._forwards = int(rest.pop("actnn_forwards", 0))
        if self.packer is not None:
            self.packer.forwards = self._forwards
        self.inner.load_state_dict(rest)
