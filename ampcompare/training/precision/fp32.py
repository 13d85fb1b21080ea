"""Plain single precision: nothing is cast and nothing is scaled; on request in TF32."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.optim import Optimizer

from ampcompare.base.errors import BackendUnavailable
from ampcompare.base.tensors.tf32 import Tf32Switches, set_tf32
from ampcompare.training.precision.base import NO_CONTEXT, Precision, Prepared

MIN_CAPABILITY = (8, 0)


def require_tf32(device: torch.device, asked_by: str) -> None:
    """Check that a device supports TF32, which an arm or option asks for; on any other the switch would do nothing.

    Args:
        device: on which fp32 products and convolutions run.
        asked_by: the arm or option as users write it, which the message names.

    Raises:
        BackendUnavailable: it is no CUDA device, or one below compute capability 8.0.
    """
    if device.type != "cuda":
        raise BackendUnavailable(
            f"{asked_by} asks for TF32, a mode of NVIDIA GPUs from compute capability 8.0, but the device is "
            f"{device}; leave it out, or use --device cuda"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise BackendUnavailable(
            f"{asked_by} asks for TF32, which needs compute capability 8.0, but {torch.cuda.get_device_name(device)} "
            f"has {capability[0]}.{capability[1]}; leave it out"
        )


class FP32(Precision):
    """The reference that the other backends are compared with: the defaults of `Precision`.

    TF32 for products and convolutions is on from `prepare` on, in the whole process; else torch's switches stay.
    """

    def __init__(self, *, device: str = "cpu", tf32: bool = False) -> None:
        if tf32:
            require_tf32(torch.device(device), "fp32:tf32")
        self.tf32 = tf32
        self._switches = Tf32Switches.read()

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        if self.tf32:
            set_tf32(True)
        return list(models), list(optimizers)

    def without_patches(self) -> AbstractContextManager[None]:
        return self._switches.switches_set_in_block() if self.tf32 else NO_CONTEXT

    def why_no_cuda_graph(self, optimizers: Sequence[Optimizer]) -> None:
        return None
