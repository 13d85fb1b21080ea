"""What stands for the objects of a file that is read without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcompare.base.errors import AmpCompareError, ConversionError
from ampcompare.base.formatting import printable

__all__ = ["DATA_ONLY", "LOGS", "Global", "NotPickled", "Opaque", "StoredTensor", "describe_fault", "reading"]

DATA_ONLY = frozenset(
    {
        "argparse.Namespace",
        "optparse.Values",
        "types.SimpleNamespace",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        "datetime.datetime",
        "datetime.timedelta",
        # the loss scalers in what FP16_Optimizer saves
        *(
            f"{package}.{scaler}"
            for package in ("apex", "ampcompare.apex")
            for scaler in (
                "amp.scaler.LossScaler",
                "fp16_utils.loss_scaler.LossScaler",
                "fp16_utils.loss_scaler.DynamicLossScaler",
            )
        ),
    }
)
"""Classes that only hold values, of the standard library and of Apex; these are carried, the class is not."""

LOGS = "mmengine.logging.history_buffer.HistoryBuffer"
"""Class of mmengine's logged losses, of which each of its checkpoints holds some. mmengine resumes without them."""

MAX_NAME = 120
MAX_FAULT = 120


class NotPickled(ValueError):
    """The bytes are not a pickle that a checkpoint may be; the message completes "the file cannot be read: ..."."""


@dataclass(eq=False, repr=False)
class Global:
    """A class or function by its name, not imported."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(eq=False, repr=False)
class Opaque:
    """An object that only calling `name` would make.

    Attributes:
        arguments: what it would be called with.
        state: what it would be given after; None where nothing.
        items, entries: what it would be filled with, as a dict or a list.
        receive: takes the state of an object that can be built from it.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    value: Any = None
    receive: Callable[[Opaque, Any], None] | None = None

    def __repr__(self) -> str:  # without its arguments, which may hold one another many times
        return f"<{self.name}>"


@dataclass(eq=False)
class StoredTensor:
    """A tensor whose elements still lie in the file.

    Attributes:
        storage: name of the bytes it looks into.
        stored: elements of the storage, as the pickle claims.
        offset: of its first element in the storage.
        device: where it was when it was saved.
        conjugate, negative: whether it is the conjugate or the negative of what is stored, which torch does lazily.
    """

    storage: str
    dtype: torch.dtype
    stored: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    conjugate: bool = False
    negative: bool = False

    @property
    def count(self) -> int:
        """Number of its elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@contextmanager
def reading(*path: object) -> Iterator[None]:
    """Turn what code raises on an entry of another shape into an error that names the entry.

    A file can hold anything under the keys that are read here, and to check each value before its use would double the
    code that uses it.

    Args:
        path: keys of the entry; nothing for the whole checkpoint.

    Raises:
        ConversionError: the block raised because a key, a type or a value is not as expected.
    """
    try:
        yield
    except AmpCompareError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        name = printable(".".join(map(str, path)), MAX_NAME) or "(all)"
        raise ConversionError(f"its entry {name} is damaged: {describe_fault(error)}") from None


def describe_fault(error: Exception) -> str:
    """Return what an exception says about the data, as one line: a KeyError alone is only the name of the key."""
    if isinstance(error, KeyError) and error.args:
        return f"it has no {printable(repr(error.args[0]), MAX_NAME)}"
    return printable(str(error), MAX_FAULT) or type(error).__name__
