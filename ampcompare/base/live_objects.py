"""Objects that live in this process, with those of libraries and of the user."""

import gc
from typing import TypeVar

T = TypeVar("T")


def live_objects_of(kind: type[T]) -> list[T]:
    """Return all objects of a class or of its subclasses that live in this process, those that are still made too."""
    # `type`: objects of libraries may answer `isinstance` by code of their own.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
