"""Name the entry of a checkpoint that is not what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ampcompare.base.errors import AmpCompareError, ConversionError
from ampcompare.base.formatting import printable

__all__ = ["describe_fault", "reading"]

MAX_NAME = 120
MAX_FAULT = 120


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
