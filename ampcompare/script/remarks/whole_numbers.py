"""Whole numbers that an arm rounds as it casts the inputs of a model, such as timesteps, positions and counts.

bf16 has all whole numbers up to 256, fp16 up to 2048: a timestep of 999 becomes 1000 in bf16, and may index past a
table.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.base.formatting import format_ordinal
from ampcompare.base.location import user_location
from ampcompare.base.tensors.products import dtype_name
from ampcompare.script.recording.recorder import RecordedSteps

CALLS = 32  # of models that are looked at: each look waits for the device
MAX_ELEMENTS = 4096


class RoundedWholeNumberWatch:
    """Notes the inputs whose whole numbers a cast to 16 bits changes.

    Attributes:
        seen: what was noted first; "" for nothing.
    """

    def __init__(self, arm: str, rows: RecordedSteps | None) -> None:
        self.seen = ""
        self._arm = arm
        self._rows = rows
        self._calls = 0
        self._noted: set[str] = set()

    def note_rounded_inputs(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        """Look at the inputs of a model that an arm casts to a 16-bit type."""
        if self._calls >= CALLS:
            return
        self._calls += 1
        for name, tensor in _named_input_tensors(module, args, kwargs):
            changed, column = _find_rounded_number_and_column(tensor, dtype)
            place = f"{column}{name} of {type(module).__name__}"
            if changed is not None and place not in self._noted:
                self._noted.add(place)
                text = (
                    f"{self._arm} casts the inputs of the model to {dtype_name(dtype)}, which rounds the whole numbers "
                    f"of {place}: {changed[0]:.0f} becomes {changed[1]:.0f}"
                )
                self.seen = self.seen or text
                if self._rows is not None:
                    apart = ", apart from the others," if column else ""
                    self._rows.add_rounding_remark(
                        f"{text}; pass them{apart} as integers, which nothing casts ({user_location()})"
                    )


def _named_input_tensors(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the inputs of a module with their names."""
    try:
        # of the class: an arm has put a function in the place of the model's own
        names = list(inspect.signature(type(module).forward).parameters)[1:]
    except (AttributeError, TypeError, ValueError):  # the first of a class of TorchScript
        names = []
    for at, value in enumerate(args):
        if isinstance(value, Tensor):
            yield names[at] if at < len(names) else f"the {format_ordinal(at + 1)} input", value
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            yield name, value


def _find_rounded_number_and_column(
    tensor: Tensor, dtype: torch.dtype
) -> tuple[tuple[float, float] | None, str]:
    """Return a whole number of a tensor and what rounding makes of it, or None, and "column N of " in front of a name.

    All numbers of the tensor are whole, or all of a column, as of labels that travel with the features.
    """
    is_wide = tensor.dtype in (torch.float32, torch.float64)
    if not is_wide or not 0 < tensor.numel() <= MAX_ELEMENTS or tensor.requires_grad:
        return None, ""
    values = tensor.detach()
    apart, whole = values.to(dtype).to(values.dtype) != values, values == values.round()
    column = ""
    if values.dim() > 1 and not bool(whole.all()):
        rounded = whole.flatten(0, -2).all(0) & apart.flatten(0, -2).any(0)
        number_of_column = int(rounded.double().argmax())
        column = f"column {number_of_column} of "
        values, apart, whole = (one[..., number_of_column] for one in (values, apart, whole))
    if not bool(apart.any()) or not bool(whole.all()):
        return None, ""
    number = values[apart].abs().max()
    return (float(number), float(number.to(dtype))), column
