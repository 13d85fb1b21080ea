"""Products in MXFP8 by torchao: by the kernel of a GPU that has one, else by torchao's own emulation; compared once.

Source: torchao 0.18 `prototype/mx_formats`; it is a prototype there.
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompare.backends.gemm import TORCHAO

CAPABILITY = (10, 0)  # of the kernels; 11 and 12 were not tried
ROWS, SUMMED = 16, 32  # multiples that the kernel takes


def has_mxfp8_kernel(device: torch.device) -> bool:
    """Return whether torchao multiplies MXFP8 by a kernel on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == CAPABILITY[0]


class TorchaoProducts:
    """Multiplies by torchao, and counts over one pass how many results differ from ampcompare's emulation.

    Attributes:
        kernels: whether a kernel has multiplied.
    """

    def __init__(self, scale: str) -> None:
        module, library, version = TORCHAO.load("engine=torchao of gemm")
        self._tensor: Any = module.MXTensor
        self._scale = importlib.import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode(
            scale
        )
        self._preference: Any = importlib.import_module(
            "torchao.quantization.quantize_.common.kernel_preference"
        ).KernelPreference
        self._name = f"{library} {version}"
        self._compared: list[Tensor] = []
        self._count = 0
        self.kernels = False

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Return `left (rows, n) @ right (columns, n)'` of bf16 operands, in bf16."""
        self.kernels = has_mxfp8_kernel(left.device)
        preference = self._preference.AUTO if self.kernels else self._preference.EMULATED
        a, b = (
            self._tensor.to_mx(
                _pad_to_kernel_multiples(one), torch.float8_e4m3fn, SUMMED, self._scale, preference
            )
            for one in (left, right)
        )
        product: Tensor = torch.mm(a, b.t())
        return product[: len(left), : len(right)].bfloat16()

    def count_differing_results(self, product: Tensor, emulated: Tensor) -> None:
        """Count results that are not those of the emulation."""
        is_other = (product != emulated) & ~(product.isnan() & emulated.isnan())
        self._compared.append(is_other.sum())
        self._count += product.numel()

    @property
    def multiplier_note(self) -> str:
        """What multiplied, and how much of it differs, in words; it waits for the device."""
        how = "its kernel" if self.kernels else "its emulation"
        different = int(sum(int(one) for one in self._compared))
        return (
            f"products by {self._name}, {how}: {different:,} of {self._count:,} results of the first pass differ from "
            "ampcompare's emulation"
        )


def _pad_to_kernel_multiples(x: Tensor) -> Tensor:
    """Return a matrix with zeros up to the multiples that a kernel takes."""
    return F.pad(x, (0, -x.shape[1] % SUMMED, 0, -x.shape[0] % ROWS)).contiguous()
