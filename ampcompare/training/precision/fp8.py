"""fp8 products in linear layers by torchao, over a bf16 arm; emulated where the device has no fp8."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.backends.fp8 import ALIGNMENT, LIBRARY
from ampcompare.base.errors import BackendUnavailable, UnsupportedCombination
from ampcompare.training.precision.base import PrecisionWrapper, Prepared, make_precision
from ampcompare.training.precision.linear_products import MULTIPLYING

CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}  # of the kernels of `torch._scaled_mm`
MAX_NAMED = 8


class FP8(PrecisionWrapper):
    """Another arm, its options joined by `+`, whose linear layers multiply in fp8.

    `scaling` is "tensorwise" or "rowwise", as torchao's recipes are called. Layers are converted whose sizes are
    multiples of `align`; hardware needs multiples of 16.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        scaling: str = "tensorwise",
        over: str = "native:bf16",
        align: int = ALIGNMENT,
    ) -> None:
        float8, library, version = LIBRARY.load("fp8")
        self._float8: Any = float8
        inner = Arm.parse(over.replace("+", ","))
        super().__init__(make_precision(inner, device=device))
        self._over = str(inner)
        self._kept = list(filter(None, inner.keep_fp32.split("|")))
        self._scaling = scaling
        self._align = align
        self._device = torch.device(device)
        in_hardware = _has_fp8_kernels(self._device, scaling)
        if in_hardware and align % ALIGNMENT:
            raise BackendUnavailable(
                f"this GPU multiplies fp8 matrices whose sizes are multiples of {ALIGNMENT}, but align is {align}; "
                f"leave out align"
            )
        self.emulated = "" if in_hardware else "fp8"
        self.packages = {library: version}

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        converted = [self._convert_linear_layers(model) for model in models]
        layers = {layer for model in converted for layer in _converted_fp8_layers(model)}
        if not layers:
            raise UnsupportedCombination(
                f"fp8 converts linear layers whose sizes are multiples of {self._align}, and this model has none; use "
                f"{self._over} on it, or another model"
            )
        if self._device.type == "cpu":
            for layer in layers:
                layer.forward = functools.partial(_call_outside_autocast, layer.forward)
        prepared = super()._prepare(converted, optimizers)
        left = [text for model in converted for text in self._reasons_of_layers_left_out(model, layers)]
        if left:
            more = f" and {len(left) - MAX_NAMED} more" if len(left) > MAX_NAMED else ""
            self.notes = (*self.notes, f"fp8 is not in: {', '.join(left[:MAX_NAMED])}{more}")
        return prepared

    def _convert_linear_layers(self, model: nn.Module) -> nn.Module:
        fits = functools.partial(self._is_convertible_linear, self._modules_kept_in_fp32(model))
        recipe = self._float8.Float8LinearConfig.from_recipe_name(self._scaling)
        # The number of rows is that of the batch, and is padded where it is not a multiple of 16.
        config = dataclasses.replace(recipe, emulate=bool(self.emulated), pad_inner_dim=not self.emulated)
        converted: nn.Module = self._float8.convert_to_float8_training(
            model, config=config, module_filter_fn=fits
        )
        return converted

    def _modules_kept_in_fp32(self, model: nn.Module) -> set[nn.Module]:
        """Return the modules that the arm underneath keeps in fp32, and those inside of them."""
        kept: set[nn.Module] = set()
        for name, module in model.named_modules():
            names = (name, type(module).__name__)
            if any(fnmatchcase(one, pattern) for one in names for pattern in self._kept):
                kept.update(module.modules())
        return kept

    def _is_convertible_linear(self, kept: set[nn.Module], module: nn.Module, name: str) -> bool:
        # A subclass may use its weight without calling `forward`, as attention does with its projection.
        fits = type(module) is nn.Linear and not any(size % self._align for size in module.weight.shape)
        return fits and module not in kept

    def _reasons_of_layers_left_out(self, model: nn.Module, layers: Collection[nn.Module]) -> Iterator[str]:
        """Yield each module that multiplies and is not in `layers`, which are converted, with the reason."""
        for name, module in model.named_modules():
            if not isinstance(module, MULTIPLYING) or module in layers:
                continue
            if type(module) is nn.Linear and any(size % self._align for size in module.weight.shape):
                sizes = f"{module.in_features} to {module.out_features}"
                yield f"{name} ({sizes}, not multiples of {self._align})"
            else:
                yield f"{name} ({type(module).__name__})"


def _converted_fp8_layers(model: nn.Module) -> list[Any]:
    """Return the layers that were just converted: the arm underneath may replace `forward` again."""
    kind = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    return [module for module in model.modules() if isinstance(module, kind)]


def _has_fp8_kernels(device: torch.device, scaling: str) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY[scaling]


def _call_outside_autocast(forward: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Call a converted layer with a bf16 input, as torchao does by itself on a GPU.

    It knows the autocast of GPUs only. That of CPUs would round the operands of an emulated product a second time.
    """
    with torch.autocast("cpu", enabled=False):
        return forward(value.bfloat16())
