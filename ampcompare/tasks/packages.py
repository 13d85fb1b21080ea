"""Packages that only some tasks need, imported when one of these is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ampcompare.base.errors import BackendUnavailable

__all__ = ["needs_package"]


@contextmanager
def needs_package(purpose: str, package: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that says what to install.

    Args:
        purpose: the beginning of the message, such as "digits need".
        package: its name, by which pip finds it too.

    Raises:
        BackendUnavailable: an import failed.
    """
    try:
        yield
    except ImportError as error:
        raise BackendUnavailable(
            f"{purpose} {package}, which cannot be imported ({error}): pip install {package.lower()}"
        ) from error
