"""Saved activations in few bits: what autograd saves for the backward pass is quantized, and restored when used.

The forward pass, the weights, the loss and the optimizer are those of the inner arm; gradients contain the rounding
noise. It saves memory, and costs time. Source: ActNN (Chen et al. 2021), groups of values with a minimum and a step
each, rounded stochastically (unbiased); written here in plain torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.training.precision.base import PrecisionWrapper, Prepared, make_precision
from ampcompare.training.precision.device_generators import DeviceGenerators
from ampcompare.training.precision.stochastic_rounding import seed_of_step


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of floating point, packed."""

    codes: Tensor  # uint8; `8 // bits` values in each byte, padded to whole groups
    lows: Tensor  # fp32, of each group: value = low + code * step
    steps: Tensor
    bits: int
    shape: torch.Size
    dtype: torch.dtype
    channels_last: bool  # its memory format

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.codes.nbytes + self.lows.nbytes + self.steps.nbytes

    def unpack_tensor(self) -> Tensor:
        """Return the tensor; each value differs by less than a step of its group."""
        codes = self.codes
        if self.bits < 8:
            shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=codes.device)
            codes = (codes[:, :, None] >> shifts) & (2**self.bits - 1)
        values = torch.addcmul(self.lows[:, None], codes.flatten(1).float(), self.steps[:, None])
        flat = values.flatten()[: self.shape.numel()].to(self.dtype)
        if not self.channels_last:
            return flat.view(self.shape)
        batch, channels, height, width = self.shape
        return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)


def pack_tensor(tensor: Tensor, bits: int, group: int, generator: torch.Generator) -> PackedTensor:
    """Pack a floating-point tensor; a group with an infinity or a NaN is restored as NaN.

    Of `bits`, 2, 4 or 8; `group` values, a multiple of 4, share a minimum and a step.
    """
    channels_last = (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    flat = (tensor.permute(0, 2, 3, 1) if channels_last else tensor).reshape(-1).float()
    missing = -len(flat) % group
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    groups = flat.view(-1, group)
    lows, highs = groups.aminmax(dim=1)
    highest = 2**bits - 1
    steps = (highs - lows) / highest
    divisors = steps.clamp(min=torch.finfo(torch.float32).tiny)  # a group of equal values has a step of 0
    noise = torch.rand(groups.shape, generator=generator, device=groups.device)
    codes = ((groups - lows[:, None]) / divisors[:, None]).add_(noise).nan_to_num_(0.0).clamp_(0, highest)
    packed = codes.to(torch.uint8)
    if bits < 8:
        parts = packed.view(len(packed), -1, 8 // bits)
        packed = parts[..., 0].clone()
        for index in range(1, 8 // bits):
            packed |= parts[..., index] << (index * bits)
    return PackedTensor(packed, lows, steps, bits, tensor.shape, tensor.dtype, channels_last)


MIN_ELEMENTS = 1024  # smaller tensors, such as statistics of norms, are not worth packing
Saved = Tensor | PackedTensor


class SavedTensorPacker:
    """Packs what autograd saves of a forward pass, except parameters, small tensors and integers."""

    def __init__(self, bits: int, group: int, params: Sequence[Tensor], seed: int) -> None:
        self.bits = bits
        self.group = group
        self.params = params
        self.seed = seed
        self.forwards = 0
        self._generators = DeviceGenerators()
        self._packed: dict[int, tuple[StorageWeakRef, tuple[Any, ...], PackedTensor]] = {}
        self._weights: set[int] = set()
        self._shapes: set[tuple[int, ...]] = set()

    def begin_forward_pass(self) -> None:
        """Start a forward pass: its rounding depends on the seed and the number of forward passes before it."""
        self.forwards += 1
        self._generators.begin_step(self._seed_of_pass)
        self._packed.clear()
        self._weights = {param.untyped_storage().data_ptr() for param in self.params}
        self._shapes = {tuple(sorted(param.shape)) for param in self.params if param.dim() > 1}

    def pack(self, tensor: Tensor) -> Saved:
        """Return what is saved of a tensor; operations that save the same tensor share it."""
        if not self._is_worth_packing(tensor):
            return tensor
        storage = tensor.untyped_storage()
        view = (tensor._version, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        earlier = self._packed.get(storage.data_ptr())
        if earlier is not None and not earlier[0].expired() and earlier[1] == view:
            return earlier[2]
        generator = self._generators.generator_of(tensor.device, self._seed_of_pass)
        packed = pack_tensor(tensor, self.bits, self.group, generator)
        self._packed[storage.data_ptr()] = (StorageWeakRef(storage), view, packed)
        return packed

    @staticmethod
    def unpack(saved: Saved) -> Tensor:
        """Return the tensor."""
        return saved.unpack_tensor() if isinstance(saved, PackedTensor) else saved

    @property
    def _seed_of_pass(self) -> int:
        return seed_of_step("packed activations", self.seed, self.forwards)

    def _is_worth_packing(self, tensor: Tensor) -> bool:
        if not tensor.is_floating_point() or tensor.numel() < MIN_ELEMENTS:
            return False
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._weights or storage.nbytes() < tensor.nbytes:
            return False
        # Autocast's 16-bit copy of a weight has its shape or that of its transpose, and is not packed. An activation
        # that happens to have the shape of a weight is not packed either.
        return tensor.dtype is torch.float32 or tuple(sorted(tensor.shape)) not in self._shapes


class ActNN(PrecisionWrapper):
    """Another arm, its options joined by `+`, with packed saved activations."""

    def __init__(self, *, device: str = "cpu", bits: int = 2, group: int = 256, over: str = "fp32") -> None:
        super().__init__(make_precision(Arm.parse(over.replace("+", ",")), device=device))
        self.bits = bits
        self.group = group
        self.packer: SavedTensorPacker | None = None
        self._contexts: list[saved_tensors_hooks] = []
        self._forwards = 0

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        prepared, stepped = super()._prepare(models, optimizers)
        params = [param for model in prepared for param in model.parameters()]
        self.packer = SavedTensorPacker(self.bits, self.group, params, torch.initial_seed() % 2**31)
        self.packer.forwards = self._forwards
        for model in prepared:
            model.register_forward_pre_hook(self._begin_packing)
            model.register_forward_hook(self._end_packing, always_call=True)
        return prepared, stepped

    def _begin_packing(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            assert self.packer is not None
            self.packer.begin_forward_pass()
            context = saved_tensors_hooks(self.packer.pack, self.packer.unpack)
            context.__enter__()
            self._contexts.append(context)

    def _end_packing(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._contexts:
            self._contexts.pop().__exit__()

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "actnn_forwards": self.packer.forwards if self.packer else 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        inner_state = dict(state)
        self._forwards = int(inner_state.pop("actnn_forwards", 0))
        if self.packer is not None:
            self.packer.forwards = self._forwards
        self.inner.load_state_dict(inner_state)
