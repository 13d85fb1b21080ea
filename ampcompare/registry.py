"""Names to factories: a built-in table, completed by the entry points of installed packages."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from ampcompare.errors import BackendUnavailable, ConfigError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of `name -> "module:attribute"`; nothing is imported before it is asked for.

    Args:
        group: entry-point group that other packages add to.
        builtins: this package's own names.
    """

    def __init__(self, group: str, builtins: Mapping[str, str]) -> None:
        self.group = group
        self.builtins = dict(builtins)

    def names(self) -> dict[str, str]:
        """Return every name with its `module:attribute`, built-in ones first.

        Raises:
            ConfigError: an installed package registers a name that is already taken.
        """
        table = dict(self.builtins)
        for entry in entry_points(group=self.group):
            if entry.name in table:
                raise ConfigError(
                    f"the name {entry.name!r} in {self.group} is registered twice: by {table[entry.name]} and by "
                    f"{entry.value}; uninstall one of the two packages"
                )
            table[entry.name] = entry.value
        return table

    def get(self, name: str) -> Callable[..., T]:
        """Import and return the class or function that `name` stands for.

        Raises:
            ConfigError: unknown name.
            BackendUnavailable: it is registered and cannot be imported.
        """
        table = self.names()
        if name not in table:
            close = difflib.get_close_matches(name, table, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"unknown name {name!r}: {hint}known are {', '.join(table)}")
        module, _, attribute = table[name].partition(":")
        try:
            found: Callable[..., T] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise BackendUnavailable(
                f"{name!r} is registered as {table[name]} and cannot be imported: {error}"
            ) from error
        return found
