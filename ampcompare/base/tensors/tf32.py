"""TF32, a switch of the process for products and convolutions of fp32, by torch's older and newer switches alike.

torch 2.9 added `fp32_precision` next to `allow_tf32`. Reading an older switch raises a RuntimeError once a newer one
has contradicted it; setting both kinds keeps either readable, whichever the script uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


def set_tf32(on: bool) -> None:
    """Switch TF32 on or off for fp32 matrix products and convolutions of this process."""
    precision = "tf32" if on else "ieee"
    Tf32Switches(precision, precision, precision).set_switches()


@dataclass(frozen=True)
class Tf32Switches:
    """What torch's switches say, in the words of the newer ones: `tf32`, `ieee`, or `none` for the default."""

    products: str
    convolutions: str
    recurrent: str  # which the older switch joins with convolutions

    @classmethod
    def read(cls) -> Tf32Switches:
        """Return the switches as they are; no script's way of setting them makes this raise."""
        backends: Any = torch.backends
        if hasattr(backends.cuda.matmul, "fp32_precision"):
            leaves = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
            return cls(*(leaf.fp32_precision for leaf in leaves))
        of_cudnn = "tf32" if backends.cudnn.allow_tf32 else "ieee"
        return cls("tf32" if backends.cuda.matmul.allow_tf32 else "ieee", of_cudnn, of_cudnn)

    def set_switches(self) -> None:
        """Set the switches of both kinds."""
        backends: Any = torch.backends
        backends.cuda.matmul.allow_tf32 = self.products == "tf32"
        backends.cudnn.allow_tf32 = self.convolutions == "tf32"
        if hasattr(backends.cuda.matmul, "fp32_precision"):
            backends.cuda.matmul.fp32_precision = self.products
            backends.cudnn.conv.fp32_precision = self.convolutions
            backends.cudnn.rnn.fp32_precision = self.recurrent

    @contextmanager
    def switches_set_in_block(self) -> Iterator[None]:
        """Set the switches, and put them back as they were on exit."""
        before = Tf32Switches.read()
        self.set_switches()
        try:
            yield
        finally:
            before.set_switches()
